"""Streamed text is the text of all tokens, and no piece of it ends inside a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer
from octavo.weights.tokenizer_files import prepare_tokenizer
from tiny_tokenizers import BYTE_SPELLINGS, byte_level_pairs, sentencepiece_pairs, smollm2_gguf, write_gguf

# In byte_level_pairs: three control tokens, then the bytes in the order of their spellings.
BYTE_IDS = {spelling: 3 + i for i, spelling in enumerate(BYTE_SPELLINGS)}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_gguf(tmp_path_factory.mktemp("m") / "m.gguf", byte_level_pairs())
    return Tokenizer(prepare_tokenizer(path))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_gguf(tmp_path_factory.mktemp("m") / "m.gguf", sentencepiece_pairs())
    return Tokenizer(prepare_tokenizer(path))


@pytest.fixture(scope="module")
def word_pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary whose tokens are not bytes: a token's text depends on whether it begins the text."""
    folder: Path = tmp_path_factory.mktemp("m")
    vocab = {token: i for i, token in enumerate(["[UNK]", "he", "##llo", "wor", "##ld", "a", "##b", "."])}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(prepare_tokenizer(folder))


def stream(
    tokenizer: Tokenizer, ids: list[int], skip: bool = True, prompt: list[int] | None = None
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, prompt_token_ids=prompt or ())
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]


@given(st.lists(st.integers(0, 264)), st.booleans())
def test_pieces_join_to_the_decoded_text(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(stream(byte_level, ids, skip)) == byte_level.decode(ids, skip_special_tokens=skip)


@given(
    st.lists(st.one_of(st.integers(0, 277), st.sampled_from([3 + 0xF0, 3 + 0x9F, 3 + 0x98, 3 + 0x80, 267])))
)
def test_sentencepiece_pieces_join_to_the_decoded_text(pieces: Tokenizer, ids: list[int]) -> None:
    assert "".join(stream(pieces, ids)) == pieces.decode(ids)


@given(st.text())
def test_valid_text_never_shows_a_replacement_and_never_half_a_character(
    byte_level: Tokenizer, text: str
) -> None:
    ids = [byte_level.encode(c, add_special_tokens=False) for c in text]
    shown = ""
    detokenizer = Detokenizer(byte_level, skip_special_tokens=False)
    for i, of_one in enumerate(ids):
        for token_id in of_one[:-1]:
            shown += detokenizer.push(token_id)
            assert shown == text[:i]
        shown += detokenizer.push(of_one[-1])
        assert shown == text[: i + 1]
    assert detokenizer.flush() == ""


def test_unfinished_character_is_a_replacement_only_at_the_end(byte_level: Tokenizer) -> None:
    first, second = byte_level.encode("é")
    assert stream(byte_level, [first]) == ["", "\ufffd"]
    assert stream(byte_level, [first, second]) == ["", "é", ""]
    assert stream(byte_level, [first, BYTE_IDS["A"]]) == ["", "\ufffdA", ""]


def test_control_tokens_are_hidden_or_spelled_out(byte_level: Tokenizer) -> None:
    assert stream(byte_level, [BYTE_IDS["A"], 2]) == ["A", "", ""]
    assert stream(byte_level, [BYTE_IDS["A"], 2], skip=False) == ["A", "<|im_end|>", ""]


def test_a_control_token_inside_a_character_does_not_break_it(byte_level: Tokenizer) -> None:
    first, second = byte_level.encode("é")
    assert stream(byte_level, [first, 2, second]) == ["", "", "é", ""]


def test_continuation_of_a_prompt_keeps_its_space(pieces: Tokenizer) -> None:
    hello = pieces.encode("hello", add_special_tokens=False)
    assert "".join(stream(pieces, hello)) == "hello"
    assert "".join(stream(pieces, hello, prompt=pieces.encode("w"))) == " hello"
    # BOS alone shows nothing, so the text begins after it.
    assert "".join(stream(pieces, hello, prompt=[1])) == "hello"


@given(st.lists(st.integers(0, 7), max_size=30), st.lists(st.integers(0, 7), max_size=10))
def test_vocabularies_without_bytes_are_streamed_too(
    word_pieces: Tokenizer, prompt: list[int], ids: list[int]
) -> None:
    assert word_pieces.decoding == "other"
    whole, before = word_pieces.decode(prompt + ids), word_pieces.decode(prompt)
    assert "".join(stream(word_pieces, ids, prompt=prompt)) == whole[len(before) :]


def test_real_vocabulary_streams_many_scripts() -> None:
    tokenizer = Tokenizer(prepare_tokenizer(smollm2_gguf()))
    text = "🎉 日本語 naïve 👩‍🚀 ď 한국어 नमस्ते\n\n  if x:\n\ty = 'z'"
    pieces = stream(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
