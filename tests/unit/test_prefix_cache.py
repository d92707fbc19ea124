"""The prefix cache: stable keys, and matches that are exact to the token."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from octavo.memory.prefix_cache import BlockKey, PrefixCache, block_key, root_key

ROOT = root_key("weights", "")
TOKENS = st.lists(st.integers(0, 2), max_size=14)


def keys_of(token_ids: Sequence[int], size: int, root: BlockKey = ROOT) -> list[BlockKey]:
    keys = [root]
    for i in range(len(token_ids) // size):
        keys.append(block_key(keys[-1], token_ids[i * size : (i + 1) * size]))
    return keys


def insert_chain(cache: PrefixCache, token_ids: Sequence[int], size: int, first_block: int) -> int:
    """Put the full blocks of `token_ids` into the cache; returns the next unused block id."""
    keys = keys_of(token_ids, size)
    for i in range(len(token_ids) // size):
        part = token_ids[i * size : (i + 1) * size]
        first_block += cache.insert(first_block, keys[i + 1], keys[i], part)
    return first_block


def test_keys_are_the_same_in_every_process_and_version() -> None:
    # Keys may be stored and shared: these values change only together with a new format.
    assert root_key("weights", "tenant").hex() == "9327f1f456a61b5630e7d51b232d8c46"
    assert block_key(b"parent", [1, 2, 300_000]).hex() == "13013c236f0ef6dc69cf8fce87295902"


@given(st.lists(st.text(), max_size=3), st.lists(st.text(), max_size=3))
def test_root_keys_are_equal_only_for_equal_parts(a: list[str], b: list[str]) -> None:
    assert (root_key(*a) == root_key(*b)) == (a == b)


@given(TOKENS, TOKENS, st.sampled_from([ROOT, root_key("weights", "other")]))
def test_block_keys_are_equal_only_for_equal_prefixes(a: list[int], b: list[int], root: BlockKey) -> None:
    assert (block_key(ROOT, a) == block_key(root, b)) == (a == b and root == ROOT)


@given(st.lists(TOKENS, max_size=6), TOKENS, st.integers(0, 16), st.sampled_from([1, 2, 3, 4]))
def test_match_is_the_longest_common_beginning_to_the_token(
    chains: list[list[int]], token_ids: list[int], limit: int, size: int
) -> None:
    cache, block = PrefixCache(size), 0
    for chain in chains:
        block = insert_chain(cache, chain, size, block)
    cache.check()
    limit = min(limit, len(token_ids))
    match = cache.match(ROOT, keys_of(token_ids, size)[1:], token_ids, limit)

    longest = 0
    for chain in chains:
        usable = chain[: len(chain) // size * size]
        while token_ids[: longest + 1] == usable[: longest + 1] and longest < min(len(usable), limit):
            longest += 1
    assert len(match.block_ids) * size + match.partial_tokens == longest
    assert len(match.block_ids) == longest // size and match.partial_tokens == longest % size
    assert (match.partial_block is None) == (match.partial_tokens == 0)
    # The blocks are those of these very tokens.
    keys = keys_of(token_ids, size)
    for i, found in enumerate(match.block_ids):
        known = cache.known(found)
        assert known is not None and (known.parent, known.key) == (keys[i], keys[i + 1])
    if match.partial_block is not None:
        known = cache.known(match.partial_block)
        assert known is not None and known.parent == keys[longest // size]
        start = longest // size * size
        assert list(known.token_ids[: match.partial_tokens]) == token_ids[start:longest]


def test_partial_match_picks_the_best_of_many_children() -> None:
    cache = PrefixCache(4)
    insert_chain(cache, [5, 0, 0, 0], 4, 0)
    insert_chain(cache, [5, 6, 7, 0], 4, 1)
    insert_chain(cache, [5, 6, 9, 9], 4, 2)
    match = cache.match(ROOT, [], [5, 6, 7, 8], 4)
    assert (match.block_ids, match.partial_block, match.partial_tokens) == ((), 1, 3)


def test_limit_cuts_a_whole_match_down_to_a_partial_one() -> None:
    cache = PrefixCache(4)
    insert_chain(cache, list(range(8)), 4, 0)
    match = cache.match(ROOT, keys_of(range(8), 4)[1:], list(range(8)), 7)
    assert (match.block_ids, match.partial_block, match.partial_tokens) == ((0,), 1, 3)


def test_other_roots_find_nothing() -> None:
    cache, other = PrefixCache(2), root_key("weights", "other tenant")
    insert_chain(cache, [1, 2, 3, 4], 2, 0)
    match = cache.match(other, keys_of([1, 2, 3, 4], 2, other)[1:], [1, 2, 3, 4], 4)
    assert (match.block_ids, match.partial_block) == ((), None)


def test_forgotten_block_is_found_neither_whole_nor_in_part() -> None:
    cache = PrefixCache(2)
    insert_chain(cache, [1, 2, 3, 4], 2, 0)
    cache.forget(1)
    cache.forget(1)
    match = cache.match(ROOT, keys_of([1, 2, 3, 4], 2)[1:], [1, 2, 3, 4], 4)
    assert (match.block_ids, match.partial_block) == ((0,), None)
    assert len(cache) == 1
    cache.check()


def test_second_block_with_the_same_key_is_refused() -> None:
    cache = PrefixCache(2)
    insert_chain(cache, [1, 2], 2, 0)
    key = block_key(ROOT, [1, 2])
    assert not cache.insert(7, key, ROOT, [1, 2])
    assert cache.known(7) is None and cache.find(key, ROOT, [1, 2]) == 0


def test_colliding_digest_is_no_match() -> None:
    cache, key = PrefixCache(2), b"poor digest"
    assert cache.insert(0, key, ROOT, [1, 2])
    assert cache.find(key, ROOT, [1, 2]) == 0
    assert cache.find(key, ROOT, [1, 3]) is None
    assert cache.find(key, b"another parent", [1, 2]) is None
    match = cache.match(ROOT, [key], [1, 3], 2)
    assert (match.block_ids, match.partial_block, match.partial_tokens) == ((), 0, 1)
