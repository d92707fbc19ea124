"""The block table of one sequence: logical block -> physical block, like the page table of a process.

    position of a token:   0 ........ S-1 | S ....... 2S-1 | 2S ...
    logical block:               0        |        1       |   2
    physical block:        block_ids[0]   |  block_ids[1]  | block_ids[2]
    slot of position p:    block_ids[p // S] * S + p % S

A table takes blocks from the pool on demand, may share some with other tables (a fork, a prefix hit), and copies a block
before its sequence writes into one that it does not own alone (copy-on-write). The copies it asks for are returned as
(source, target) pairs and become moves of the step's plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.memory.block_pool import BlockPool

BlockCopy = tuple[int, int]


class BlockTable:
    """Blocks of one sequence in logical order. The scheduler is the only one that changes it."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.block_ids: list[int] = []

    def __len__(self) -> int:
        return len(self.block_ids)

    def missing(self, start: int, end: int) -> int:
        """How many blocks `prepare(start, end)` would take from the pool."""
        new = -(-end // self._pool.block_size) - len(self.block_ids)
        return max(0, new) + len(self._unwritable(start, end))

    def prepare(self, start: int, end: int) -> list[BlockCopy] | None:
        """Make positions [start, end) writable: append blocks, and copy those that may not be written.

        All or nothing: returns the copies to make, in order, or None if the pool has too few free blocks. O(blocks touched).
        """
        unwritable = self._unwritable(start, end)
        new = -(-end // self._pool.block_size) - len(self.block_ids)
        needed = len(unwritable) + max(0, new)
        if needed and needed > self._pool.num_free:
            return None
        copies = [self._replace(i) for i in unwritable]
        for _ in range(new):
            self.block_ids.append(self._take())
        return copies

    def adopt(self, block_ids: Sequence[int]) -> None:
        """Append blocks that exist already (a prefix hit, a fork), taking a reference to each."""
        for block_id in block_ids:
            self._pool.share(block_id)
        self.block_ids.extend(block_ids)

    def adopt_copy(self, source: int) -> BlockCopy | None:
        """Append a new block that is to begin as a copy of `source`; None if no block is free."""
        # The source may be idle: hold it, so that taking the target cannot evict it.
        self._pool.share(source)
        target = self._pool.allocate()
        self._pool.release(source)
        if target is None:
            return None
        self.block_ids.append(target)
        return source, target

    def publish(self, index: int, key: bytes, parent: bytes, token_ids: Sequence[int]) -> bool:
        """Make full block `index` findable; it may be exchanged for an equal one that is known already.

        False if its digest collides with another one: then nothing after it may be published.
        """
        block_id = self._pool.publish(self.block_ids[index], key, parent, token_ids)
        if block_id is None:
            return False
        self.block_ids[index] = block_id
        return True

    def release(self) -> None:
        """Give all blocks back, tail first, so that a chain is evicted from its tail."""
        while self.block_ids:
            self._pool.release(self.block_ids.pop())

    def _unwritable(self, start: int, end: int) -> list[int]:
        """The logical blocks of [start, end) that exist, but must be copied before they are written."""
        size, pool, block_ids = self._pool.block_size, self._pool, self.block_ids
        covered = range(start // size, min(-(-end // size), len(block_ids)))
        return [i for i in covered if not pool.writable(block_ids[i])]

    def _take(self) -> int:
        block_id = self._pool.allocate()
        assert block_id is not None, "prepare() checked that there are enough free blocks"
        return block_id

    def _replace(self, index: int) -> BlockCopy:
        source, target = self.block_ids[index], self._take()
        self.block_ids[index] = target
        self._pool.release(source)
        return source, target
