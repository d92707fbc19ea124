"""A step plan while it is being made: the one mutable object of a schedule() call, frozen by `build`."""

from __future__ import annotations

from octavo.memory.block_table import BlockCopy
from octavo.request import Sequence
from octavo.scheduler.plan import BlockMove, MoveKind, PlanItem, SequenceStart, StepPlan


class PlanBuilder:
    """Collects items within the token budget, and moves in the order in which they were decided.

    An item can be taken out again (its sequence was preempted by a later decision); moves cannot, and need not be: they are
    carried out in order, so a later move reads what an earlier one left.
    """

    def __init__(self, step: int, token_budget: int) -> None:
        self.budget = token_budget
        self.preempted = 0  # sequences that gave way because another one had no block
        self._step = step
        self._counts: dict[Sequence, int] = {}
        self._moves: list[BlockMove] = []

    @property
    def num_items(self) -> int:
        return len(self._counts)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._counts

    def add(self, sequence: Sequence, count: int) -> None:
        """Compute the next `count` tokens of `sequence`. Its table is ready for them."""
        assert 0 < count <= self.budget and sequence not in self._counts
        self._counts[sequence] = count
        self.budget -= count

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out of the step, if it is in it."""
        self.budget += self._counts.pop(sequence, 0)

    def copy(self, copies: list[BlockCopy]) -> None:
        self._moves.extend(BlockMove(MoveKind.COPY, source, target) for source, target in copies)

    def move(self, kind: MoveKind, source: int, target: int) -> None:
        self._moves.append(BlockMove(kind, source, target))

    def build(self, started: list[SequenceStart], ended: list[int]) -> StepPlan:
        items = tuple(_item(sequence, count) for sequence, count in self._counts.items())
        return StepPlan(self._step, items, tuple(self._moves), tuple(started), tuple(ended))


def _item(sequence: Sequence, count: int) -> PlanItem:
    start, end = sequence.num_computed, sequence.num_computed + count
    params = sequence.request.params
    return PlanItem(
        sequence_id=sequence.sequence_id,
        start=start,
        token_ids=tuple(sequence.token_ids[start:end]),
        block_ids=tuple(sequence.table.block_ids),
        sample=end == sequence.num_tokens and params.max_tokens != 0,
        prompt_logprobs=params.prompt_logprobs if sequence.wants_prompt_logprobs else None,
    )
