"""Everything that can be set at start, as one frozen tree. Nothing here is changed after it is made.

Values that a user did not set stay None and are resolved once, in `engine/build.py`, against what the machine and the model
are; the resolved values are then facts (`EngineFacts`, `KVLayout`), not config.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.errors import ConfigError

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DTYPES = ("auto", "float32", "bfloat16", "float16")
PREEMPTION_MODES = ("recompute", "swap")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model and in which numbers. `path` is a local folder or a .gguf file, already resolved from a name."""

    path: str
    name: str = ""
    dtype: str = "auto"
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        _one_of("--dtype", self.dtype, DTYPES)
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(
                f"--max-model-len is {self.max_model_len}; it must be at least 2 (one prompt token and one new one)"
            )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The block pool. Give its size as `num_blocks`, as `kv_cache_bytes`, or not at all (derived from free memory).

    swap_bytes: size of the host store that swap preemption uses; None means as large as the pool.
    """

    block_size: int | None = None
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    swap_bytes: int | None = None
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.block_size is not None:
            _one_of("--block-size", self.block_size, BLOCK_SIZES)
        _positive("--num-blocks", self.num_blocks)
        _positive("--kv-cache-gb", self.kv_cache_bytes)
        if self.swap_bytes is not None and self.swap_bytes < 0:
            raise ConfigError(f"--swap-gb gives {self.swap_bytes} bytes; it must not be negative")


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
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    attention_backend: str = "reference"
    num_threads: int | None = None
    seed: int | None = None
    check: bool = False

    def __post_init__(self) -> None:
        _positive("--threads", self.num_threads)


def _one_of(flag: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} is {value!r}; it must be one of {', '.join(map(str, allowed))}")


def _positive(flag: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{flag} is {value}; it must be at least 1")
