"""The block pool: what is taken first, what survives a release, and what equal content becomes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.memory.block_pool import BlockPool
from octavo.memory.prefix_cache import BlockKey, block_key

ROOT = b"root"


def publish(pool: BlockPool, parent: BlockKey, token_ids: Sequence[int]) -> tuple[int, BlockKey]:
    """A new block with this content, published and still held."""
    block, key = pool.allocate(), block_key(parent, token_ids)
    assert block is not None
    used = pool.publish(block, key, parent, token_ids)
    assert used is not None
    return used, key


def test_fresh_pool_hands_out_blocks_in_order_until_none_is_left() -> None:
    pool = BlockPool(3, 4)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, None]
    assert (pool.num_used, pool.num_free) == (3, 0)
    pool.check([[0, 1, 2]])


def test_pool_without_blocks_gives_none() -> None:
    pool = BlockPool(0, 4)
    assert pool.allocate() is None
    pool.check([])


def test_unknown_block_becomes_blank_and_is_reused() -> None:
    pool = BlockPool(2, 2)
    block = pool.allocate()
    assert block == 0
    pool.release(block)
    assert (pool.num_free, pool.num_idle) == (2, 0)
    assert pool.allocate() == block


def test_shared_block_is_free_only_after_its_last_release() -> None:
    pool = BlockPool(1, 2)
    block = pool.allocate()
    assert block is not None
    pool.share(block)
    pool.check([[block], [block]])
    pool.release(block)
    assert pool.references(block) == 1 and pool.num_free == 0
    pool.release(block)
    assert pool.references(block) == 0 and pool.num_free == 1


def test_releasing_more_often_than_taking_is_a_bug() -> None:
    pool = BlockPool(1, 2)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(0)


def test_known_block_stays_findable_after_release_and_comes_back_by_sharing() -> None:
    pool = BlockPool(2, 2)
    block, key = publish(pool, ROOT, (1, 2))
    pool.release(block)
    assert pool.num_idle == 1 and pool.cache.find(key, ROOT, (1, 2)) == block
    pool.share(block)
    assert pool.num_idle == 0 and pool.references(block) == 1
    pool.check([[block]])


def test_blank_blocks_are_taken_before_idle_ones() -> None:
    pool = BlockPool(3, 2)
    idle, _ = publish(pool, ROOT, (1, 2))
    pool.release(idle)
    assert {pool.allocate(), pool.allocate()} == {1, 2}
    assert len(pool.cache) == 1
    assert pool.allocate() == idle
    assert len(pool.cache) == 0, "the content of a block that is taken cannot be found any more"


def test_least_recently_used_idle_block_is_evicted_first() -> None:
    pool = BlockPool(3, 1)
    blocks = [publish(pool, ROOT, (token,))[0] for token in range(3)]
    for block in blocks:
        pool.release(block)
    pool.share(blocks[0])
    pool.release(blocks[0])
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]


def test_only_an_unshared_unknown_block_is_writable() -> None:
    pool = BlockPool(2, 2)
    block = pool.allocate()
    assert block is not None and pool.writable(block)
    pool.share(block)
    assert not pool.writable(block)
    pool.release(block)
    pool.publish(block, block_key(ROOT, (1, 2)), ROOT, (1, 2))
    assert not pool.writable(block)


def test_publishing_equal_content_merges_twins() -> None:
    pool = BlockPool(3, 2)
    first, key = publish(pool, ROOT, (1, 2))
    second = pool.allocate()
    assert second is not None
    assert pool.publish(second, key, ROOT, (1, 2)) == first
    assert pool.references(first) == 2 and pool.references(second) == 0
    pool.check([[first], [first]])


def test_publishing_takes_an_idle_twin_back_into_use() -> None:
    pool = BlockPool(3, 2)
    first, key = publish(pool, ROOT, (1, 2))
    pool.release(first)
    second = pool.allocate()
    assert second is not None
    assert pool.publish(second, key, ROOT, (1, 2)) == first
    assert pool.num_idle == 0
    pool.check([[first]])


def test_publishing_a_block_twice_changes_nothing() -> None:
    pool = BlockPool(2, 2)
    block, key = publish(pool, ROOT, (1, 2))
    assert pool.publish(block, key, ROOT, (1, 2)) == block
    pool.check([[block]])


def test_block_with_a_colliding_digest_stays_private() -> None:
    pool = BlockPool(2, 2)
    first, key = publish(pool, ROOT, (1, 2))
    other = pool.allocate()
    assert other is not None
    assert pool.publish(other, key, ROOT, (3, 4)) is None
    assert pool.cache.known(other) is None and pool.writable(other)
    pool.check([[first], [other]])


def test_dropping_idle_content_leaves_what_is_in_use() -> None:
    pool = BlockPool(3, 2)
    kept, key = publish(pool, ROOT, (1, 2))
    idle, _ = publish(pool, key, (3, 4))
    pool.release(idle)
    assert pool.drop_idle() == 1
    assert pool.cache.known(kept) is not None and pool.cache.known(idle) is None
    assert (pool.num_free, pool.num_idle) == (2, 0)
    pool.check([[kept]])


def test_check_names_a_reference_that_no_table_has() -> None:
    pool = BlockPool(2, 2)
    pool.allocate()
    with pytest.raises(AssertionError, match="differ from tables"):
        pool.check([[]])
