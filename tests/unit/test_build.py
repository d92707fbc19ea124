"""How memory is shared out at start, on machines of all sizes: what is not asked for follows from what is free."""

from __future__ import annotations

import pytest

from octavo.config import CacheConfig
from octavo.engine import build
from octavo.errors import ConfigError
from octavo.model_spec import CacheGroup, KVLayout

MIB = 2**20
# A block takes 1 MiB.
LAYOUT = KVLayout(16, (CacheGroup("attention", (0,), MIB // 16),))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """Sets how many MiB are free."""
    return lambda mib: monkeypatch.setattr(build, "available_memory_bytes", lambda: mib * MIB)


@pytest.mark.parametrize(
    ("free_mib", "max_model_len", "blocks"),
    [
        (100_000, 8_192, 1_024),  # 1 GiB is enough
        (100_000, 32_768, 2_048),  # one full-length request
        (1_000, 32_768, 600),  # a share of what is free
        (4, 32_768, 2),
    ],
)
def test_default_pool_follows_from_free_memory(free, free_mib: int, max_model_len: int, blocks: int) -> None:
    free(free_mib)
    assert build._num_blocks(CacheConfig(), LAYOUT, max_model_len) == blocks


@pytest.mark.parametrize("config", [CacheConfig(num_blocks=101), CacheConfig(kv_cache_bytes=101 * MIB)])
def test_a_pool_that_cannot_fit_is_refused_with_the_largest_that_does(free, config: CacheConfig) -> None:
    free(100)
    with pytest.raises(ConfigError, match=r"101 KV blocks .* at most --num-blocks 100 \(1,600 tokens\)"):
        build._num_blocks(config, LAYOUT, 32)


@pytest.mark.parametrize("free_mib", [0, 3])
def test_a_machine_without_room_for_two_blocks_is_told_so(free, free_mib: int) -> None:
    free(free_mib)
    with pytest.raises(ConfigError, match="at least 2 are needed"):
        build._num_blocks(CacheConfig(), LAYOUT, 32)


def test_host_store_takes_no_more_than_the_pool_leaves(free) -> None:
    free(1_000)
    assert build._num_host_blocks(CacheConfig(), LAYOUT, 300) == 300
    assert build._num_host_blocks(CacheConfig(), LAYOUT, 600) == 400
    assert build._num_host_blocks(CacheConfig(swap_bytes=7 * MIB), LAYOUT, 600) == 7
    assert build._num_host_blocks(CacheConfig(swap_bytes=0), LAYOUT, 600) == 0


@pytest.mark.parametrize(
    ("config", "pool"), [(CacheConfig(swap_bytes=401 * MIB), 600), (CacheConfig(), 1_000)]
)
def test_a_host_store_that_cannot_fit_is_refused(free, config: CacheConfig, pool: int) -> None:
    free(1_000)
    with pytest.raises(ConfigError, match="--swap-gb"):
        build._num_host_blocks(config, LAYOUT, pool)
