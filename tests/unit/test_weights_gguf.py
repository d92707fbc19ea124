"""GGUF files: the same model as its origin, every supported type, and one line for what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.gguf_source import SUPPORTED_TYPES
from refusals import fault, opens_or_refuses
from tiny_models import tiny_gguf, tiny_model

QUANTISED = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
K_QUANTS = ["Q4_K", "Q5_K", "Q6_K"]
# Where the float16 scales of a block are, in a block of each K type; they must be finite for the rest to mean anything.
K_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama folder; not to be changed."""
    return tiny_model("llama", tmp_path_factory.mktemp("weights") / "llama")


@pytest.mark.parametrize(
    "kind", ["llama", "llama31", "llama_untied", "llama_biased", "mistral", "qwen2", "qwen3"]
)
def test_a_gguf_file_tells_the_same_as_the_folder_it_was_made_from(kind: str, tmp_path: Path) -> None:
    folder = open_checkpoint(tiny_model(kind, tmp_path))
    file = open_checkpoint(tiny_gguf(tmp_path, tmp_path / "tiny.gguf"))
    assert set(file.source.names()) == set(folder.source.names())
    for name in folder.source.names():
        assert torch.equal(file.source.tensor(name, torch.float32), folder.source.tensor(name, torch.float32))
    given, got = folder.spec, file.spec
    same = replace(got, name=given.name, digest=given.digest, rms_norm_eps=given.rms_norm_eps)
    # Mistral files are llama files with a window; llama 3 files hold divisors instead of the recipe.
    same = replace(same, architecture=given.architecture, rope_scaling=given.rope_scaling)
    assert same == given and got.rms_norm_eps == pytest.approx(given.rms_norm_eps)
    assert (got.rope_scaling is None) == (given.rope_scaling is None)


@pytest.mark.parametrize("quantisation", QUANTISED)
def test_every_type_that_can_be_written_decodes_as_the_gguf_package_does(
    quantisation: str, llama: Path, tmp_path: Path
) -> None:
    kind = GGMLQuantizationType[quantisation]
    checkpoint = open_checkpoint(tiny_gguf(llama, tmp_path / "tiny.gguf", quantisation))
    tensors = load_file(llama / "model.safetensors")
    for name in (EMBEDDING, "model.layers.1.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        original = tensors[name]
        # Rows keep their bytes when they are reordered, so quantising our order row by row is the same.
        expected = torch.from_numpy(
            gguf.quants.dequantize(gguf.quants.quantize(original.numpy(), kind), kind)
        )
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(checkpoint.source.tensor(name, dtype), expected.to(dtype))
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    assert checkpoint.dtype == plain.get(quantisation, torch.float32)


@pytest.mark.parametrize("quantisation", K_QUANTS)
def test_k_quants_decode_as_the_gguf_package_does(quantisation: str, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[quantisation]
    rng = np.random.default_rng(1)
    rows, columns, block_bytes = 512, 512, gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (rows, columns // 256, block_bytes), dtype=np.uint8)
    for at in K_SCALES[quantisation]:
        blocks[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
    data = blocks.reshape(rows, -1)
    file = _gguf_of(tmp_path / "k.gguf", {"token_embd.weight": (data, kind)}, embedding_length=512)
    got = open_checkpoint(file).source.tensor(EMBEDDING, torch.float32)
    assert torch.equal(got, torch.from_numpy(gguf.quants.dequantize(data, kind)))
    assert got.isfinite().all()


def test_the_list_of_supported_types_is_what_is_tested() -> None:
    assert sorted(SUPPORTED_TYPES) == sorted(QUANTISED + K_QUANTS)


def test_unsupported_types_are_named(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.TQ2_0
    data = gguf.quants.quantize(np.ones((8, 256), dtype=np.float32), kind)
    error = fault(_gguf_of(tmp_path / "t.gguf", {"token_embd.weight": (data, kind)}, embedding_length=256))
    assert error.tensor == "token_embd.weight" and "TQ2_0" in str(error) and "Q4_K" in str(error)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "mamba"}, ["'mamba'", "llama, qwen2, qwen3"]),
        ({"expert_count": 8}, ["mixture of experts"]),
        ({"rope_dimension_count": 8}, ["rope.dimension_count 8"]),
        ({"rope_scaling_type": gguf.RopeScalingType.YARN}, ["'yarn'", "linear"]),
        ({"head_count_kv": [1, 2, 1]}, ["head_count_kv is [1, 2, 1]", "integer"]),
    ],
)
def test_a_gguf_model_that_cannot_be_served_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    embedding = (np.ones((8, 64), dtype=np.float32), GGMLQuantizationType.F32)
    error = fault(_gguf_of(tmp_path / "x.gguf", {"token_embd.weight": embedding}, **changes))
    for word in words:
        assert word in str(error)


def test_a_tensor_that_no_supported_model_has_is_not_ignored(tmp_path: Path) -> None:
    data = (np.ones((8, 64), dtype=np.float32), GGMLQuantizationType.F32)
    file = _gguf_of(tmp_path / "x.gguf", {"token_embd.weight": data, "blk.0.attn_sinks.weight": data})
    assert fault(file).tensor == "blk.0.attn_sinks.weight"


def test_divisors_that_do_not_fit_the_head_size_are_refused(tmp_path: Path) -> None:
    file = tiny_gguf(tiny_model("llama31", tmp_path / "folder"), tmp_path / "tiny.gguf")
    data, entry = file.read_bytes(), b"rope_freqs.weight" + (1).to_bytes(4, "little")
    assert data.count(entry + (8).to_bytes(8, "little")) == 1
    file.write_bytes(data.replace(entry + (8).to_bytes(8, "little"), entry + (4).to_bytes(8, "little")))
    assert "rope_freqs.weight has 4 divisors; a head size of 16 needs 8" in str(fault(file))


def test_a_name_that_is_not_text_does_not_reach_the_message_as_it_is(tmp_path: Path) -> None:
    data = (np.ones((8, 64), dtype=np.float32), GGMLQuantizationType.F32)
    assert r"'blk.0.\n'" in str(
        fault(_gguf_of(tmp_path / "x.gguf", {"token_embd.weight": data, "blk.0.\n": data}))
    )


def test_a_truncated_gguf_file_names_the_tensor_that_is_cut(llama: Path, tmp_path: Path) -> None:
    file = tiny_gguf(llama, tmp_path / "tiny.gguf", "Q8_0")
    file.write_bytes(file.read_bytes()[:-5000])
    error = fault(file)
    assert error.file == str(file) and error.tensor and "truncated" in str(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 3000), value=st.integers(0, 255), cut=st.none() | st.integers(0, 4000))
def test_damaged_gguf_files_either_load_or_say_so(
    llama: Path, tmp_path: Path, position: int, value: int, cut: int | None
) -> None:
    whole = tmp_path / "whole.gguf"
    if not whole.exists():
        tiny_gguf(llama, whole, "Q4_0")
    content = bytearray(whole.read_bytes())
    content[position] = value
    (tmp_path / "damaged.gguf").write_bytes(content[:cut])
    opens_or_refuses(tmp_path / "damaged.gguf")


def _gguf_of(
    file: Path,
    tensors: dict[str, tuple[np.ndarray[Any, Any], GGMLQuantizationType]],
    *,
    architecture: str = "llama",
    embedding_length: int = 64,
    rope_dimension_count: int | None = None,
    **more: Any,
) -> Path:
    """A GGUF file with these tensors and the metadata of a small model; `more` calls add_<key>(value) of the writer."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(3)
    writer.add_context_length(128)
    writer.add_embedding_length(embedding_length)
    writer.add_feed_forward_length(160)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    if rope_dimension_count:
        writer.add_rope_dimension_count(rope_dimension_count)
    for key, value in more.items():
        getattr(writer, f"add_{key}")(value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
