"""Nothing that the scheduler does can change an answer, and nobody waits for ever.

A `World` is a scheduler with a fake executor that checks every slot a plan reads (see `fake_executor.py`). Hypothesis drives
worlds of all kinds (tiny pools, chunks, forks, both kinds of preemption, priorities, aborts) and after every step the
invariants below are checked; in the end every sequence must have said exactly what it would have said alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fake_executor import FAILURE, FakeExecutor, expected_output, score_of
from octavo import request as request_module
from octavo.errors import ContextLengthError, ValidationError
from octavo.memory import prefix_cache
from octavo.memory.block_pool import BlockPool
from octavo.memory.prefix_cache import BlockKey, root_key
from octavo.outputs import TokenLogprobs
from octavo.request import Request, Sequence, SequenceEvent, SequenceState
from octavo.sampling_params import SamplingParams
from octavo.scheduler.limits import Limits, check_request
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.policies import POLICIES
from octavo.scheduler.scheduler import Scheduler

VOCAB_SIZE = 5
EOS = frozenset({4})
ROOTS = [root_key("weights", salt) for salt in ("", "tenant")]


def colliding_key(parent: BlockKey, token_ids: SequenceOf[int]) -> BlockKey:
    """A digest so poor that most chains collide."""
    return b"poor" + bytes([len(parent) % 2, sum(token_ids) % 2])


@contextmanager
def digests(*, collide: bool) -> Iterator[None]:
    """Digest blocks as always, or so that they collide all the time."""
    key = colliding_key if collide else prefix_cache.block_key
    with (
        mock.patch.object(prefix_cache, "block_key", key),
        mock.patch.object(request_module, "block_key", key),
    ):
        yield


@dataclass(frozen=True)
class Setup:
    block_size: int
    num_blocks: int
    num_host_blocks: int
    token_budget: int
    max_num_seqs: int
    prefix_caching: bool
    swap: bool
    policy: str
    collide: bool = False
    max_model_len: int = 40


@dataclass
class Answer:
    """What the events said of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_events: int = 0


class World:
    """A scheduler, a fake executor and a book of what was asked and answered."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.pool = BlockPool(setup.num_blocks, setup.block_size)
        self.host = BlockPool(setup.num_host_blocks, setup.block_size)
        self.limits = Limits(
            setup.max_model_len, setup.num_blocks * setup.block_size, VOCAB_SIZE, eos_token_ids=EOS
        )
        self.policy = POLICIES.load(setup.policy)()
        self.scheduler = Scheduler(
            pool=self.pool,
            host=self.host,
            policy=self.policy,
            limits=self.limits,
            max_num_seqs=setup.max_num_seqs,
            token_budget=setup.token_budget,
            prefix_caching=setup.prefix_caching,
            swap=setup.swap,
        )
        self.executor = FakeExecutor(setup.num_blocks, setup.num_host_blocks, setup.block_size, VOCAB_SIZE)
        self.requests: list[Request] = []
        self.answers: dict[Sequence, Answer] = {}
        self.urgent: dict[
            Sequence, int
        ] = {}  # steps that a sequence has seen since it came and outranked all
        self.num_steps = 0
        self.num_tokens = 0
        self._idle_steps = 0
        self._newest_urgent: Request | None = None
        self._forced: set[Sequence] = set()

    # -- what a client can do

    def add(
        self, prompt: tuple[int, ...], params: SamplingParams, priority: int, salt: int
    ) -> Request | None:
        """Ask; None if it is refused, which must be for a good reason."""
        try:
            params = check_request(prompt, params, self.limits)
        except ContextLengthError:
            assert len(prompt) + (params.max_tokens or 1) > self.limits.max_tokens
            return None
        except ValidationError as e:
            assert e.param == "min_tokens"
            return None
        number = len(self.requests)
        seeds = tuple(100 * number + 7 * i for i in range(params.n))
        self.executor.roots.update((seed, ROOTS[salt]) for seed in seeds)
        request = Request(f"r{number}", prompt, params, seeds, ROOTS[salt], priority, float(number))
        self._note_urgent(request)
        self.scheduler.add(request)
        self.requests.append(request)
        self.answers.update((sequence, Answer()) for sequence in request.sequences)
        return request

    def abort(self, request: Request, index: int | None, reason: str = "abort") -> None:
        live = {s for s in self.live() if s.request is request and index in (None, s.index)}
        events = self.scheduler.finish(request.request_id, index, reason)
        assert {event.sequence for event in events} == live
        self._record(events)

    def preempt(self, request: Request) -> None:
        self._forced.update(request.sequences)
        self.scheduler.preempt(request.request_id)

    def step(self) -> StepPlan:
        before = list(self.scheduler.running)
        had_work = bool(self.live())
        plan = self.scheduler.schedule(float(self.num_steps))
        self._check_plan(plan, before)
        result = self.executor.execute(plan)
        self._record(self.scheduler.commit(plan, result))
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self._idle_steps = self._idle_steps + 1 if had_work and not plan.items else 0
        assert self._idle_steps < 2, "sequences wait, and nothing is computed"
        self._check_urgent()
        return plan

    def drain(self) -> None:
        """Everybody gets an answer in a bounded number of steps; then nothing is left anywhere."""
        live = self.live()
        most = sum(s.num_prompt + (s.request.params.max_tokens or 0) for s in live)
        for _ in range(10 + most * (1 + len(live))):
            if not self.scheduler.has_work:
                break
            self.step()
            self.check()
        assert not self.scheduler.has_work, f"still waiting: {self.live()}"
        assert self.pool.num_used == 0 and self.host.num_used == 0
        assert not self.executor.known, "an executor was not told of an end"
        assert all(answer.finish_reason for answer in self.answers.values())
        self._check_counters()

    def live(self) -> list[Sequence]:
        return [s for s, answer in self.answers.items() if answer.finish_reason is None]

    # -- what must hold

    def check(self) -> None:
        """Invariants between steps."""
        self.scheduler.check()
        assert set(self.live()) == {*self.scheduler.running, *self.scheduler.pending}
        self._check_cache()
        for s in self.live():
            store, blocks = self.executor.pool, s.table.block_ids
            if s.state is SequenceState.SWAPPED:
                store, blocks = self.executor.host, s.host_block_ids
            held = [number for block in blocks for number in store[block]][: s.num_computed]
            assert held == self.executor.chain_numbers(s.request.root, s.token_ids[: s.num_computed])

    def _check_cache(self) -> None:
        """Every findable block holds the KV of its tokens behind its parent, which is findable too."""
        pool = self.executor.pool
        known = {b: k for b in range(len(pool)) if (k := self.pool.cache.known(b)) is not None}
        ends = {k.key: pool[b][-1] for b, k in known.items()}
        ends.update((root, self.executor.numbers.root(root)) for root in ROOTS)
        for block, content in known.items():
            assert content.parent in ends, "a block outlived its parent"
            prefix, numbers = ends[content.parent], []
            for token in content.token_ids:
                prefix = self.executor.numbers.after(prefix, token)
                numbers.append(prefix)
            assert pool[block] == numbers, f"block {block} does not hold what its key says"

    def _check_plan(self, plan: StepPlan, before: list[Sequence]) -> None:
        by_id = {s.sequence_id: s for s in self.scheduler.running}
        assert plan.num_tokens <= self.setup.token_budget
        assert len(plan.items) <= len(by_id) <= self.setup.max_num_seqs
        planned = Counter(item.sequence_id for item in plan.items)
        assert not planned or max(planned.values()) == 1
        size = self.setup.block_size
        for item in plan.items:
            sequence = by_id[item.sequence_id]
            assert item.start == sequence.num_computed and item.block_ids == tuple(sequence.table.block_ids)
            last = (item.start + len(item.token_ids) - 1) // size
            for block in item.block_ids[item.start // size : last + 1]:
                assert self.pool.writable(block), f"{sequence} writes a block that is not its own"
        # A decode that kept its blocks is in the step whenever the budget could hold all that run.
        if self.setup.token_budget >= len(before):
            decodes = {s.sequence_id for s in before if s.gap == 1 and s.sequence_id in by_id}
            assert decodes <= planned.keys(), "a decode was stalled"
        if before and self.setup.policy == "fcfs":
            first = min(before, key=lambda s: s.order)
            stays = first.sequence_id in by_id or first in self._forced or not by_id
            assert stays, "the first in rank gave way to another one"
        self._forced.clear()
        for i, s in by_id.items():
            assert self.executor.first_start.get(i) in (None, s.num_cached), "num_cached is not exact"

    def _note_urgent(self, request: Request) -> None:
        first = all(s.request.priority > request.priority for s in self.live())
        self._newest_urgent = request if first and self.setup.policy == "priority" else None

    def _check_urgent(self) -> None:
        """Who outranks all that live, and is not outranked meanwhile, starts in the next step or the one after."""
        request, self._newest_urgent = self._newest_urgent, None
        if request is not None:
            self.urgent[request.sequences[0]] = 0
        for s, steps in list(self.urgent.items()):
            outranked = any(o.request.priority < s.request.priority for o in self.live())
            self.urgent[s] = steps + 1
            if s.num_cached is not None or s.state is SequenceState.FINISHED or outranked:
                del self.urgent[s]
            assert self.urgent.get(s, 0) < 2, f"{s} waits behind less urgent ones"

    def _check_counters(self) -> None:
        counters = self.scheduler.counters
        reasons = Counter(answer.finish_reason for answer in self.answers.values())
        assert counters.finished == dict(reasons)
        assert counters.generation_tokens == sum(len(a.token_ids) for a in self.answers.values())
        assert (counters.steps, counters.step_tokens) == (self.num_steps, self.num_tokens)
        assert counters.recomputed_tokens == self.executor.recomputed
        begun = [[s for s in r.sequences if s.num_cached is not None] for r in self.requests]
        firsts = [sequences[0] for sequences in begun if sequences]
        assert counters.prompt_tokens == counters.prefix_query_tokens == sum(s.num_prompt for s in firsts)
        assert counters.prefix_hit_tokens == sum(s.num_cached or 0 for s in firsts)
        assert self.setup.prefix_caching or counters.prefix_hit_tokens == 0

    # -- answers

    def _record(self, events: list[SequenceEvent]) -> None:
        assert len({event.sequence for event in events}) == len(events), "two events of one sequence"
        for event in events:
            answer = self.answers[event.sequence]
            assert answer.finish_reason is None, "news after the end"
            answer.token_ids += event.token_ids
            answer.logprobs += event.logprobs or ()
            answer.finish_reason, answer.stop_reason = event.finish_reason, event.stop_reason
            if event.prompt_logprobs is not None:
                assert answer.num_events == 0, "prompt scores come with the first news"
                answer.prompt_logprobs = event.prompt_logprobs
            answer.num_events += 1
            self._check_answer(event, answer)

    def _check_answer(self, event: SequenceEvent, answer: Answer) -> None:
        s, params = event.sequence, event.sequence.request.params
        token_ids, reason, stop = expected_output(s.request.prompt_token_ids, params, s.seed, VOCAB_SIZE, EOS)
        assert tuple(answer.token_ids) == token_ids[: len(answer.token_ids)], "an answer changed"
        if answer.finish_reason in ("stop", "length", "error"):
            said = (tuple(answer.token_ids), answer.finish_reason, answer.stop_reason)
            assert said == (token_ids, reason, stop)
            assert event.error == (FAILURE if reason == "error" else None)
        known = (*s.request.prompt_token_ids, *answer.token_ids)
        if params.logprobs is not None:
            ends = range(s.num_prompt + 1, len(known) + 1)
            assert answer.logprobs == [score_of(known[:end]) for end in ends]
        asked = params.prompt_logprobs is not None and s.index == 0
        if asked and answer.finish_reason in (None, "stop", "length"):
            ends = range(2, s.num_prompt + 1)
            assert answer.prompt_logprobs == tuple(score_of(known[:end]) for end in ends)
        assert asked or answer.prompt_logprobs is None


def setups() -> st.SearchStrategy[Setup]:
    return st.builds(
        Setup,
        block_size=st.sampled_from([1, 2, 4, 16]),
        num_blocks=st.integers(2, 14),
        num_host_blocks=st.sampled_from([0, 1, 3, 8, 40]),
        token_budget=st.one_of(st.integers(1, 8), st.integers(1, 64)),
        max_num_seqs=st.integers(1, 8),
        prefix_caching=st.booleans(),
        swap=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        collide=st.sampled_from([False, False, False, True]),
    )


def sampling() -> st.SearchStrategy[SamplingParams]:
    optional = st.sampled_from([None, None, None, 0])
    return st.builds(
        lambda max_tokens, min_tokens, **rest: SamplingParams(
            max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), **rest
        ),
        max_tokens=st.integers(0, 16),
        min_tokens=st.sampled_from([0, 0, 1, 3, 16]),
        n=st.sampled_from([1, 1, 1, 2, 3, 4]),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (), (3,), (2, 4)]),
        logprobs=optional,
        prompt_logprobs=optional,
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Random clients against a random world."""

    world: World

    @initialize(setup=setups())
    def begin(self, setup: Setup) -> None:
        self.exit = ExitStack()
        self.exit.enter_context(digests(collide=setup.collide))
        self.world = World(setup)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        earlier=st.integers(0, 7),
        common=st.integers(0, 30),
        params=sampling(),
        priority=st.integers(0, 3),
        salt=st.sampled_from([0, 0, 0, 1]),
    )
    def add(
        self, tokens: list[int], earlier: int, common: int, params: SamplingParams, priority: int, salt: int
    ) -> None:
        """Ask for a prompt that begins like an earlier request's tokens, prompt and answer."""
        world = self.world
        head: list[int] = []
        if world.requests and common > 4:
            request = world.requests[earlier % len(world.requests)]
            head = request.sequences[0].token_ids[:common]
        # Most requests fit; a few are refused.
        most = world.limits.max_tokens - (params.max_tokens or 0) * (priority > 0)
        world.add(tuple((head + tokens)[: max(1, most)]), params, priority, salt)

    @precondition(lambda self: self.world.live())
    @rule(which=st.integers(0, 20), whole=st.booleans(), reason=st.sampled_from(["abort", "abort", "cut"]))
    def abort(self, which: int, whole: bool, reason: str) -> None:
        live = self.world.live()
        sequence = live[which % len(live)]
        self.world.abort(sequence.request, None if whole else sequence.index, reason)

    @precondition(lambda self: self.world.live())
    @rule(which=st.integers(0, 20))
    def preempt(self, which: int) -> None:
        live = self.world.live()
        self.world.preempt(live[which % len(live)].request)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()
            self.world.check()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            with self.exit:
                self.world.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
