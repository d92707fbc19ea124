"""Which kernels compute: what is chosen, and what is said where that which is asked for cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.attention.reference import ReferenceAttention
from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.backends import NATIVE_ARCHITECTURES, Backend, NativeBackend, TorchBackend, choose_backend
from octavo.engine.build import build_engine
from octavo.errors import ConfigError
from octavo.kernels import library
from octavo.model_spec import ModelSpec
from octavo.models.registry import MODELS
from octavo.weights.checkpoint import open_checkpoint
from tiny_models import tiny_gguf, tiny_model

SPEC = ModelSpec(
    architecture="llama",
    num_layers=2,
    hidden_size=64,
    intermediate_size=160,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    vocab_size=512,
    max_position=2048,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
MODEL_OPTIONS = ("dtype", "quantization", "weight_cache", "path")


class OwnAttention(ReferenceAttention):
    name = "own"


def config(**options: Any) -> EngineConfig:
    """An engine config from fields of any part."""
    model = {name: options.pop(name) for name in MODEL_OPTIONS if name in options}
    cache = {name: options.pop(name) for name in ("kv_cache_dtype", "num_blocks") if name in options}
    return EngineConfig(
        model=ModelConfig(**{"path": "model", "weight_cache": False, **model}),
        cache=CacheConfig(**{"num_blocks": 64, **cache}),
        scheduler=SchedulerConfig(max_num_batched_tokens=64),
        num_threads=1,
        **options,
    )


def choose(spec: ModelSpec = SPEC, **options: Any) -> Backend:
    return choose_backend(config(**options), spec, 1)


def refusal(spec: ModelSpec = SPEC, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        choose(spec, **options)
    return str(caught.value)


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no compiler had been found when Octavo was installed."""

    def fail() -> Any:
        raise ImportError("No module named 'octavo._native'")

    monkeypatch.setattr(library, "load", fail)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("backends") / "llama")


# ---- what is chosen


@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_native_kernels_are_chosen_where_they_can_be(asked: str) -> None:
    backend = choose(attention_backend=asked)
    assert isinstance(backend, NativeBackend)
    assert (backend.facts.name, backend.facts.batch_invariant, backend.facts.note) == ("cpu", True, "")
    assert backend.facts.isa == library.instruction_sets()[0]


@pytest.mark.parametrize("architecture", sorted(NATIVE_ARCHITECTURES))
def test_every_supported_architecture_is_native(architecture: str) -> None:
    assert isinstance(choose(replace(SPEC, architecture=architecture)), NativeBackend)


def test_the_list_of_native_architectures_names_models_that_exist() -> None:
    assert set(MODELS.names()) >= NATIVE_ARCHITECTURES


@pytest.mark.parametrize("isa", library.instruction_sets())
def test_an_instruction_set_can_be_chosen_by_name(isa: str) -> None:
    facts = choose(isa=isa).facts
    assert facts.isa == isa
    assert facts.dtype == ("bfloat16" if isa in ("amx", "avx512_bf16") else "float32")
    assert facts.kv_cache_dtype == facts.dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_numbers_are_those_that_are_asked_for(dtype: str, kv_cache_dtype: str) -> None:
    backend = choose(dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    kept = dtype if kv_cache_dtype == "auto" else "int8"
    assert (backend.facts.dtype, backend.facts.kv_cache_dtype) == (dtype, kept)
    # Keys and values of two layers, two kv heads of 16 numbers; bytes have a scale of four bytes for each vector.
    vector = {"float32": 64, "bfloat16": 32, "int8": 20}[kept]
    assert backend.layout(SPEC, None).block_bytes == 16 * 2 * 2 * 2 * vector
    assert backend.layout(SPEC, 64).block_size == 64


def test_the_reference_is_chosen_by_name_without_a_note() -> None:
    backend = choose(attention_backend="reference")
    assert isinstance(backend, TorchBackend)
    facts = backend.facts
    assert (facts.name, facts.isa, facts.batch_invariant, facts.note) == ("reference", "", False, "")


def test_attention_of_one_s_own_runs_under_torch_models() -> None:
    backend = choose(attention_backend="test_backends:OwnAttention", dtype="float16")
    assert isinstance(backend, TorchBackend)
    assert (backend.facts.name, backend.facts.dtype) == ("own", "float16")


# ---- what cannot be


@pytest.mark.parametrize(
    ("spec", "options", "reason"),
    [
        (replace(SPEC, head_size=24), {}, "heads of 24 numbers are not a multiple of 16"),
        (replace(SPEC, num_heads=98), {}, "49 query heads for each kv head are more than 48"),
        (replace(SPEC, architecture="novel"), {}, "do not know novel"),
        (SPEC, {"dtype": "float16"}, "not float16"),
    ],
)
def test_what_native_kernels_cannot_do_falls_back_with_the_reason_or_is_refused(
    spec: ModelSpec, options: dict[str, Any], reason: str
) -> None:
    backend = choose(spec, **options)
    assert isinstance(backend, TorchBackend) and backend.facts.name == "reference"
    assert reason in backend.facts.note and "slow" in backend.facts.note
    message = refusal(spec, attention_backend="cpu", **options)
    assert "--attention-backend cpu cannot be used here" in message and reason in message
    # What only they can do is refused with the same reason.
    for wish, flag in (
        ({"quantization": "int8"}, "--quantization int8"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8"),
        ({"batch_invariant": True}, "--batch-invariant"),
        ({"isa": "portable"}, "--isa portable"),
    ):
        message = refusal(spec, **options, **wish)
        assert flag in message and reason in message


def test_without_a_build_the_reference_computes_and_says_why(unbuilt: None) -> None:
    backend = choose()
    assert isinstance(backend, TorchBackend) and not backend.facts.batch_invariant
    assert "not built" in backend.facts.note and "compiler" in backend.facts.note
    assert "not built" in refusal(attention_backend="cpu")
    assert "not built" in refusal(batch_invariant=True)
    assert "not built" in refusal(quantization="int4")


@pytest.mark.parametrize("isa", ["auto", "best of all"])
def test_a_set_that_this_cpu_cannot_run_is_refused_with_those_it_can(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa == "auto":
        assert choose(isa=isa).facts.isa in library.instruction_sets()
        return
    with pytest.raises(ConfigError, match="--isa is 'best of all'; it must be one of auto, amx"):
        config(isa=isa)
    monkeypatch.setattr(library, "instruction_sets", lambda: ("avx2", "portable"))
    for attention_backend in ("auto", "cpu"):
        message = refusal(isa="amx", attention_backend=attention_backend)
        assert message == "--isa is 'amx', which this CPU cannot run; it can run: avx2, portable"


@pytest.mark.parametrize(
    ("wish", "flag"),
    [
        ({"quantization": "int8"}, "--quantization int8"),
        ({"quantization": "int4"}, "--quantization int4"),
        ({"quantization": "native"}, "--quantization native"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8"),
        ({"isa": "portable"}, "--isa portable"),
        ({"batch_invariant": True}, "--batch-invariant"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "test_backends:OwnAttention"])
def test_torch_refuses_what_only_native_kernels_do(wish: dict[str, Any], flag: str, backend: str) -> None:
    message = refusal(attention_backend=backend, **wish)
    assert flag in message and "native kernels" in message and backend in message


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    assert "reference" in refusal(attention_backend="cuda")


# ---- with a model


def built(model: Path, **options: Any):
    return build_engine(config(path=str(model), **options))


def test_the_facts_of_an_engine_tell_what_was_chosen(folder: Path) -> None:
    for options, name, dtype in (
        ({"attention_backend": "reference", "dtype": "float32"}, "reference", "float32"),
        ({"dtype": "float32", "batch_invariant": True}, "cpu", "float32"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "int8", "quantization": "int8"}, "cpu", "bfloat16"),
    ):
        _, facts = built(folder, **options)
        assert (facts.attention_backend, facts.dtype, facts.note) == (name, dtype, "")
        assert facts.batch_invariant is (name == "cpu")
        assert facts.quantization == options.get("quantization", "none")


def test_an_engine_without_a_build_has_exactly_one_note(folder: Path, unbuilt: None) -> None:
    _, facts = built(folder)
    assert facts.attention_backend == "reference"
    assert facts.note.count("not built") == 1 and "\n" not in facts.note


def test_quantised_weights_take_less_memory(folder: Path) -> None:
    size = {}
    for quantization in ("none", "int8", "int4"):
        size[quantization] = built(folder, dtype="float32", quantization=quantization)[1].weight_bytes
    embedding = 512 * 64 * 4  # stays as it is
    matrices = size["none"] - embedding
    # int4: 20 bytes for 32 weights in whole panels, and the head in 8 bits.
    assert size["int8"] - embedding < 0.3 * matrices and size["int4"] < size["int8"]


def test_native_quantization_wants_blocks_of_a_gguf_file(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"Q4_0, Q4_1 and Q8_0 .* this model has none; use none, int8 or int4"
    ):
        built(folder, quantization="native")
    for kind in ("F32", "F16", "Q5_0"):
        file = tiny_gguf(folder, tmp_path / f"{kind}.gguf", kind)
        with pytest.raises(ConfigError, match="this model has none"):
            built(file, quantization="native")
    for kind in ("Q4_0", "Q4_1", "Q8_0"):
        file = tiny_gguf(folder, tmp_path / f"{kind}.gguf", kind)
        _, facts = built(file, quantization="native")
        assert facts.quantization == "native" and facts.attention_backend == "cpu"


def test_weights_are_kept_on_disk_only_if_asked_and_once_for_each_kind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    built(folder, dtype="float32")
    assert not list(tmp_path.iterdir())
    identity = open_checkpoint(folder).identity
    for _ in range(2):
        for dtype, quantization in (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")):
            built(folder, dtype=dtype, quantization=quantization, weight_cache=True)
    assert sorted(path.name for path in (tmp_path / "packed").iterdir()) == [
        f"{identity}-int8-bfloat16.bin",
        f"{identity}-none-bfloat16.bin",
        f"{identity}-none-float32.bin",
    ]
