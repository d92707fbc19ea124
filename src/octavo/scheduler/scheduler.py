"""The scheduler: one step at a time, who computes what, and whose blocks give way.

    schedule(now) -> StepPlan          commit(plan, result) -> events          add / finish between steps

One token budget per step, spent in this order:

  1. running sequences that need one token (decode), in rank order: never stalled by anything below
  2. running sequences in the middle of a longer gap (a prompt, a resumed sequence): a chunk of what is left; before those
     that it outranks, an urgent arrival is admitted, and takes their blocks, seats and tokens if there is no room for both
  3. admissions in rank order: swapped-out sequences come back, waiting ones begin, as far as blocks and budget go

When a running sequence needs a block and none is free, the running sequence with the highest rank number is preempted,
perhaps itself. The one that ranks first can always push out all others and fits alone (`check_request`), so it finishes,
and then the next one ranks first: nobody waits for ever, unless a policy lets newcomers rank before it without end.

Deciding only: no torch, no I/O, no clock. `now` is passed in, in seconds.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from octavo.memory.block_pool import BlockPool
from octavo.request import Request, Sequence, SequenceEvent, SequenceState
from octavo.scheduler.limits import Limits, finish_reason
from octavo.scheduler.plan import SequenceStart, StepPlan, StepResult
from octavo.scheduler.plan_builder import PlanBuilder
from octavo.scheduler.policies import Policy
from octavo.scheduler.residency import Residency


@dataclass
class Counters:
    """Sums since start, written by the scheduler only."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class Scheduler:
    """Continuous batching over a block pool. Owned by one loop; not thread-safe.

    host: the store for swapped-out blocks (may have none, then preemption falls back to recompute).
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        host: BlockPool,
        policy: Policy,
        limits: Limits,
        max_num_seqs: int,
        token_budget: int,
        prefix_caching: bool = True,
        swap: bool = False,
    ) -> None:
        self.pool = pool
        self.host = host
        self.limits = limits
        self.counters = Counters()
        self.running: list[Sequence] = []
        self.pending: list[Sequence] = []  # WAITING and SWAPPED, in rank order
        self._policy = policy
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._residency = Residency(pool, host, self.counters, prefix_caching=prefix_caching, swap=swap)
        self._requests: dict[str, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._started: list[SequenceStart] = []
        self._ended: list[int] = []
        self._to_preempt: set[Sequence] = set()
        self._next_id = 0
        self._now = 0.0

    # -- between steps

    @property
    def has_work(self) -> bool:
        """Is there anything a step could do?"""
        return bool(self.running or self.pending or self._ended)

    @property
    def num_swapped(self) -> int:
        return sum(s.state is SequenceState.SWAPPED for s in self.pending) if self.host.num_used else 0

    def add(self, request: Request) -> None:
        """Queue a request that passed `check_request`. Makes its sequences; O(n + log waiting)."""
        assert request.request_id not in self._requests
        self._requests[request.request_id] = request
        for index in range(request.params.n):
            sequence = Sequence(self._next_id, request, index, self._next_id, self.pool)
            self._next_id += 1
            request.sequences.append(sequence)
            self._sequences[sequence.sequence_id] = sequence
            insort(self.pending, sequence, key=self._rank)

    def finish(
        self, request_id: str, index: int | None, reason: str, error: str | None = None
    ) -> list[SequenceEvent]:
        """End a request, or one of its sequences, from outside; its blocks are free when this returns.

        Unknown or finished ones are ignored: the news of the end and the wish to end may cross.
        """
        request = self._requests.get(request_id)
        if request is None:
            return []
        chosen = [s for s in request.sequences if index is None or s.index == index]
        ending = [s for s in chosen if s.state is not SequenceState.FINISHED]
        for sequence in ending:
            self._end(sequence, reason)
        return [SequenceEvent(s, finish_reason=reason, error=error) for s in ending]

    def preempt(self, request_id: str) -> None:
        """Take the blocks of a request's running sequences back at the next step, as if memory had run out.

        They come back in rank order when there is room. Unknown requests are ignored.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._to_preempt.update(request.sequences)

    # -- a step

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step. Sequences that it places hold all the blocks that the step writes."""
        self._now = now
        builder = PlanBuilder(self.counters.steps, self._token_budget)
        if self._policy.ages:
            self.running.sort(key=self._rank)
            self.pending.sort(key=self._rank)
        self._preempt_asked(builder)
        self._place(builder, [s for s in self.running if s.gap == 1])
        self._admit_urgent(builder)
        self._place(builder, list(self.running))
        if not builder.preempted:
            self._admit(builder)
        plan = builder.build(self._started, self._ended)
        self._started, self._ended = [], []
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceEvent]:
        """Take note of what the step computed; returns the news, one event at most per sequence."""
        self.counters.steps += 1
        self.counters.step_tokens += plan.num_tokens
        events: list[SequenceEvent] = []
        for item in plan.items:
            sequence = self._sequences[item.sequence_id]
            self._advance(sequence, item.start + len(item.token_ids))
            scores = result.prompt_logprobs.get(item.sequence_id)
            if scores is not None:
                del sequence.prompt_logprobs[item.start :]
                sequence.prompt_logprobs.extend(scores)
            event = self._take_token(sequence, result)
            if event is not None:
                events.append(event)
        return events

    def check(self) -> None:
        """Verify the invariants of memory and of the queues. O(blocks + sequences); for tests and `--check`."""
        live = [s for s in self._sequences.values() if s.state is not SequenceState.FINISHED]
        self.pool.check([s.table.block_ids for s in live])
        self.host.check([s.host_block_ids for s in live])
        assert set(live) == set(self.running) | set(self.pending), "a live sequence is in no queue"
        assert len(live) == len(self.running) + len(self.pending), "a sequence is queued twice"
        assert all(s.state is SequenceState.RUNNING for s in self.running)
        assert all(s.state in (SequenceState.WAITING, SequenceState.SWAPPED) for s in self.pending)
        assert all(s.num_computed <= s.num_tokens for s in live)
        for s in live:
            holds = len(s.table) if s.state is SequenceState.RUNNING else len(s.host_block_ids)
            assert s.state is SequenceState.WAITING or holds * self.pool.block_size >= s.num_computed
            assert s.state is not SequenceState.WAITING or not (s.table.block_ids or s.host_block_ids)

    # -- placing

    def _rank(self, sequence: Sequence) -> tuple[float, ...]:
        return self._policy.rank(sequence, self._now)

    def _preempt_asked(self, builder: PlanBuilder) -> None:
        for sequence in [s for s in self.running if s in self._to_preempt]:
            self._preempt(sequence, builder)
        self._to_preempt.clear()

    def _place(self, builder: PlanBuilder, sequences: list[Sequence]) -> None:
        """Put running sequences into the step, as far as the budget goes; those that are in it stay as they are."""
        for sequence in sequences:
            if sequence.state is not SequenceState.RUNNING or sequence in builder:
                continue
            count = min(sequence.gap, builder.budget)
            if count and self._secure_blocks(sequence, count, builder):
                builder.add(sequence, count)

    def _admit_urgent(self, builder: PlanBuilder) -> None:
        """Admit who outranks running sequences before these get their chunks, preempting as many as are in its way."""
        while (urgent := next((s for s in self.pending if self._ready(s)), None)) is not None:
            others = [s for s in self.running if not self._policy.outranks(urgent, s)]
            if len(others) == len(self.running):
                return
            self._place(builder, others)
            if not self._make_room(urgent, builder):
                return
            self._enter(urgent, builder)

    def _make_room(self, urgent: Sequence, builder: PlanBuilder) -> bool:
        """Preempt whom `urgent` outranks, from the end, until it has room; nobody if even all would not do."""
        victims = [s for s in self.running if self._policy.outranks(urgent, s)]
        reserved = self._residency.reserve(s for s in self.running if not self._policy.outranks(urgent, s))
        budget = builder.budget or any(victim in builder for victim in victims)
        if not victims or not budget or not self._residency.fits(urgent, reserved, victims):
            return False
        seats = self._max_num_seqs
        while not (builder.budget and len(self.running) < seats and self._residency.fits(urgent, reserved)):
            if not victims:
                return False
            self._preempt(victims.pop(), builder)
        return True

    def _secure_blocks(self, sequence: Sequence, count: int, builder: PlanBuilder) -> bool:
        """Get the blocks for the next `count` tokens, preempting from the end of the ranks; False if it gave way itself."""
        start = sequence.num_computed
        while (copies := sequence.table.prepare(start, start + count)) is None:
            victim = self.running[-1]
            builder.preempted += 1
            self._preempt(victim, builder)
            if victim is sequence:
                return False
        builder.copy(copies)
        return True

    def _admit(self, builder: PlanBuilder) -> None:
        for sequence in list(self.pending):
            if not builder.budget or builder.preempted or len(self.running) >= self._max_num_seqs:
                return
            if not self._ready(sequence):
                continue
            if not self._residency.fits(sequence, self._residency.reserve(self.running)):
                return
            self._enter(sequence, builder)

    def _enter(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """Let a pending sequence run, with what exists of its KV, and put it into the step."""
        self._residency.enter(sequence, builder)
        self.pending.remove(sequence)
        insort(self.running, sequence, key=self._rank)
        sequence.move_to(SequenceState.RUNNING)
        if sequence.num_cached is None:
            self._note_start(sequence)
        self._place(builder, [sequence])

    def _ready(self, sequence: Sequence) -> bool:
        """May it be admitted? The later sequences of a request wait until the first has computed the prompt they share."""
        if sequence.index == 0 or sequence.request.prompt_computed:
            return True
        return sequence.request.sequences[0].state is SequenceState.FINISHED

    def _preempt(self, victim: Sequence, builder: PlanBuilder) -> None:
        builder.drop(victim)
        self.running.remove(victim)
        victim.move_to(self._residency.leave(victim, builder))
        victim.num_preemptions += 1
        insort(self.pending, victim, key=self._rank)

    def _note_start(self, sequence: Sequence) -> None:
        request = sequence.request
        self._started.append(
            SequenceStart(sequence.sequence_id, request.params, request.prompt_token_ids, sequence.seed)
        )
        # The prompt counts once: later sequences of the request share it.
        first = all(s.num_cached is None for s in request.sequences)
        sequence.num_cached = sequence.num_computed
        if first:
            self.counters.prompt_tokens += sequence.num_prompt
            self.counters.prefix_query_tokens += sequence.num_prompt
            self.counters.prefix_hit_tokens += sequence.num_computed

    # -- committing

    def _advance(self, sequence: Sequence, num_computed: int) -> None:
        if sequence.lost_tokens:
            redone = max(0, min(num_computed, sequence.lost_tokens) - sequence.num_computed)
            self.counters.recomputed_tokens += redone
        sequence.num_computed = num_computed
        self._residency.publish(sequence)
        if num_computed >= sequence.num_prompt:
            sequence.request.prompt_computed = True

    def _take_token(self, sequence: Sequence, result: StepResult) -> SequenceEvent | None:
        sampled = result.sampled.get(sequence.sequence_id)
        scores_only = sequence.request.params.max_tokens == 0 and sequence.gap == 0
        if sampled is None and not scores_only:
            return None
        if sampled is not None and sampled.error is not None:
            self._end(sequence, "error")
            return SequenceEvent(sequence, finish_reason="error", error=sampled.error)
        token_ids: tuple[int, ...] = ()
        if sampled is not None:
            token_ids = (sampled.token_id,)
            sequence.token_ids.append(sampled.token_id)
            self.counters.generation_tokens += 1
        ended = finish_reason(sequence, self.limits.eos_token_ids)
        event = SequenceEvent(
            sequence,
            token_ids,
            logprobs=None if sampled is None or sampled.logprobs is None else (sampled.logprobs,),
            finish_reason=ended[0] if ended else None,
            stop_reason=ended[1] if ended else None,
            prompt_logprobs=_prompt_scores(sequence),
        )
        if ended:
            self._end(sequence, ended[0])
        return event

    def _end(self, sequence: Sequence, reason: str) -> None:
        queue = self.running if sequence.state is SequenceState.RUNNING else self.pending
        queue.remove(sequence)
        sequence.move_to(SequenceState.FINISHED)
        self._residency.release(sequence)
        if sequence.num_cached is not None:
            self._ended.append(sequence.sequence_id)
        del self._sequences[sequence.sequence_id]
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        if sequence.request.finished:
            del self._requests[sequence.request.request_id]


def _prompt_scores(sequence: Sequence) -> tuple[dict[int, float], ...] | None:
    """The complete prompt scores, with the first new token (or the end, if none is to come)."""
    first = sequence.num_generated <= 1
    if sequence.request.params.prompt_logprobs is None or sequence.index or not first:
        return None
    return tuple(sequence.prompt_logprobs)
