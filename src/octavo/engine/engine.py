"""The engine: read this first.

    Engine.step:   schedule   what does this step compute, and whose blocks give way?   (scheduler/, integers only)
                   execute    tensors: moves, one forward pass, sampling                (runner/, behind `Executor`)
                   commit     tokens are appended, full blocks become findable, ended sequences give everything back

The engine is synchronous and has no thread, no socket and no clock of its own: whoever drives it (the engine process, the
offline API, a test, a simulator) calls `submit`, `finish` and `step`, and passes the time in.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable

from octavo.engine.messages import EngineStats, GenerateRequest, SequenceUpdate
from octavo.errors import ValidationError
from octavo.memory.prefix_cache import root_key
from octavo.random_stream import derived_seed
from octavo.request import Request, SequenceEvent, SequenceState
from octavo.scheduler.limits import check_request
from octavo.scheduler.plan import Executor, StepPlan
from octavo.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

# After so many failed steps in a row the fault is not in a request: give up, loudly.
_MAX_FAILED_STEPS = 3


class Engine:
    """One scheduler and one executor, and the bookkeeping between them.

    weights_digest: part of the key of every cached block. seed: seeds requests that bring no seed of their own.
    check: verify every invariant after every step (slow).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        weights_digest: str = "",
        seed: int | None = None,
        check: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._digest = weights_digest
        self._random = random.Random(seed)
        self._check = check
        self._compute_s = 0.0
        self._failed_steps = 0
        self._empty_plans = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def compute_s(self) -> float:
        """Seconds that forward passes and choosing tokens took since the start, by the executor's own clock."""
        return self._compute_s

    def submit(self, asked: GenerateRequest, now: float) -> list[SequenceUpdate]:
        """Queue a request. One that can never be served is answered at once with an error, and costs nobody anything."""
        try:
            params = check_request(asked.prompt_token_ids, asked.params, self.scheduler.limits)
        except ValidationError as e:
            return [
                SequenceUpdate(asked.request_id, index, finish_reason="error", error=e.message)
                for index in range(asked.params.n)
            ]
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        self.scheduler.add(
            Request(
                request_id=asked.request_id,
                prompt_token_ids=asked.prompt_token_ids,
                params=params,
                seeds=tuple(derived_seed(seed, index) for index in range(params.n)),
                root=root_key(self._digest, asked.cache_salt),
                priority=asked.priority,
                arrival_s=now,
            )
        )
        return []

    def finish(self, request_id: str, index: int | None, reason: str) -> list[SequenceUpdate]:
        """End a request (or one sequence of it) now; its blocks are free when this returns."""
        return _updates(self.scheduler.finish(request_id, index, reason))

    def step(self, now: float) -> list[SequenceUpdate]:
        """One step: schedule, execute, commit. Returns the news.

        If the step itself fails, only the sequences that took part in it end, with the reason; the others go on.
        Raises the error of the step when it is the third in a row: then it is not the requests.
        """
        plan = self.scheduler.schedule(now)
        if not plan.has_work:
            return self._note_empty_plan()
        self._empty_plans = 0
        try:
            result = self._executor.execute(plan)
        except Exception as e:
            return self._fail_step(plan, e)
        self._failed_steps = 0
        self._compute_s += result.compute_s
        logger.debug(
            "step %d: %d tokens of %d sequences, %d block moves",
            plan.step,
            plan.num_tokens,
            len(plan.items),
            len(plan.moves),
        )
        events = self.scheduler.commit(plan, result)
        if self._check:
            self.scheduler.check()
        return _updates(events)

    def stats(self) -> EngineStats:
        """Gauges as they are now, counters since start."""
        scheduler, counters = self.scheduler, self.scheduler.counters
        num_swapped = scheduler.num_swapped
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.pending) - num_swapped,
            num_swapped=num_swapped,
            blocks_total=scheduler.pool.num_blocks,
            blocks_used=scheduler.pool.num_used,
            blocks_cached=scheduler.pool.num_idle,
            host_blocks_used=scheduler.host.num_used,
            preemptions_recompute=counters.preemptions_recompute,
            preemptions_swap=counters.preemptions_swap,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            steps=counters.steps,
            step_tokens=counters.step_tokens,
            compute_s=self._compute_s,
            finished=dict(counters.finished),
        )

    def _fail_step(self, plan: StepPlan, error: Exception) -> list[SequenceUpdate]:
        self._failed_steps += 1
        if self._failed_steps >= _MAX_FAILED_STEPS:
            raise error
        logger.exception(
            "step %d failed; the %d sequences in it end with an error", plan.step, len(plan.items)
        )
        reason = f"the step that computed this request failed: {type(error).__name__}: {error}"
        in_step = {item.sequence_id for item in plan.items}
        # Moves may not have been made: what was being swapped out can no longer be trusted either.
        doubtful = [
            s
            for s in [*self.scheduler.running, *self.scheduler.pending]
            if s.sequence_id in in_step or s.state is SequenceState.SWAPPED
        ]
        events: list[SequenceEvent] = []
        for s in doubtful:
            events += self.scheduler.finish(s.request.request_id, s.index, "error", error=reason)
        return _updates(events)

    def _note_empty_plan(self) -> list[SequenceUpdate]:
        """One empty plan may follow a preemption. A second in a row with work queued and nothing running is a bug of
        ours: answer the request rather than hang."""
        self._empty_plans += 1
        events: list[SequenceEvent] = []
        if self._empty_plans > 1 and not self.scheduler.running and self.scheduler.pending:
            stuck = self.scheduler.pending[0]
            reason = (
                "the scheduler could not place this request although nothing else runs; please report this"
            )
            logger.error("%s: %r", reason, stuck)
            events = self.scheduler.finish(stuck.request.request_id, None, "error", error=reason)
        return _updates(events)


def _updates(events: Iterable[SequenceEvent]) -> list[SequenceUpdate]:
    return [
        SequenceUpdate(
            request_id=event.sequence.request.request_id,
            index=event.sequence.index,
            token_ids=event.token_ids,
            logprobs=event.logprobs,
            finish_reason=event.finish_reason,
            stop_reason=event.stop_reason,
            num_cached_tokens=event.sequence.request.sequences[0].num_cached or 0,
            prompt_logprobs=event.prompt_logprobs,
            error=event.error,
        )
        for event in events
    ]
