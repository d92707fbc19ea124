"""Reading checkpoints: what is in them comes out, and what is wrong with them is one line that names it."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from octavo.errors import ModelFileError
from octavo.model_spec import ModelSpec, RopeScaling
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from refusals import fault, opens_or_refuses
from tiny_models import KINDS, tiny_gguf, tiny_model

EMBEDDING = "model.embed_tokens.weight"
LLAMA3_NUMBERS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

ConfigOf = Callable[..., Checkpoint]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama folder; not to be changed."""
    return tiny_model("llama", tmp_path_factory.mktemp("weights") / "llama")


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny llama to be broken."""
    return Path(shutil.copytree(llama, tmp_path / "broken"))


@pytest.fixture
def with_config(folder: Path) -> ConfigOf:
    """Opens the tiny llama with changed config fields; a value of ... removes the field."""

    def opened(**changes: Any) -> Checkpoint:
        file = folder / "config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
        return open_checkpoint(folder)

    return opened


# ---- safetensors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_tensors_that_safetensors_reads(kind: str, tmp_path: Path) -> None:
    folder = tiny_model(kind, tmp_path)
    checkpoint = open_checkpoint(folder)
    expected = load_file(folder / "model.safetensors")
    assert set(checkpoint.source.names()) == set(expected)
    assert checkpoint.dtype == torch.float32
    for name, tensor in expected.items():
        assert checkpoint.source.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.source.tensor(name, torch.float32), tensor)


def test_shards_give_the_same_tensors_as_one_file(llama: Path, tmp_path: Path) -> None:
    sharded = open_checkpoint(tiny_model("llama", tmp_path, max_shard_size="100KB")).source
    assert not (tmp_path / "model.safetensors").exists()
    whole = open_checkpoint(llama).source
    assert set(sharded.names()) == set(whole.names())
    for name in whole.names():
        assert torch.equal(sharded.tensor(name, torch.float32), whole.tensor(name, torch.float32))
    assert sharded.file_of(EMBEDDING).name.startswith("model-0000")


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_cast_on_load(folder: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    tensors = {n: t.to(stored) for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    source = open_checkpoint(folder).source
    for name in (EMBEDDING, "model.norm.weight"):
        read = source.tensor(name, wanted)
        assert read.dtype == wanted and torch.equal(read, tensors[name].to(wanted))


def test_a_tensor_that_was_read_is_the_reader_s_own(folder: Path) -> None:
    source = open_checkpoint(folder).source
    first = source.tensor(EMBEDDING, torch.float32)
    first.zero_()
    assert source.tensor(EMBEDDING, torch.float32).abs().sum() > 0


def test_a_missing_shard_is_named_with_what_it_held(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path, max_shard_size="100KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[2]
    lost.unlink()
    error = fault(tmp_path)
    assert error.file == str(lost) and "missing" in str(error) and "get the model again" in str(error)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path, max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    content["weight_map"]["model.extra.weight"] = shard.name
    index.write_text(json.dumps(content))
    error = fault(tmp_path)
    assert (error.file, error.tensor) == (str(shard), "model.extra.weight")


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "weights.bin", 7]
)
def test_an_index_cannot_lead_outside_its_folder(folder: Path, shard: object) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {EMBEDDING: shard}}))
    error = fault(folder)
    assert error.file == str(index) and repr(shard) in str(error)


def test_a_truncated_file_names_the_tensor_that_is_cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    error = fault(folder)
    assert error.file == str(file) and error.tensor and "truncated" in str(error)


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 10**9])
def test_an_absurd_header_length_is_refused_before_it_is_allocated(folder: Path, length: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    error = fault(folder)
    assert f"{length:,}" in str(error) and "truncated or not a safetensors file" in str(error)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**60]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4]},
        {"dtype": 5, "shape": [4], "data_offsets": [0, 16]},
        [1, 2],
        {"dtype": "I8", "shape": [16], "data_offsets": [0, 16]},
        {"dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16]},
    ],
)
def test_a_header_entry_that_lies_is_an_error(folder: Path, entry: object) -> None:
    header = json.dumps({EMBEDDING: entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert fault(folder).tensor == EMBEDDING


def test_a_name_that_is_not_text_does_not_reach_the_message_as_it_is(folder: Path) -> None:
    header = json.dumps({"a\nb": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert r"'a\nb'" in str(fault(folder))


@pytest.mark.parametrize("content", [b"", b"abc", b"\x04" + bytes(7) + b"{}{}", b"\x02" + bytes(7) + b"[]"])
def test_a_file_that_is_not_safetensors_is_an_error(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert fault(folder).file == str(folder / "model.safetensors")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 2500), value=st.integers(0, 255), cut=st.none() | st.integers(0, 4000))
def test_damaged_safetensors_either_load_or_say_so(
    llama: Path, folder: Path, position: int, value: int, cut: int | None
) -> None:
    content = bytearray((llama / "model.safetensors").read_bytes())
    content[position] = value
    (folder / "model.safetensors").write_bytes(content[:cut])
    opens_or_refuses(folder)


def test_pickled_weights_are_refused_with_the_reason(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "safetensors" in str(fault(folder)) and "pickled" in str(fault(folder))


def test_a_path_that_leads_to_no_model_says_what_to_give(tmp_path: Path) -> None:
    assert "config.json" in fault(tmp_path).file and "tokenizer.json" in str(fault(tmp_path))
    assert "no such file" in str(fault(tmp_path / "nowhere"))
    (tmp_path / "notes.txt").write_text("hello there, this is no model")
    assert "GGUF" in str(fault(tmp_path / "notes.txt"))


# ---- config.json ----------------------------------------------------------------------------------------------------


def test_the_spec_holds_what_the_config_says(llama: Path) -> None:
    spec = open_checkpoint(llama).spec
    assert replace(spec, digest="") == ModelSpec(
        architecture="llama",
        num_layers=3,
        hidden_size=64,
        intermediate_size=160,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        vocab_size=512,
        max_position=2048,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
        name="llama",
    )


@pytest.mark.parametrize("stretched", [False, True])
def test_both_spellings_of_rotary_settings_are_read(with_config: ConfigOf, stretched: bool) -> None:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 128) if stretched else None
    new = {"rope_type": "llama3", **LLAMA3_NUMBERS} if stretched else {"rope_type": "default"}
    spec = with_config(rope_parameters={"rope_theta": 5e5, **new}).spec
    assert (spec.rope_theta, spec.rope_scaling) == (5e5, scaling)
    old = {"rope_type": "llama3", **LLAMA3_NUMBERS} if stretched else None
    spec = with_config(rope_parameters=..., rope_theta=5e5, rope_scaling=old).spec
    assert (spec.rope_theta, spec.rope_scaling) == (5e5, scaling)
    spec = with_config(rope_scaling={"type": "linear", "factor": 4.0}).spec
    assert spec.rope_scaling == RopeScaling("linear", factor=4.0)


def test_end_tokens_of_both_configs_are_merged(with_config: ConfigOf, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert with_config().spec.eos_token_ids == (2, 7, 9)
    assert with_config(eos_token_id=[5, 7]).spec.eos_token_ids == (5, 7, 2, 9)
    (folder / "generation_config.json").unlink()
    assert with_config(eos_token_id=None, bos_token_id=None).spec.eos_token_ids == ()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_comes_from_the_config_or_else_from_the_weights(with_config: ConfigOf, key: str) -> None:
    assert with_config(**({"dtype": ...} | {key: "bfloat16"})).dtype == torch.bfloat16
    assert with_config(dtype=..., torch_dtype=...).dtype == torch.float32


def test_fields_that_a_config_leaves_out_are_those_of_its_family(with_config: ConfigOf) -> None:
    left_out = dict.fromkeys(
        ("num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters"), ...
    )
    spec = with_config(**left_out, tie_word_embeddings=..., rms_norm_eps=...).spec
    assert (spec.num_kv_heads, spec.head_size, spec.max_position) == (4, 16, 2048)
    assert (spec.tie_embeddings, spec.rms_norm_eps, spec.rope_theta) == (False, 1e-6, 10000.0)
    qwen3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    spec = with_config(**qwen3, num_attention_heads=64).spec
    assert (spec.num_kv_heads, spec.head_size) == (32, 128)
    assert with_config(**qwen3, num_key_value_heads=None).spec.num_kv_heads == 64


def test_sliding_windows_follow_the_rules_of_each_family(with_config: ConfigOf) -> None:
    assert with_config(sliding_window=8).spec.sliding_window is None
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert with_config(**mistral, sliding_window=8).spec.window_of(2) == 8
    assert with_config(**mistral, sliding_window=None).spec.sliding_window is None
    assert with_config(**mistral, sliding_window=...).spec.sliding_window == 4096
    qwen = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}
    assert with_config(**qwen, use_sliding_window=False).spec.sliding_window is None
    spec = with_config(**qwen, use_sliding_window=True, max_window_layers=2).spec
    assert [spec.window_of(i) for i in range(3)] == [None, None, 8]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    spec = with_config(**qwen, use_sliding_window=True, layer_types=kinds).spec
    assert [spec.window_of(i) for i in range(3)] == [8, None, 8]
    assert (
        with_config(**{**qwen, "sliding_window": None}, use_sliding_window=True).spec.sliding_window is None
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, ["'mamba'", "llama", "mistral", "qwen2", "qwen3"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequence", "LlamaForCausalLM"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, ["'yarn'", "linear", "llama3"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["factor is missing"]),
        ({"rope_parameters": [1]}, ["rope_parameters is [1]"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, ["rope_parameters", "full_attention"]),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 8.0}}, ["factor", "rope_type", "linear"]),
        ({"rope_parameters": ..., "rope_scaling": {"factor": 8.0}}, ["factor", "rope_type", "linear"]),
        (
            {"rope_parameters": {**LLAMA3_NUMBERS, "rope_type": "llama3", "high_freq_factor": 1.0}},
            ["high_freq_factor", "low_freq_factor"],
        ),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"hidden_act": "gelu"}, ["'gelu'", "silu"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "GGUF"]),
        ({"dtype": "int8"}, ["'int8'", "bfloat16"]),
        ({"hidden_size": ...}, ["hidden_size is missing"]),
        ({"hidden_size": "64"}, ["hidden_size is '64'", "integer"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers is 0", "at least 1"]),
        ({"num_attention_heads": True}, ["num_attention_heads is True"]),
        ({"num_key_value_heads": 3}, ["4 query heads", "3 kv heads"]),
        ({"head_dim": 15}, ["15", "even"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps is nan"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings is 'yes'"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id is '</s>'"]),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    with_config: ConfigOf, folder: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelFileError) as caught:
        with_config(**changes)
    assert caught.value.file == str(folder / "config.json")
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_config_that_is_not_json_is_an_error(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert fault(folder).file == str(folder / "config.json")


# ---- digest ---------------------------------------------------------------------------------------------------------


def test_the_digest_is_that_of_the_content_not_of_the_place(llama: Path, folder: Path) -> None:
    assert open_checkpoint(folder).spec.digest == open_checkpoint(llama).spec.digest
    assert len(open_checkpoint(llama).spec.digest) == 32


def test_the_digest_changes_with_weights_and_with_what_the_config_computes(
    llama: Path, folder: Path, with_config: ConfigOf, tmp_path: Path
) -> None:
    digests = {open_checkpoint(llama).spec.digest}
    digests.add(with_config(rope_parameters={"rope_theta": 5e5}).spec.digest)
    digests.add(open_checkpoint(tiny_gguf(llama, tmp_path / "a.gguf")).spec.digest)
    digests.add(open_checkpoint(tiny_gguf(llama, tmp_path / "b.gguf", "Q8_0")).spec.digest)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.001
    save_file(tensors, folder / "model.safetensors")
    digests.add(open_checkpoint(folder).spec.digest)
    assert len(digests) == 5
