"""Whatever is allocated, shared, copied, published and evicted: a block holds what its table says it holds.

The model keeps for every physical block the prefix that was computed into each slot (as numbers, see `fake_executor.py`) and
compares it with the tokens of the tables and with the keys of the cache after every operation. Some runs use digests that
collide all the time: these may cost hits, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fake_executor import PrefixNumbers
from octavo.memory import prefix_cache
from octavo.memory.block_pool import BlockPool
from octavo.memory.block_table import BlockCopy, BlockTable
from octavo.memory.prefix_cache import BlockKey

ROOTS = (b"root-a", b"root-b")
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=10)
PICK = st.integers(0, 30)


def by_sum(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    return b"sum" + bytes([sum(token_ids) % 2])


def by_parent(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    return b"k" + parent[-1:] + bytes([token_ids[0]])


def constant(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    return b"the one"


KEYS: dict[str, Callable[[BlockKey, Sequence[int]], BlockKey]] = {
    "digest": prefix_cache.block_key,
    "by sum": by_sum,
    "by parent": by_parent,
    "constant": constant,
}


@dataclass(eq=False)
class Holder:
    """A sequence as the pool sees it: a table, the tokens whose KV is in it, and how many blocks are published."""

    root: BlockKey
    table: BlockTable
    token_ids: list[int]
    num_published: int = 0


class MemoryMachine(RuleBasedStateMachine):
    """Random holders against one pool."""

    @initialize(
        size=st.sampled_from([1, 2, 4]), num_blocks=st.integers(1, 12), keys=st.sampled_from(sorted(KEYS))
    )
    def begin(self, size: int, num_blocks: int, keys: str) -> None:
        self.size = size
        self.pool = BlockPool(num_blocks, size)
        self.numbers = PrefixNumbers()
        self.content = [[-1] * size for _ in range(num_blocks)]
        self.holders: list[Holder] = []
        self.tokens_of: dict[int, tuple[BlockKey, tuple[int, ...]]] = {}
        self.collide = keys != "digest"
        self.key_of = KEYS[keys]
        # The cache's own check() recomputes keys.
        self.patch = mock.patch.object(prefix_cache, "block_key", self.key_of)
        self.patch.start()

    def teardown(self) -> None:
        if not hasattr(self, "patch"):
            return
        try:
            while self.holders:
                self.holders.pop().table.release()
            self.pool.check([])
            assert self.pool.num_used == 0
            num_blank = self.pool.num_free - self.pool.num_idle
            assert self.pool.drop_idle() == self.pool.num_blocks - num_blank
            assert len(self.pool.cache) == 0 and self.pool.num_free == self.pool.num_blocks
            self.pool.check([])
        finally:
            self.patch.stop()

    # -- rules

    @rule(token_ids=TOKENS, like=PICK, common=st.integers(0, 12), root=st.sampled_from(ROOTS))
    def enter(self, token_ids: list[int], like: int, common: int, root: BlockKey) -> None:
        """A new holder adopts what the cache has of its tokens, and computes the rest if there is room."""
        if self.holders and common:
            model = self.holders[like % len(self.holders)]
            token_ids, root = model.token_ids[:common] + token_ids, model.root
        holder = Holder(root, BlockTable(self.pool), [])
        self.holders.append(holder)
        limit = len(token_ids) - 1
        match = self.pool.cache.match(root, self._keys(root, token_ids), token_ids, limit)
        self._check_match(root, token_ids[:limit], len(match.block_ids) * self.size + match.partial_tokens)
        holder.table.adopt(match.block_ids)
        holder.num_published = len(match.block_ids)
        holder.token_ids = token_ids[: len(match.block_ids) * self.size]
        if match.partial_block is not None:
            copy = holder.table.adopt_copy(match.partial_block)
            if copy is not None:
                self._copy([copy])
                holder.token_ids = token_ids[: len(holder.token_ids) + match.partial_tokens]
        self._compute(holder, token_ids[len(holder.token_ids) :])

    @precondition(lambda self: self.holders)
    @rule(which=PICK, token_ids=TOKENS)
    def extend(self, which: int, token_ids: list[int]) -> None:
        self._compute(self.holders[which % len(self.holders)], token_ids)

    @precondition(lambda self: self.holders)
    @rule(which=PICK, back=st.integers(1, 3))
    def compute_again(self, which: int, back: int) -> None:
        """The last tokens are computed again with the same result, as a fork does; shared blocks are copied first."""
        holder = self.holders[which % len(self.holders)]
        back = min(back, len(holder.token_ids) - holder.num_published * self.size)
        if back > 0:
            tail = holder.token_ids[-back:]
            del holder.token_ids[-back:]
            if not self._compute(holder, tail):
                holder.token_ids += tail

    @precondition(lambda self: self.holders)
    @rule(which=PICK)
    def fork(self, which: int) -> None:
        parent = self.holders[which % len(self.holders)]
        child = Holder(parent.root, BlockTable(self.pool), list(parent.token_ids), parent.num_published)
        used = self.pool.num_used
        child.table.adopt(parent.table.block_ids)
        assert self.pool.num_used == used, "a fork takes no block"
        self.holders.append(child)

    @precondition(lambda self: self.holders)
    @rule(which=PICK)
    def publish(self, which: int) -> None:
        holder = self.holders[which % len(self.holders)]
        keys = [holder.root, *self._keys(holder.root, holder.token_ids)]
        for i in range(holder.num_published, len(holder.token_ids) // self.size):
            part = holder.token_ids[i * self.size : (i + 1) * self.size]
            if not holder.table.publish(i, keys[i + 1], keys[i], part):
                assert self.collide, "a block was refused although no digests collide"
                break
            holder.num_published = i + 1
            assert not self.pool.writable(holder.table.block_ids[i])

    @precondition(lambda self: self.holders)
    @rule(which=PICK)
    def release(self, which: int) -> None:
        holder = self.holders.pop(which % len(self.holders))
        known = len(self.pool.cache)
        holder.table.release()
        assert len(holder.table) == 0 and len(self.pool.cache) == known, "giving back forgets nothing"

    @rule()
    def drop_idle(self) -> None:
        idle, known, free = self.pool.num_idle, len(self.pool.cache), self.pool.num_free
        assert self.pool.drop_idle() == idle
        assert (self.pool.num_idle, len(self.pool.cache), self.pool.num_free) == (0, known - idle, free)

    # -- invariants

    @invariant()
    def memory_is_sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check([h.table.block_ids for h in self.holders])
        for holder in self.holders:
            held = [n for b in holder.table.block_ids for n in self.content[b]][: len(holder.token_ids)]
            assert held == self._chain(holder.root, holder.token_ids), (
                "a block holds the KV of another prefix"
            )
        known = {b: k for b in range(self.pool.num_blocks) if (k := self.pool.cache.known(b)) is not None}
        keys = {k.key for k in known.values()}
        assert all(k.parent in keys or k.parent in ROOTS for k in known.values()), (
            "a block outlived its parent"
        )
        for block, content in known.items():
            root, token_ids = self.tokens_of[self.content[block][-1]]
            assert token_ids[-self.size :] == content.token_ids and len(token_ids) % self.size == 0
            assert [root, *self._keys(root, token_ids)][-2:] == [content.parent, content.key]

    # -- the model

    def _compute(self, holder: Holder, new: list[int]) -> bool:
        """Write the KV of `new` after what the holder has; False, and nothing done, if the pool has no room."""
        start, end = len(holder.token_ids), len(holder.token_ids) + len(new)
        missing, free, before = (
            holder.table.missing(start, end),
            self.pool.num_free,
            list(holder.table.block_ids),
        )
        copies = holder.table.prepare(start, end)
        if copies is None:
            assert missing > free and holder.table.block_ids == before, "all or nothing"
            return False
        assert free >= missing and len(holder.table) * self.size >= end
        self._copy(copies)
        holder.token_ids += new
        chain = self._chain(holder.root, holder.token_ids)
        for position in range(start, end):
            block = holder.table.block_ids[position // self.size]
            assert self.pool.writable(block), "a block is written that is not its own"
            self.content[block][position % self.size] = chain[position]
        return True

    def _copy(self, copies: list[BlockCopy]) -> None:
        for source, target in copies:
            self.content[target] = list(self.content[source])

    def _keys(self, root: BlockKey, token_ids: Sequence[int]) -> list[BlockKey]:
        keys, parent = [], root
        for i in range(len(token_ids) // self.size):
            parent = self.key_of(parent, token_ids[i * self.size : (i + 1) * self.size])
            keys.append(parent)
        return keys

    def _chain(self, root: BlockKey, token_ids: Sequence[int]) -> list[int]:
        chain, prefix = [], self.numbers.root(root)
        for i, token in enumerate(token_ids):
            prefix = self.numbers.after(prefix, token)
            self.tokens_of[prefix] = (root, tuple(token_ids[: i + 1]))
            chain.append(prefix)
        return chain

    def _check_match(self, root: BlockKey, token_ids: Sequence[int], matched: int) -> None:
        """Brute force over every chain in the cache: the match is the longest common beginning, to the token."""
        longest = 0
        for block in range(self.pool.num_blocks):
            if self.pool.cache.known(block) is not None:
                chain_root, chain = self.tokens_of[self.content[block][-1]]
                common = 0
                while common < min(len(chain), len(token_ids)) and chain[common] == token_ids[common]:
                    common += 1
                longest = max(longest, common if chain_root == root else 0)
        # Colliding digests may hide what is there, never invent what is not.
        assert matched <= longest if self.collide else matched == longest


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
