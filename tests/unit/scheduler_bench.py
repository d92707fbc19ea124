"""A scheduler on a bench: no model, no KV, one constant token, and every invariant checked after each step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from octavo.memory.block_pool import BlockPool
from octavo.memory.prefix_cache import BlockKey, root_key
from octavo.outputs import TokenLogprobs
from octavo.request import Request, SequenceEvent
from octavo.request import Sequence as Sequence_
from octavo.sampling_params import SamplingParams
from octavo.scheduler.limits import Limits, check_request
from octavo.scheduler.plan import SampledToken, StepPlan, StepResult
from octavo.scheduler.policies import POLICIES
from octavo.scheduler.scheduler import Scheduler

ROOT = root_key("weights")


class Bench:
    """A scheduler whose model always says token 1 (or -1, an error, for the sequence ids in `failing`)."""

    def __init__(
        self,
        num_blocks: int = 16,
        *,
        block_size: int = 4,
        host: int = 0,
        budget: int = 64,
        seats: int = 8,
        policy: str = "fcfs",
        caching: bool = True,
    ) -> None:
        self.pool, self.host = BlockPool(num_blocks, block_size), BlockPool(host, block_size)
        self.limits = Limits(1000, num_blocks * block_size, 1000, frozenset({2}))
        self.scheduler = Scheduler(
            pool=self.pool,
            host=self.host,
            policy=POLICIES.load(policy)(),
            limits=self.limits,
            max_num_seqs=seats,
            token_budget=budget,
            prefix_caching=caching,
            swap=host > 0,
        )
        self.failing: set[int] = set()
        self.events: list[SequenceEvent] = []
        self._names = itertools.count()

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        n: int = 1,
        priority: int = 0,
        root: BlockKey = ROOT,
        prompt_logprobs: int | None = None,
    ) -> list[Sequence_]:
        params = SamplingParams(max_tokens=max_tokens, n=n, prompt_logprobs=prompt_logprobs)
        params = check_request(prompt, params, self.limits)
        request = Request(f"r{next(self._names)}", tuple(prompt), params, tuple(range(n)), root, priority)
        self.scheduler.add(request)
        return request.sequences

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(0.0)
        sampled = {
            item.sequence_id: SampledToken(-1, error="no")
            if item.sequence_id in self.failing
            else SampledToken(1)
            for item in plan.items
            if item.sample
        }
        scores: dict[int, tuple[TokenLogprobs, ...]] = {
            i.sequence_id: ({5: -1.0},) for i in plan.items if i.prompt_logprobs is not None
        }
        self.events = self.scheduler.commit(plan, StepResult(sampled, scores))
        self.scheduler.check()
        return plan

    def steps(self, count: int) -> list[StepPlan]:
        return [self.step() for _ in range(count)]

    def drain(self) -> None:
        for _ in range(1000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work
        assert self.pool.num_used == 0 and self.host.num_used == 0


def spans(plan: StepPlan) -> dict[int, tuple[int, int]]:
    """sequence id -> the range of positions that a step computes."""
    return {item.sequence_id: (item.start, item.start + len(item.token_ids)) for item in plan.items}


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))
