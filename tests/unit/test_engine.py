"""The step loop when the executor fails: one bad step hurts only who was in it, three in a row end the engine."""

from __future__ import annotations

import pytest

from octavo.engine.engine import Engine
from octavo.engine.messages import GenerateRequest
from octavo.memory.block_pool import BlockPool
from octavo.sampling_params import SamplingParams
from octavo.scheduler.limits import Limits
from octavo.scheduler.plan import SampledToken, StepPlan, StepResult
from octavo.scheduler.policies import FirstComeFirstServed
from octavo.scheduler.scheduler import Scheduler


class CountingExecutor:
    """Answers 7 for every sequence; fails in the steps of `failing`, and for a row whose prompt begins with 13."""

    def __init__(self, failing: set[int] = frozenset()) -> None:
        self.failing = failing
        self.calls = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.calls += 1
        if self.calls in self.failing:
            raise MemoryError("no room for activations")
        return StepResult({item.sequence_id: self._token(item) for item in plan.items if item.sample}, {})

    def _token(self, item):
        return SampledToken(-1, error="all logits are masked") if item.token_ids[0] == 13 else SampledToken(7)


def engine_with(executor, max_num_seqs=1):
    scheduler = Scheduler(
        pool=BlockPool(64, 4), host=BlockPool(0, 4), policy=FirstComeFirstServed(),
        limits=Limits(128, 256, 100, frozenset({2})), max_num_seqs=max_num_seqs, token_budget=64,
    )  # fmt: skip
    return Engine(scheduler, executor, check=True)


def ask(name, first=5, **params):
    return GenerateRequest(name, (first, 6, 7), SamplingParams(**{"max_tokens": 3, **params}))


def drain(engine):
    ends, step = {}, 0
    while engine.has_work:
        for update in engine.step(float(step)):
            if update.finish_reason:
                ends[update.request_id] = (update.finish_reason, update.error)
        step += 1
        assert step < 1000
    return ends


def test_a_failed_step_ends_only_the_requests_in_it():
    engine = engine_with(CountingExecutor(failing={2}))
    for name in "abc":
        engine.submit(ask(name), 0.0)
    ends = drain(engine)
    assert ends["a"][0] == "error" and "no room for activations" in ends["a"][1]
    assert ends["b"] == ends["c"] == ("length", None)
    assert engine.scheduler.pool.num_used == 0


def test_three_failed_steps_in_a_row_end_the_engine():
    engine = engine_with(CountingExecutor(failing={1, 2, 3}))
    for name in "abcd":
        engine.submit(ask(name), 0.0)
    with pytest.raises(MemoryError):
        drain(engine)


def test_a_row_that_cannot_be_sampled_ends_alone():
    engine = engine_with(CountingExecutor(), max_num_seqs=8)
    for name, first in (("a", 5), ("bad", 13), ("c", 6)):
        engine.submit(ask(name, first), 0.0)
    assert drain(engine) == {
        "a": ("length", None),
        "bad": ("error", "all logits are masked"),
        "c": ("length", None),
    }


def test_what_can_never_fit_is_answered_at_once():
    engine = engine_with(CountingExecutor())
    (update,) = engine.submit(ask("big", max_tokens=126), 0.0)
    assert update.finish_reason == "error" and "129" in update.error and "128" in update.error
    assert not engine.has_work


def test_finish_is_heeded_in_every_state_and_twice():
    engine = engine_with(CountingExecutor())
    for name in "ab":
        engine.submit(ask(name), 0.0)
    engine.step(0.0)
    for name in "ab":
        assert [u.finish_reason for u in engine.finish(name, None, "abort")] == ["abort"]
        assert engine.finish(name, None, "abort") == []
    assert engine.scheduler.pool.num_used == 0
    drain(engine)
    assert engine.stats().finished == {"abort": 2}
