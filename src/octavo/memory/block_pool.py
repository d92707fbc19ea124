"""The block pool: who owns which physical block, and which one is taken next.

A pool owns the ids 0..num_blocks-1 of one store (device memory, host memory) and knows nothing of tensors. A block is in
exactly one of three states:

            allocate                      share
    blank ------------> referenced <------------------ idle
      ^                  |      |                       ^  |
      +------------------+      +-----------------------+  |
       release, unknown           release, in the cache    | allocate (evicts)
                                                           v
                                                       referenced

*Idle* blocks hold KV that the prefix cache can still find; they are as free as blank ones, but are taken only when no blank
block is left, the least recently used first. A table that is released gives back its tail first, so of one chain the tail
is evicted before the head that others may share.

Invariants (checked by `check`, and by a property test after every operation):

  1. Every block is blank, idle or referenced, and exactly one of these.
  2. A block's reference count equals the number of tables (and pins) that name it.
  3. A block that is shared, or whose content is in the cache, is never written: a writer copies it first.
  4. The key of a block in the cache matches its tokens; a blank block is not in the cache.
  5. blank + idle + referenced == num_blocks.
  6. Giving back everything leaves no references: a finished request owns nothing.
  7. A block in the cache follows a root or another block in the cache. (Who holds a block holds those before it, a chain is
     evicted from its tail, and nothing is published after a block that could not be.)

Every operation is O(1), but for what the prefix cache says of itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from octavo.memory.prefix_cache import BlockKey, PrefixCache


class BlockPool:
    """Reference counts and eviction order of one store of blocks.

    num_blocks: blocks in the store. block_size: tokens a block holds. The pool is not thread-safe: one loop owns it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = PrefixCache(block_size)
        self._references = [0] * num_blocks
        # Popped from the end, so that a fresh pool hands out 0, 1, 2, ...
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still give: blank and idle ones."""
        return len(self._blank) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks that are free but whose content can still be found."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_free

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def allocate(self) -> int | None:
        """Take a free block with one reference; None if there is none (a state of affairs, not an error)."""
        if self._blank:
            block_id = self._blank.pop()
        elif self._idle:
            block_id, _ = self._idle.popitem(last=False)
            self.cache.forget(block_id)
        else:
            return None
        self._references[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a reference to a block that is referenced or idle."""
        if self._references[block_id] == 0:
            del self._idle[block_id]
        self._references[block_id] += 1

    def release(self, block_id: int) -> None:
        """Take a reference away; the last one makes the block idle (if it can be found) or blank."""
        count = self._references[block_id] - 1
        assert count >= 0, f"block {block_id} released more often than taken"
        self._references[block_id] = count
        if count == 0:
            if self.cache.known(block_id) is not None:
                self._idle[block_id] = None
            else:
                self._blank.append(block_id)

    def writable(self, block_id: int) -> bool:
        """May its one owner write into this block as it is? (Invariant 3.)"""
        return self._references[block_id] == 1 and self.cache.known(block_id) is None

    def publish(self, block_id: int, key: BlockKey, parent: BlockKey, token_ids: Sequence[int]) -> int | None:
        """Make a full, computed block findable and return the block to use from now on.

        That is `block_id` itself or, if the same content is in the cache already, the block that holds it: the reference
        moves over and `block_id` is given back, so that equal blocks are stored once. None if the digest collides with
        that of other content: `block_id` stays private, and the caller must not publish what comes after it (invariant 7),
        or it would be found behind that other content.
        """
        if self.cache.insert(block_id, key, parent, token_ids):
            return block_id
        twin = self.cache.find(key, parent, token_ids)
        if twin is not None and twin != block_id:
            self.share(twin)
            self.release(block_id)
        return twin

    def drop_idle(self) -> int:
        """Forget all idle content (the blocks become blank); returns how many blocks that were."""
        dropped = len(self._idle)
        for block_id in self._idle:
            self.cache.forget(block_id)
        self._blank.extend(self._idle)
        self._idle.clear()
        return dropped

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Verify the invariants. `tables`: every block list that holds references, for invariant 2. O(blocks)."""
        blank, idle = set(self._blank), set(self._idle)
        used = {b for b, count in enumerate(self._references) if count > 0}
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert not (blank & idle or blank & used or idle & used), "a block is in two states"
        assert len(blank) + len(idle) + len(used) == self.num_blocks, "a block is lost"
        assert all(self.cache.known(b) is None for b in blank), "a blank block is in the cache"
        assert all(self.cache.known(b) is not None for b in idle), "an idle block cannot be found"
        self.cache.check()
        if tables is not None:
            named = Counter(block_id for table in tables for block_id in table)
            counted = {b: self._references[b] for b in used}
            assert dict(named) == counted, f"reference counts {counted} differ from tables {dict(named)}"
