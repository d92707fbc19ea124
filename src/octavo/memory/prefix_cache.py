"""The prefix cache: which block holds the KV of which tokens, so that equal beginnings are computed once.

A full block is known by a *key*: a digest of its parent's key and its own token ids. Keys therefore form chains, and one key
stands for a whole prefix. The root of a chain is a digest of everything else that shapes KV (weights, tenant salt), so two
models or two tenants never meet. Keys are stable across runs and processes.

    root --[t0..t3]--> k1 --[t4..t7]--> k2 --[t8..t11]--> k3
                          \\--[t4,t5,x,y]--> k2'          children of k1, kept sorted by their tokens

Matching goes below the block: after the last block that matches whole, the children of its key are sorted by token ids, so
the one that shares the longest beginning with the remaining tokens is a neighbour of the place where these would be
inserted. Two comparisons find it exactly, however many children there are.

This is an index only: it owns no blocks and counts no references; `BlockPool` does. A digest collision cannot give wrong
KV: a block's tokens and parent key are compared as well, and the parent key stands for one content only, since the parent is
in the index for as long as the block is (invariant 7 of the pool).

Source: the chain of block digests follows automatic prefix caching in vLLM (Kwon et al., PagedAttention, SOSP 2023, and its
documentation); the sub-block match answers the same need as the radix tree of SGLang (Zheng et al., 2024).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile

BlockKey = bytes
_KEY_BYTES = 16


def root_key(*parts: str) -> BlockKey:
    """The key that a chain begins with: a digest of all that alters KV besides the tokens.

    >>> root_key("weights", "tenant") != root_key("weightst", "enant")
    True
    """
    digest = blake2b(digest_size=_KEY_BYTES)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """The key of a full block that holds `token_ids` after the prefix `parent`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=_KEY_BYTES).digest()


@dataclass(frozen=True, slots=True)
class KnownBlock:
    """What a block in the cache holds."""

    key: BlockKey
    parent: BlockKey
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest known beginning of some tokens.

    block_ids match whole. partial_block (if not None) agrees in its first partial_tokens tokens and is to be copied.
    """

    block_ids: tuple[int, ...]
    partial_block: int | None
    partial_tokens: int


class PrefixCache:
    """Index from content to block. Every operation is O(blocks matched) plus O(log children) comparisons."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_key: dict[BlockKey, int] = {}
        self._known: dict[int, KnownBlock] = {}
        self._children: dict[BlockKey, list[tuple[tuple[int, ...], int]]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def known(self, block_id: int) -> KnownBlock | None:
        """What `block_id` holds, or None if its content is not in the cache."""
        return self._known.get(block_id)

    def find(self, key: BlockKey, parent: BlockKey, token_ids: Sequence[int]) -> int | None:
        """The block with exactly this content, or None. A colliding digest is no match."""
        block_id = self._by_key.get(key)
        if block_id is None:
            return None
        known = self._known[block_id]
        same = known.parent == parent and known.token_ids == tuple(token_ids)
        return block_id if same else None

    def match(
        self, root: BlockKey, keys: Sequence[BlockKey], token_ids: Sequence[int], limit: int
    ) -> PrefixMatch:
        """The longest known prefix of token_ids[:limit].

        keys: the keys of the full blocks of token_ids, in order (may be more than `limit` covers).
        """
        size = self._block_size
        found: list[int] = []
        parent = root
        for i, key in enumerate(keys[: limit // size]):
            block_id = self.find(key, parent, token_ids[i * size : (i + 1) * size])
            if block_id is None:
                break
            found.append(block_id)
            parent = key
        start = len(found) * size
        rest = tuple(token_ids[start : min(start + size, limit)])
        partial, common = self._best_child(parent, rest)
        return PrefixMatch(tuple(found), partial, common)

    def insert(self, block_id: int, key: BlockKey, parent: BlockKey, token_ids: Sequence[int]) -> bool:
        """Make the content of a full block findable.

        Returns False, and changes nothing, if the key is taken already (the caller may then use that block).
        """
        if key in self._by_key:
            return False
        assert block_id not in self._known and len(token_ids) == self._block_size
        known = KnownBlock(key, parent, tuple(token_ids))
        self._by_key[key] = block_id
        self._known[block_id] = known
        insort(self._children.setdefault(parent, []), (known.token_ids, block_id))
        return True

    def forget(self, block_id: int) -> None:
        """Drop a block from the index; no-op if it is not in it."""
        known = self._known.pop(block_id, None)
        if known is None:
            return
        del self._by_key[known.key]
        siblings = self._children[known.parent]
        del siblings[bisect_left(siblings, (known.token_ids, block_id))]
        if not siblings:
            del self._children[known.parent]

    def check(self) -> None:
        """Verify that the three indexes agree and that every key matches its tokens. O(blocks)."""
        assert len(self._by_key) == len(self._known) == sum(map(len, self._children.values()))
        for block_id, known in self._known.items():
            assert self._by_key[known.key] == block_id
            assert known.key == block_key(known.parent, known.token_ids)
        for parent, children in self._children.items():
            assert children and children == sorted(children)
            assert all(self._known[b].parent == parent and self._known[b].token_ids == t for t, b in children)

    def _best_child(self, parent: BlockKey, rest: tuple[int, ...]) -> tuple[int | None, int]:
        children = self._children.get(parent)
        if not children or not rest:
            return None, 0
        place = bisect_left(children, (rest, -1))
        best, longest = None, 0
        for token_ids, block_id in children[max(place - 1, 0) : place + 1]:
            common = _common_prefix(token_ids, rest)
            if common > longest:
                best, longest = block_id, common
        return best, longest


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
