"""Which kernels compute: chosen once, from what is asked for, what the CPU has and what the model is.

    auto        the native kernels if they are built and know the model, else the reference; which and why is printed
    cpu         the native kernels, or no start
    reference   plain torch
    module:Class  an attention backend of your own, under torch models

Only `build.py` uses this. A backend first says in which numbers it computes, then loads the weights, then, when the size of
the block pool is known, makes the `Compute` that runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from octavo.attention.backend import BACKENDS, AttentionBackend
from octavo.config import EngineConfig
from octavo.engine.machine import cpu_features
from octavo.errors import ConfigError
from octavo.kernels import library
from octavo.kernels.decoder import NativeDecoder, why_not
from octavo.kernels.machine import make_machine
from octavo.kernels.packed import Number
from octavo.kernels.sampling import row_math
from octavo.model_spec import KVLayout, ModelSpec, kv_layout
from octavo.models.registry import Model, load_model
from octavo.runner.compute import Compute, TorchCompute
from octavo.runner.kv_storage import KVStorage
from octavo.runner.native_compute import NativeCompute
from octavo.sampling.row_math import RowMath
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.packed_cache import packed_folder

NATIVE = "cpu"
# Architectures that csrc/decoder.cpp computes; they differ in data only.
NATIVE_ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


@dataclass(frozen=True)
class BackendFacts:
    """What is printed of a backend. isa is empty where no native kernels run. note: why not, if that needs saying."""

    name: str
    dtype: str
    kv_cache_dtype: str
    isa: str = ""
    batch_invariant: bool = False
    note: str = ""


class Backend(Protocol):
    """A chosen way to compute; see the head of this file."""

    facts: BackendFacts

    def load(self, checkpoint: Checkpoint) -> int:
        """Load the weights; returns the memory they take, in bytes."""
        ...

    def layout(self, spec: ModelSpec, block_size: int | None) -> KVLayout:
        """How KV memory is cut; None takes the backend's own block size."""
        ...

    def compute(self, layout: KVLayout, num_blocks: int, num_host_blocks: int) -> Compute:
        """Reserve the pool and put it together with the weights."""
        ...

    def row_math(self) -> RowMath:
        """What sampling passes over rows of logits with."""
        ...


def choose_backend(config: EngineConfig, spec: ModelSpec, num_threads: int) -> Backend:
    """Raises ConfigError for what is asked for and cannot be, with what can."""
    asked = config.attention_backend
    if asked in ("auto", NATIVE):
        reason = _why_not_native(config, spec)
        if reason is None:
            return NativeBackend(config, num_threads)
        if asked == NATIVE:
            raise ConfigError(f"--attention-backend cpu cannot be used here: {reason}")
        return TorchBackend(config, "reference", f"plain torch computes, which is slow: {reason}")
    return TorchBackend(config, asked, "")


def _why_not_native(config: EngineConfig, spec: ModelSpec) -> str | None:
    missing = library.missing()
    if missing is not None:
        return missing
    if spec.architecture not in NATIVE_ARCHITECTURES:
        return f"the native kernels do not know {spec.architecture}"
    if config.model.dtype == "float16":
        return "the native kernels compute in float32 or bfloat16, not float16"
    return why_not(spec)


class NativeBackend:
    """Decoders in the kernels of csrc/."""

    def __init__(self, config: EngineConfig, num_threads: int) -> None:
        self._config = config
        self._machine = make_machine(num_threads, config.isa)
        dtype = config.model.dtype
        if dtype == "auto":
            dtype = "bfloat16" if library.has_bfloat16(self._machine.isa) else "float32"
        self._number = Number.BFLOAT16 if dtype == "bfloat16" else Number.FLOAT32
        self._quantised = config.cache.kv_cache_dtype == "int8"
        self.facts = BackendFacts(
            NATIVE, dtype, "int8" if self._quantised else dtype, self._machine.isa, batch_invariant=True
        )

    def load(self, checkpoint: Checkpoint) -> int:
        """See Backend."""
        self._decoder = NativeDecoder(
            checkpoint.spec,
            checkpoint.source,
            self._machine,
            number=self._number,
            quantization=self._config.model.quantization,
            max_tokens=self._config.scheduler.max_num_batched_tokens,
            packed_file=lambda kind: self._packed_file(checkpoint, kind),
        )
        return self._decoder.weight_bytes

    def _packed_file(self, checkpoint: Checkpoint, kind: str) -> Path | None:
        if not self._config.model.weight_cache:
            return None
        return packed_folder() / f"{checkpoint.identity}-{kind}.bin"

    def layout(self, spec: ModelSpec, block_size: int | None) -> KVLayout:
        """See Backend."""
        element_bytes, scale_bytes = (1, 4) if self._quantised else (self._number.num_bytes, 0)
        return kv_layout(spec, block_size or 16, element_bytes, scale_bytes)

    def compute(self, layout: KVLayout, num_blocks: int, num_host_blocks: int) -> Compute:
        """See Backend."""
        return NativeCompute(
            self._decoder,
            layout,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            number=self._number,
            quantised=self._quantised,
            share=self._config.shared_prefix_attention,
        )

    def row_math(self) -> RowMath:
        """See Backend."""
        return row_math(self._machine)


class TorchBackend:
    """Models of `models/` in torch."""

    def __init__(self, config: EngineConfig, attention: str, note: str) -> None:
        self._attention: AttentionBackend = BACKENDS.make(attention, AttentionBackend)
        for flag, value, plain in (
            ("--quantization", config.model.quantization, "none"),
            ("--kv-cache-dtype", config.cache.kv_cache_dtype, "auto"),
            ("--isa", config.isa, "auto"),
        ):
            if value != plain:
                raise ConfigError(
                    f"{flag} {value} needs the native kernels; {note or f'--attention-backend is {attention}'}"
                )
        if config.batch_invariant:
            raise ConfigError(
                f"--batch-invariant needs the native kernels; {note or f'--attention-backend is {attention}'}"
            )
        self._dtype = _torch_dtype(config.model.dtype)
        dtype = str(self._dtype).removeprefix("torch.")
        self.facts = BackendFacts(self._attention.name, dtype, dtype, note=note)

    def load(self, checkpoint: Checkpoint) -> int:
        """See Backend."""
        self._model: Model = load_model(checkpoint.spec, checkpoint.source, self._dtype)
        return self._model.weight_bytes

    def layout(self, spec: ModelSpec, block_size: int | None) -> KVLayout:
        """See Backend."""
        return kv_layout(spec, block_size or self._attention.default_block_size, self._dtype.itemsize)

    def compute(self, layout: KVLayout, num_blocks: int, num_host_blocks: int) -> Compute:
        """See Backend."""
        storage = KVStorage(
            self._model.spec,
            block_size=layout.block_size,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            dtype=self._dtype,
        )
        return TorchCompute(self._model, self._attention, storage, layout.block_size)

    def row_math(self) -> RowMath:
        """See Backend."""
        return RowMath()


def _torch_dtype(asked: str) -> torch.dtype:
    """`auto` is bfloat16 where the CPU multiplies it natively, float32 elsewhere (bfloat16 would be emulated, slowly)."""
    if asked == "auto":
        asked = "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(cpu_features()) else "float32"
    dtype = getattr(torch, asked)
    assert isinstance(dtype, torch.dtype)
    return dtype
