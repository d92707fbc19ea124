"""The block table: blocks on demand, copy-on-write, forks, and copies of what may be evicted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.memory.block_pool import BlockPool
from octavo.memory.block_table import BlockTable
from octavo.memory.prefix_cache import BlockKey, block_key

ROOT = b"root"


def filled(pool: BlockPool, num_tokens: int) -> BlockTable:
    table = BlockTable(pool)
    assert table.prepare(0, num_tokens) == []
    return table


def published(pool: BlockPool, token_ids: list[int]) -> BlockTable:
    """A table whose full blocks hold `token_ids` and are findable."""
    table, parent = filled(pool, len(token_ids)), ROOT
    for i in range(len(token_ids) // pool.block_size):
        part = token_ids[i * pool.block_size : (i + 1) * pool.block_size]
        key = block_key(parent, part)
        assert table.publish(i, key, parent, part)
        parent = key
    return table


@given(st.integers(0, 40), st.integers(1, 20), st.sampled_from([1, 2, 4, 16]))
def test_table_has_just_the_blocks_that_its_positions_need(start: int, count: int, block_size: int) -> None:
    pool = BlockPool(100, block_size)
    table = filled(pool, start)
    assert table.missing(start, start + count) == -(-(start + count) // block_size) - len(table)
    assert table.prepare(start, start + count) == []
    assert len(table) == -(-(start + count) // block_size) == pool.num_used


def test_prepare_does_all_or_nothing() -> None:
    pool = BlockPool(3, 2)
    table, other = filled(pool, 2), filled(pool, 2)
    assert table.prepare(2, 6) is None
    pool.check([table.block_ids, other.block_ids])
    assert len(table) == 1


def test_fork_takes_no_block() -> None:
    pool = BlockPool(4, 2)
    table, fork = filled(pool, 3), BlockTable(pool)
    fork.adopt(table.block_ids)
    assert pool.num_used == 2
    pool.check([table.block_ids, fork.block_ids])


def test_shared_block_is_copied_before_write() -> None:
    pool = BlockPool(4, 2)
    table, fork = filled(pool, 3), BlockTable(pool)
    fork.adopt(table.block_ids)
    shared = table.block_ids[1]
    assert fork.missing(3, 4) == 1
    assert fork.prepare(3, 4) == [(shared, fork.block_ids[1])]
    assert fork.block_ids[0] == table.block_ids[0] and fork.block_ids[1] != shared
    # The block is its first owner's alone again: that one writes in place.
    assert table.prepare(3, 4) == []
    pool.check([table.block_ids, fork.block_ids])


def test_findable_block_is_copied_before_write_even_if_unshared() -> None:
    pool = BlockPool(3, 2)
    table = published(pool, [1, 2])
    source = table.block_ids[0]
    assert table.prepare(1, 2) == [(source, table.block_ids[0])]
    assert pool.num_idle == 1 and pool.cache.known(source) is not None


def test_copy_on_write_without_a_free_block_is_refused_whole() -> None:
    pool = BlockPool(2, 2)
    table, fork = filled(pool, 4), BlockTable(pool)
    fork.adopt(table.block_ids)
    before = list(fork.block_ids)
    assert fork.prepare(3, 4) is None and fork.block_ids == before


def test_adopting_an_idle_block_takes_it_back_into_use() -> None:
    pool = BlockPool(2, 2)
    first = published(pool, [1, 2])
    blocks = list(first.block_ids)
    first.release()
    second = BlockTable(pool)
    second.adopt(blocks)
    assert pool.num_idle == 0
    pool.check([second.block_ids])


def test_copy_of_an_idle_block_evicts_another_one() -> None:
    pool = BlockPool(2, 2)
    tables = [published(pool, [1, 2]), published(pool, [3, 4])]
    (source,), (other,) = (list(table.block_ids) for table in tables)
    tables[0].release()
    tables[1].release()
    # The source is the least recently used block: without being held, it would be the one to go.
    table = BlockTable(pool)
    assert table.adopt_copy(source) == (source, other)
    assert pool.cache.known(source) is not None and pool.cache.known(other) is None
    pool.check([table.block_ids])


def test_no_copy_is_made_when_the_source_is_the_last_free_block() -> None:
    pool = BlockPool(1, 2)
    first = published(pool, [1, 2])
    (source,) = first.block_ids
    first.release()
    table = BlockTable(pool)
    assert table.adopt_copy(source) is None
    assert len(table) == 0 and pool.num_idle == 1
    pool.check([])


def test_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(3, 1)
    table = published(pool, [1, 2, 3])
    chain = list(table.block_ids)
    table.release()
    assert [pool.allocate() for _ in range(3)] == chain[::-1]


def test_publishing_exchanges_a_block_for_its_twin() -> None:
    pool = BlockPool(4, 2)
    first = published(pool, [1, 2])
    second = published(pool, [1, 2])
    assert second.block_ids == first.block_ids and pool.num_used == 1
    pool.check([first.block_ids, second.block_ids])


@pytest.mark.parametrize("parent", [ROOT, b"elsewhere"])
def test_table_keeps_a_block_whose_digest_collides(parent: BlockKey) -> None:
    pool = BlockPool(4, 2)
    published(pool, [1, 2])
    table = filled(pool, 2)
    own = list(table.block_ids)
    assert not table.publish(0, block_key(ROOT, [1, 2]), parent, [8, 9])
    assert table.block_ids == own and pool.writable(own[0])


def test_release_gives_everything_back() -> None:
    pool = BlockPool(4, 2)
    table = filled(pool, 7)
    table.release()
    assert len(table) == 0 and pool.num_used == 0
