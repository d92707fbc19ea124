"""Tokenizers out of GGUF files and Hugging Face folders: right ids, a cache that is keyed by content, and clear errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ModelFileError, ValidationError
from octavo.text.tokenizer import Tokenizer
from octavo.weights.gguf_metadata import GgufMetadata
from octavo.weights.gguf_tokenizer import convert_gguf_tokenizer
from octavo.weights.tokenizer_files import prepare_tokenizer
from tiny_tokenizers import byte_level_pairs, sentencepiece_pairs, smollm2_gguf, write_folder, write_gguf

CASES = json.loads(
    (Path(__file__).parents[1] / "data" / "smollm2_token_ids.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer(prepare_tokenizer(smollm2_gguf()))


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("model"), byte_level_pairs())


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("model"), sentencepiece_pairs())


def load(folder: Path, pairs: dict[str, Any]) -> Tokenizer:
    return Tokenizer(prepare_tokenizer(write_gguf(folder / "model.gguf", pairs)))


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: ascii(case["text"])[:30])
def test_smollm2_ids_are_those_of_an_independent_encoder(smollm2: Tokenizer, case: dict[str, Any]) -> None:
    assert smollm2.encode(case["text"]) == case["ids"]


def test_smollm2_facts_are_read_from_the_gguf_file(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.special_token_id("<|im_end|>") == 2
    assert smollm2.special_token_id("Hello") is None
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.chat_template is not None and "SmolLM" in smollm2.chat_template
    assert not smollm2.adds_bos


def test_token_text_spells_control_tokens_and_shows_part_of_a_character_as_replacement(
    smollm2: Tokenizer,
) -> None:
    first, *_ = smollm2.encode("🎉")
    assert smollm2.token_text(first) == "\ufffd"
    assert b"".join(map(smollm2.token_bytes, smollm2.encode("🎉"))) == "🎉".encode()
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.token_text(smollm2.encode(" world")[0]) == " world"
    assert smollm2.decode([2, *smollm2.encode("Hi"), 2]) == "Hi"
    assert smollm2.decode([2, *smollm2.encode("Hi")], skip_special_tokens=False) == "<|im_end|>Hi"


def test_ids_that_name_no_token_are_no_text(smollm2: Tokenizer) -> None:
    assert smollm2.token_bytes(49152) == smollm2.token_bytes(-1) == b""
    assert smollm2.decode([49152, 10**9, *smollm2.encode("Hi")]) == "Hi"


def test_half_of_a_surrogate_pair_is_refused_with_its_place(smollm2: Tokenizer) -> None:
    with pytest.raises(ValidationError, match=r"ud83d.*character 2"):
        smollm2.encode("ab\ud83dc")


def test_other_threads_go_on_while_a_long_prompt_is_encoded(smollm2: Tokenizer) -> None:
    encoding, done = threading.Event(), threading.Event()
    turns_meanwhile = 0

    def encode() -> None:
        encoding.set()
        smollm2.encode("Hello world, this is a test. " * 20_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    encoding.wait()
    while not done.wait(0.001):
        turns_meanwhile += 1
    thread.join()
    # With the GIL held throughout, this thread would wake only when all is over.
    assert turns_meanwhile > 5


@given(st.text())
def test_byte_level_decode_undoes_encode(bytes_only: Tokenizer, text: str) -> None:
    assert bytes_only.decode(bytes_only.encode(text), skip_special_tokens=False) == text


@given(st.lists(st.integers(0, 263)), st.booleans())
def test_decode_by_bytes_equals_the_library(bytes_only: Tokenizer, ids: list[int], skip: bool) -> None:
    expected = bytes_only._backend.decode(ids, skip_special_tokens=skip)
    assert bytes_only.decode(ids, skip_special_tokens=skip) == expected


def test_sentencepiece_merges_follow_the_scores(pieces: Tokenizer) -> None:
    assert pieces.adds_bos
    assert [pieces.token_text(i) for i in pieces.encode("hello hell")] == ["<s>", " hello", " hell"]
    # No token for é: its two bytes.
    assert pieces.encode("é", add_special_tokens=False)[1:] == [3 + 0xC3, 3 + 0xA9]
    assert pieces.decode(pieces.encode("hello é w")) == "hello é w"


@given(st.text(alphabet="helo w/s>é🎉"))
def test_sentencepiece_decode_undoes_encode(pieces: Tokenizer, text: str) -> None:
    assert pieces.decode(pieces.encode(text)) == text


def test_sentencepiece_plain_text_never_merges_into_a_control_token(pieces: Tokenizer) -> None:
    assert 2 in pieces.encode("</s>")
    assert not pieces.special_ids & set(pieces.encode_with_literals("h①", {"①": "</s>"}))


def test_bos_is_added_once(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", adds_bos=True)
    tokenizer = Tokenizer(prepare_tokenizer(folder))
    assert tokenizer.adds_bos and tokenizer.bos_token_id == 256
    assert tokenizer.encode("a")[:2] == [256, tokenizer.encode("a", add_special_tokens=False)[0]]
    assert tokenizer.encode("<s>a") == tokenizer.encode("a")
    assert tokenizer.encode("<s><s>a") == [256, *tokenizer.encode("a")]


@pytest.mark.parametrize("has", [True, False])
@pytest.mark.parametrize("says", [True, False, None])
def test_add_bos_token_of_the_config_outranks_tokenizer_json(
    tmp_path: Path, has: bool, says: bool | None
) -> None:
    config = {} if says is None else {"add_bos_token": says}
    tokenizer = Tokenizer(prepare_tokenizer(write_folder(tmp_path / "m", config=config, adds_bos=has)))
    wanted = has if says is None else says
    assert tokenizer.adds_bos == wanted
    assert (tokenizer.encode("a")[0] == 256) == wanted


def test_folder_gives_end_tokens_and_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    folder = write_folder(tmp_path / "m", config={"chat_template": named})
    (folder / "generation_config.json").write_text('{"eos_token_id": [259, 257]}')
    tokenizer = Tokenizer(prepare_tokenizer(folder))
    assert tokenizer.eos_token_ids == (257, 259)
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("A", "B")
    (folder / "chat_template.jinja").write_text("C")
    assert Tokenizer(prepare_tokenizer(folder)).chat_template == "C"


def test_truncation_in_tokenizer_json_does_not_shorten_prompts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert len(Tokenizer(prepare_tokenizer(folder)).encode("abcdefgh")) == 8


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "a  1234 'S", ["a", "Ġ", "Ġ1234", "Ġ'", "S"]),
        ("smollm", "a  12 b", ["a", "ĠĠ", "1", "2", "Ġb"]),
        ("llama-bpe", "x 12345\n\n'S!", ["x", "Ġ", "123", "45", "ĊĊ", "'S", "!"]),
        ("qwen2", "x 123'll", ["x", "Ġ", "1", "2", "3", "'ll"]),
        ("tekken", "HelloWORLDx 12", ["Hello", "WORLDx", "Ġ", "1", "2"]),
    ],
)
def test_pre_tokenizer_of_the_file_cuts_words(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    metadata = GgufMetadata(write_gguf(tmp_path / "m.gguf", byte_level_pairs(pre)))
    cut = convert_gguf_tokenizer(metadata).backend.pre_tokenizer.pre_tokenize_str(text)
    assert [word for word, _ in cut] == words


def test_llama3_files_begin_with_bos_unless_they_say_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert load(tmp_path / "a", byte_level_pairs("llama-bpe")).adds_bos
    assert not load(tmp_path, byte_level_pairs("llama-bpe", add_bos_token=False)).adds_bos


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pre": "klingon"}, r"'klingon'; known: .*smollm"),
        ({"pre": None}, r"tokenizer\.ggml\.pre"),
        ({"model": "t5"}, r"'t5'; known kinds: gpt2, llama"),
        ({"model": None}, r"tokenizer\.ggml\.model"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"merges": ["h q1"]}, r"do not fit together"),
        ({"token_type": [1, 1]}, r"264 tokens but 2 token types"),
    ],
)
def test_unusable_gguf_tokenizer_names_what_is_wrong(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelFileError, match=named):
        load(tmp_path, byte_level_pairs(**changes))


def test_damaged_gguf_files_are_named(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", byte_level_pairs()).read_bytes()
    for length in (0, 3, 10, 30, 200, 1500, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            prepare_tokenizer(tmp_path / "cut.gguf")
    (tmp_path / "zip.gguf").write_bytes(b"PK\3\4" * 20)
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        prepare_tokenizer(tmp_path / "zip.gguf")


@given(st.binary(max_size=60), st.integers(0, 4000))
def test_metadata_reader_survives_any_bytes(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    whole = write_gguf(path, byte_level_pairs()).read_bytes()
    path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
    try:
        convert_gguf_tokenizer(GgufMetadata(path))
    except ModelFileError as e:
        assert "noise.gguf" in str(e)


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has no tokenizer: neither tokenizer\.json"):
        prepare_tokenizer(tmp_path)
    with pytest.raises(ModelFileError, match="is not there"):
        prepare_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        prepare_tokenizer(tmp_path)


def test_cache_is_keyed_by_content_not_by_path(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "a.gguf", byte_level_pairs())
    shutil.copy(first, tmp_path / "b.gguf")
    other = write_gguf(tmp_path / "c.gguf", byte_level_pairs(eos_token_id=0))
    requantized = write_gguf(tmp_path / "d.gguf", {"general.file_type": 7, **byte_level_pairs()})
    assert (
        prepare_tokenizer(first) == prepare_tokenizer(tmp_path / "b.gguf") == prepare_tokenizer(requantized)
    )
    assert prepare_tokenizer(other) != prepare_tokenizer(first)


def test_racing_conversions_leave_one_whole_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    source = write_gguf(tmp_path / "m.gguf", byte_level_pairs())
    start, found = threading.Barrier(4), []

    def convert() -> None:
        start.wait()
        found.append(prepare_tokenizer(source))

    threads = [threading.Thread(target=convert) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert [path.name for path in (tmp_path / "cache" / "tokenizers").iterdir()] == [found[0].name]
    Tokenizer(found[0])


def test_half_a_folder_in_the_cache_is_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    folder = prepare_tokenizer(write_folder(tmp_path / "m"))
    (folder / "settings.json").unlink()
    assert prepare_tokenizer(tmp_path / "m") == folder
    Tokenizer(folder)


def test_unwritable_cache_falls_back_to_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file" / "cache"))
    folder = prepare_tokenizer(write_folder(tmp_path / "m"))
    assert tmp_path not in folder.parents
    assert Tokenizer(folder).decode(Tokenizer(folder).encode("abc")) == "abc"


def test_preparing_and_loading_imports_no_tensor_library(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", byte_level_pairs())
    code = (
        "import sys; from octavo.weights.tokenizer_files import prepare_tokenizer;"
        "from octavo.text.tokenizer import Tokenizer; from octavo.text.chat_template import render_chat;"
        "render_chat(Tokenizer(prepare_tokenizer(sys.argv[1])), [{'role': 'user', 'content': 'hi'}]);"
        "bad = {'torch', 'numpy', 'transformers', 'gguf'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_folder_with_an_old_kind_of_tokenizer_is_converted_with_transformers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "whole")
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    old = tmp_path / "old"
    old.mkdir()
    vocab = {**content["model"]["vocab"], "ab": 256, "<|endoftext|>": 257}
    (old / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (old / "merges.txt").write_text("#version: 0.2\na b\n", encoding="utf-8")
    (old / "config.json").write_text('{"model_type": "gpt2"}')
    (old / "tokenizer_config.json").write_text(
        '{"eos_token": "<|endoftext|>", "tokenizer_class": "GPT2Tokenizer"}'
    )
    tokenizer = Tokenizer(prepare_tokenizer(old))
    assert tokenizer.encode("ab") == [256]
    assert tokenizer.eos_token_ids == (257,)
