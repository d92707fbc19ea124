"""Residency: how a sequence's KV comes into the pool and leaves it.

enter    a waiting sequence adopts what is known of its tokens: the live table of a sibling (fork), or the longest
         prefix in the cache, down to part of a block; a swapped one gets its blocks copied back, as far as the pool
         does not still hold them
publish  blocks that became full are made findable
leave    preemption: swap copies the blocks to the host store, recompute just lets go; either way full blocks stay
         findable until they are reused, so coming back may cost nothing
release  the end: everything is given back
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from octavo.memory.block_pool import BlockPool
from octavo.memory.prefix_cache import PrefixMatch
from octavo.request import Sequence, SequenceState
from octavo.scheduler.plan import MoveKind
from octavo.scheduler.plan_builder import PlanBuilder

NO_MATCH = PrefixMatch((), None, 0)


class PreemptionCounters(Protocol):
    """The counters this module writes (part of the scheduler's)."""

    preemptions_recompute: int
    preemptions_swap: int


class Residency:
    """Moves sequences between the pool, the host store and nowhere. Costs O(blocks touched)."""

    def __init__(
        self,
        pool: BlockPool,
        host: BlockPool,
        counters: PreemptionCounters,
        *,
        prefix_caching: bool,
        swap: bool,
    ) -> None:
        self._pool = pool
        self._host = host
        self._counters = counters
        self._prefix_caching = prefix_caching
        self._swap = swap

    def reserve(self, others: Iterable[Sequence]) -> int:
        """Blocks that must stay free for `others` to go on: what their known tokens still miss, and at least one each."""
        size = self._pool.block_size
        return sum(max(1, -(-s.num_tokens // size) - len(s.table)) for s in others)

    def fits(self, sequence: Sequence, reserved: int, leaving: Iterable[Sequence] = ()) -> bool:
        """Are there free blocks for all its known tokens besides `reserved`, once `leaving` have given theirs back?

        Asking for the whole gap rather than its first chunk, and leaving the others room to go on, avoids admitting what
        would be preempted at once. A prefix hit costs nothing only if others hold it: idle blocks are free blocks.
        """
        held = Counter(b for other in leaving for b in other.table.block_ids)
        freed = {b for b, count in held.items() if self._pool.references(b) == count}
        needed = -(-sequence.num_tokens // self._pool.block_size)
        free = self._pool.num_free + len(freed) - reserved
        if needed <= free or free <= 0:
            return needed <= free
        kept = (b for b in self._existing(sequence) if self._pool.references(b) and b not in freed)
        return needed - sum(1 for _ in kept) <= free

    def enter(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Fill the sequence's table with what exists and set num_computed. `fits` must have said yes."""
        if sequence.state is SequenceState.SWAPPED:
            self._swap_in(sequence, builder)
        elif (sibling := _sibling_with_prompt(sequence)) is not None:
            self._fork(sequence, sibling)
        else:
            self._adopt_prefix(sequence, builder)

    def publish(self, sequence: Sequence) -> None:
        """Make every block that is now full findable."""
        num_full = sequence.num_computed // self._pool.block_size
        if not self._prefix_caching or sequence.num_published >= num_full:
            return
        keys = sequence.keys
        for i in range(sequence.num_published, num_full):
            if not sequence.table.publish(i, keys[i], sequence.parent_key(i), sequence.block_tokens(i)):
                return
            sequence.num_published = i + 1

    def leave(self, sequence: Sequence, builder: PlanBuilder) -> SequenceState:
        """Take all blocks of a preempted sequence back; returns the state it is in then."""
        sequence.lost_tokens = max(sequence.lost_tokens, sequence.num_computed)
        if self._swap_out(sequence, builder):
            self._counters.preemptions_swap += 1
            state = SequenceState.SWAPPED
        else:
            self._counters.preemptions_recompute += 1
            sequence.num_computed = 0
            state = SequenceState.WAITING
        sequence.table.release()
        sequence.num_published = 0
        return state

    def release(self, sequence: Sequence) -> None:
        """Give back all that a finished sequence holds, on both stores."""
        sequence.table.release()
        self._release_host(sequence)

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """What the cache holds of a sequence that is to come into the pool."""
        swapped = sequence.state is SequenceState.SWAPPED
        if not self._prefix_caching or (sequence.wants_prompt_logprobs and not swapped):
            return NO_MATCH
        # At least one token is computed, or there would be no logits to choose the next one from.
        limit = sequence.num_computed if swapped else sequence.num_tokens - 1
        return self._pool.cache.match(sequence.request.root, sequence.keys, sequence.token_ids, limit)

    def _existing(self, sequence: Sequence) -> SequenceOf[int]:
        """The full blocks that `enter` would share."""
        sibling = _sibling_with_prompt(sequence)
        if sibling is None:
            return self._match(sequence).block_ids
        return sibling.table.block_ids[: (sequence.num_prompt - 1) // self._pool.block_size]

    def _adopt_prefix(self, sequence: Sequence, builder: PlanBuilder) -> None:
        match = self._match(sequence)
        sequence.table.adopt(match.block_ids)
        sequence.num_published = len(match.block_ids)
        sequence.num_computed = len(match.block_ids) * self._pool.block_size
        if match.partial_block is not None:
            copy = sequence.table.adopt_copy(match.partial_block)
            if copy is not None:
                builder.copy([copy])
                sequence.num_computed += match.partial_tokens

    def _fork(self, sequence: Sequence, sibling: Sequence) -> None:
        """Share the sibling's blocks of the prompt, but for its last token, which is computed again for its logits.

        Writing that token copies the last block if it is shared (copy-on-write); the sibling never notices.
        """
        known = sequence.num_prompt - 1
        sequence.table.adopt(sibling.table.block_ids[: -(-known // self._pool.block_size)])
        sequence.num_computed = known
        # The sibling may have blocks that are not published (yet): what follows these waits for them (invariant 7).
        sequence.num_published = min(sibling.num_published, known // self._pool.block_size)

    def _swap_out(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        count = -(-sequence.num_computed // self._pool.block_size)
        if not self._swap or not count or count > self._host.num_free:
            return False
        for block_id in sequence.table.block_ids[:count]:
            target = self._host.allocate()
            assert target is not None, "num_free was checked"
            sequence.host_block_ids.append(target)
            builder.move(MoveKind.SWAP_OUT, block_id, target)
        return True

    def _swap_in(self, sequence: Sequence, builder: PlanBuilder) -> None:
        # Only an unbroken run from the start is adopted, and counts as published; the rest is published again.
        known = self._match(sequence).block_ids
        sequence.table.adopt(known)
        sequence.num_published = len(known)
        for i in range(len(known), len(sequence.host_block_ids)):
            start = i * self._pool.block_size
            taken = sequence.table.prepare(start, start + 1)
            assert taken == [], "fits() found room for all blocks, and a new block needs no copy"
            builder.move(MoveKind.SWAP_IN, sequence.host_block_ids[i], sequence.table.block_ids[i])
        self._release_host(sequence)

    def _release_host(self, sequence: Sequence) -> None:
        while sequence.host_block_ids:
            self._host.release(sequence.host_block_ids.pop())


def _sibling_with_prompt(sequence: Sequence) -> Sequence | None:
    """A running sequence of the same request whose table holds the whole prompt, if `sequence` has not begun."""
    begun = sequence.num_generated or sequence.state is SequenceState.SWAPPED
    if begun or sequence.wants_prompt_logprobs:
        return None
    for sibling in sequence.request.sequences:
        if sibling.state is SequenceState.RUNNING and sibling.num_computed >= sequence.num_prompt:
            return sibling
    return None
