"""Everything that can be set at start, as one frozen tree. Nothing here is changed after it is made.

Values that a user did not set stay None and are resolved once, in `engine/build.py`, against what the machine and the model
are; the resolved values are then facts (`EngineFacts`, `KVLayout`), not config.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from octavo.errors import ConfigError

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DTYPES = ("auto", "float32", "bfloat16", "float16")
PREEMPTION_MODES = ("recompute", "swap")
QUANTIZATIONS = ("none", "int8", "int4", "native")
KV_CACHE_DTYPES = ("auto", "int8")
ISA_NAMES = ("auto", "amx", "avx512_bf16", "avx512", "avx2", "portable")
# What the engine's messages can carry, and more than any machine has.
_LARGEST = 2**63 - 1
_MOST_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model and in which numbers. `path` is a local folder or a .gguf file, already resolved from a name.

    dtype: of activations, and of weights that are not quantised. quantization: how matrices are kept (`kernels/packed.py`).
    weight_cache: keep packed weights on disk, so that the next start maps them.
    """

    path: str
    name: str = ""
    dtype: str = "auto"
    quantization: str = "none"
    weight_cache: bool = True
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--quantization", self.quantization, QUANTIZATIONS)
        _within("--max-model-len", self.max_model_len, -_LARGEST)
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(
                f"--max-model-len is {self.max_model_len}; it must be at least 2 (one prompt token and one new one)"
            )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The block pool. Give its size as `num_blocks`, as `kv_cache_bytes`, or not at all (derived from free memory).

    swap_bytes: size of the host store that swap preemption uses; None means as large as the pool. kv_cache_dtype: "auto" is
    the dtype of the model; "int8" keeps a scale per token and head.
    """

    block_size: int | None = None
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    swap_bytes: int | None = None
    prefix_caching: bool = True
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        _one_of("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.block_size is not None:
            _one_of("--block-size", self.block_size, BLOCK_SIZES)
        _positive("--num-blocks", self.num_blocks)
        _positive("--kv-cache-gb", self.kv_cache_bytes)
        if self.num_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigError("--num-blocks and --kv-cache-gb both set the size of the pool; leave one out")
        _within("--swap-gb", self.swap_bytes, 0)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How steps are filled. `max_num_batched_tokens` is the token budget of a step.

    policy: a name from `scheduler/policies.py` or module:Class. preemption: how blocks are taken back from a sequence.
    """

    policy: str = "fcfs"
    preemption: str = "recompute"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512

    def __post_init__(self) -> None:
        _one_of("--preemption", self.preemption, PREEMPTION_MODES)
        _positive("--max-num-seqs", self.max_num_seqs)
        _positive("--max-num-batched-tokens", self.max_num_batched_tokens)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The whole engine: what `engine/build.py` needs to make one.

    seed: seeds requests that bring none, so that a whole run can be repeated; None draws a new one at start.
    check: verify every invariant of memory and scheduler after every step (slow; for tests and bug hunts).
    attention_backend, isa: which kernels compute (`engine/backends.py`). batch_invariant: start only if every row is
    computed the same to the bit whatever else is in its batch. shared_prefix_attention: read shared keys only once.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    attention_backend: str = "auto"
    isa: str = "auto"
    batch_invariant: bool = False
    shared_prefix_attention: bool = True
    num_threads: int | None = None
    seed: int | None = None
    check: bool = False

    def __post_init__(self) -> None:
        _one_of("--isa", self.isa, ISA_NAMES)
        _within("--threads", self.num_threads, 1, _MOST_THREADS)
        _within("--seed", self.seed, -_LARGEST)
        if self.cache.swap_bytes is not None and self.scheduler.preemption != "swap":
            raise ConfigError(
                "--swap-gb sizes a store that only --preemption swap uses; add that or leave it out"
            )


def gib_to_bytes(flag: str, gib: float | None) -> int | None:
    """Bytes of an option given in GiB; None stays None. Raises ConfigError for what is no size."""
    if gib is None:
        return None
    if not math.isfinite(gib) or gib < 0:
        raise ConfigError(f"{flag} is {gib}; it must be a size in GiB")
    return int(gib * 2**30)


def _one_of(flag: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} is {value!r}; it must be one of {', '.join(map(str, allowed))}")


def _positive(flag: str, value: int | None) -> None:
    _within(flag, value, 1)


def _within(flag: str, value: int | None, low: int, high: int = _LARGEST) -> None:
    if value is None or low <= value <= high:
        return
    bound = f"at least {low:,}" if value < low else f"at most {high:,}"
    raise ConfigError(f"{flag} is {value}; it must be {bound}")
