"""Options that cannot be used are refused in words before anything is built, and none is accepted to be ignored."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, gib_to_bytes
from octavo.errors import ConfigError

HUGE = 10**30
MODEL = ModelConfig(path="model")


@pytest.mark.parametrize(
    ("kind", "option", "flag"),
    [
        (ModelConfig, {"path": "model", "max_model_len": HUGE}, "--max-model-len"),
        (CacheConfig, {"num_blocks": HUGE}, "--num-blocks"),
        (CacheConfig, {"kv_cache_bytes": HUGE}, "--kv-cache-gb"),
        (CacheConfig, {"swap_bytes": HUGE}, "--swap-gb"),
        (SchedulerConfig, {"max_num_seqs": HUGE}, "--max-num-seqs"),
        (SchedulerConfig, {"max_num_batched_tokens": HUGE}, "--max-num-batched-tokens"),
        (EngineConfig, {"model": MODEL, "seed": HUGE}, "--seed"),
        (EngineConfig, {"model": MODEL, "seed": -HUGE}, "--seed"),
        (EngineConfig, {"model": MODEL, "num_threads": 100_000}, "--threads"),
        (EngineConfig, {"model": MODEL, "num_threads": 0}, "--threads"),
        (SchedulerConfig, {"max_num_seqs": 0}, "--max-num-seqs"),
    ],
)
def test_numbers_beyond_all_reason_are_refused(kind: type[Any], option: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        kind(**option)


@pytest.mark.parametrize("gib", [-1.0, float("nan"), float("inf")])
def test_what_is_no_size_is_refused(gib: float) -> None:
    with pytest.raises(ConfigError, match="--swap-gb"):
        gib_to_bytes("--swap-gb", gib)


def test_a_host_store_that_nothing_would_use_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--swap-gb .*--preemption swap"):
        EngineConfig(model=MODEL, cache=CacheConfig(swap_bytes=2**30))
    swap = SchedulerConfig(preemption="swap")
    assert EngineConfig(model=MODEL, cache=CacheConfig(swap_bytes=2**30), scheduler=swap).cache.swap_bytes
