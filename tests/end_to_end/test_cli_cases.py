"""Starting `octavo serve` as users really do: missing models, absurd limits, broken folders, aliases, a bare GGUF."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from server_process import ServerProcess
from tiny_models import tiny_model


def refused(model: Path | str, *flags: str) -> tuple[int, str]:
    """Exit code and output of a start that must fail by itself, without a bare traceback."""
    with ServerProcess(model, *flags, expect_ready=False) as server:
        code = server.wait(90)
        printed = "\n".join(server.lines)
        assert code > 0 and printed and "Traceback" not in printed
        assert not server.url
        return code, printed


def test_a_missing_model_is_named_at_once():
    assert "/no/such/model" in refused("/no/such/model")[1]


@pytest.mark.parametrize("value", ["0", "-5", "1", "abc", "100000000"])
def test_bad_context_limits_are_refused(tiny, value):
    code, printed = refused(tiny, "--max-model-len", value)
    assert code == 2 and ("--max-model-len" in printed)


@pytest.fixture(scope="module")
def sharded(tiny, tmp_path_factory) -> Path:
    folder = tiny_model(
        "llama", tmp_path_factory.mktemp("sharded") / "model", vocab_size=512, max_shard_size="100KB"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder / name)
    return folder


def lose_a_shard(folder: Path) -> str:
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    return shard.name


def cut_in_half(folder: Path) -> str:
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    return shard.name


def claim_a_huge_header(folder: Path) -> str:
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.write_bytes((2**60).to_bytes(8, "little") + shard.read_bytes()[8:])
    return shard.name


def misfit_a_shape(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    return "mlp."


def lose_the_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").unlink()
    return "tokenizer"


def lose_the_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json"


@pytest.mark.parametrize(
    "harm",
    [lose_a_shard, cut_in_half, claim_a_huge_header, misfit_a_shape, lose_the_tokenizer, lose_the_config],
    ids=lambda harm: harm.__name__,
)
def test_a_broken_folder_is_refused_with_its_reason(
    sharded: Path, tmp_path: Path, harm: Callable[[Path], str]
):
    folder = shutil.copytree(sharded, tmp_path / "broken")
    named = harm(folder)
    code, printed = refused(folder)
    assert code == 1 and named in printed.splitlines()[-1]


def test_aliases_are_listed_accepted_and_echoed_and_nothing_else_is(tiny):
    with ServerProcess(tiny, "--threads", "1", "--served-model-name", "alpha", "beta") as server:
        listed = [m["id"] for m in httpx.get(f"{server.url}/v1/models").json()["data"]]
        assert listed == ["alpha", "beta"]
        for name, status in (("alpha", 200), ("beta", 200), ("gamma", 404), (str(tiny), 404)):
            body = {"model": name, "prompt": "Hi", "max_tokens": 1}
            reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert reply.status_code == status
            assert reply.json()["model"] == name if status == 200 else reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Hello, my name is", 5),
        ("1234567890", 10),
        ("  two  spaces\n\ttab", 7),
        ("<|im_start|>user\nHi<|im_end|>\n", 6),
        ("don't you're I'LL", 7),
        ("🎉 日本語 naïve 👩\u200d🚀 ď 한국어", 31),
    ],
)
def test_a_bare_gguf_counts_tokens_as_the_original_tokenizer_does(real_server, text, count):
    # Counts by an independent implementation of SmolLM2's byte-level BPE.
    body = {"model": "smollm2", "prompt": text, "max_tokens": 1}
    reply = httpx.post(f"{real_server.url}/v1/completions", json=body, timeout=60).json()
    assert reply["usage"]["prompt_tokens"] == count


def test_a_bare_gguf_answers_sensibly(real_server):
    body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    assert (
        "Paris"
        in httpx.post(f"{real_server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    )


def test_the_http_process_maps_neither_torch_nor_transformers(real_server):
    maps = Path(f"/proc/{real_server.process.pid}/maps").read_text()
    assert (
        "libtorch" not in maps
        and "/torch/" not in maps
        and "libtorch" in Path(f"/proc/{real_server.engine_pid()}/maps").read_text()
    )
