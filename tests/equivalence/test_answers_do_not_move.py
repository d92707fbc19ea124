"""Answers do not move: same request, same tokens, whatever happens around it. A tiny random model in float32.

The baseline is each prompt alone, with the prefix cache off. Everything else must give the same greedy tokens: batching,
caching, block sizes, chunking, and preemption of both kinds at every step.
"""

from __future__ import annotations

import random

import pytest

from engine_driver import make_engine, run, run_all
from octavo.engine.engine import Engine
from octavo.sampling_params import SamplingParams
from tiny_models import VOCAB_SIZE, tiny_model

NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def _prompts() -> list[list[int]]:
    """32 prompts of 1 to 150 tokens; a third begin alike, so that caches have something to find."""
    rng = random.Random(7)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(70)]
    prompts = []
    for i in range(32):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([1, 2, 15, 16, 17, 40, 80]))]
        prompts.append(shared[: rng.choice([33, 64, 70])] + own if i % 3 == 0 else own)
    return prompts


PROMPTS = _prompts()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def alone(model):
    engine = make_engine(model, prefix_caching=False)
    return [run(engine, [prompt], GREEDY)[0].token_ids for prompt in PROMPTS]


def tokens(answers):
    assert all(answer.finish_reason == "length" for answer in answers)
    return [answer.token_ids for answer in answers]


def test_in_a_batch_of_32(model, alone):
    assert tokens(run(make_engine(model, prefix_caching=False), PROMPTS, GREEDY)) == alone


def test_prefix_cache_cold_and_warm(model, alone):
    engine = make_engine(model)
    assert tokens(run(engine, PROMPTS, GREEDY)) == alone
    warm = run(engine, PROMPTS, GREEDY)
    assert tokens(warm) == alone
    assert [a.num_cached for a in warm] == [_longest_known(prompt, alone) for prompt in PROMPTS]


def _longest_known(prompt: list[int], answers: list[list[int]]) -> int:
    """By brute force: the longest beginning of `prompt`, short of its last token, in the full blocks of all runs."""
    longest = 0
    for other, answer in zip(PROMPTS, answers, strict=True):
        # The last new token of a run is never computed.
        chain = (other + answer)[: (len(other) + NEW_TOKENS - 1) // 16 * 16]
        same = next((i for i, (a, b) in enumerate(zip(prompt, chain, strict=False)) if a != b), None)
        longest = max(longest, min(len(prompt), len(chain)) if same is None else same)
    return min(longest, len(prompt) - 1)


def test_prefix_cache_one_after_the_other(model, alone):
    engine = make_engine(model)
    answers = [run(engine, [prompt], GREEDY)[0] for prompt in PROMPTS]
    assert tokens(answers) == alone
    assert sum(a.num_cached > 0 for a in answers) >= 9


@pytest.mark.parametrize("length", range(30, 51))
def test_warm_cache_for_every_length_of_the_last_block(model, length):
    prompt = [(7 * i) % 500 + 3 for i in range(length)]
    engine = make_engine(model)
    cold, warm = run(engine, [prompt], GREEDY)[0], run(engine, [prompt], GREEDY)[0]
    assert cold.token_ids == warm.token_ids
    assert warm.num_cached == min(length - 1, (length + NEW_TOKENS - 1) // 16 * 16)


@pytest.mark.parametrize("block_size", [1, 2, 4, 16, 64, 256])
def test_block_sizes(model, alone, block_size):
    engine = make_engine(model, block_size=block_size, num_blocks=8192 // block_size, check=block_size >= 16)
    assert tokens(run(engine, PROMPTS, GREEDY)) == alone
    assert tokens(run(engine, PROMPTS, GREEDY)) == alone


@pytest.mark.parametrize("budget", [16, 33, 128, 2048])
def test_token_budgets(model, alone, budget):
    assert tokens(run(make_engine(model, max_num_batched_tokens=budget), PROMPTS, GREEDY)) == alone


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_after_every_step(model, alone, preemption, prefix_caching):
    engine = make_engine(
        model, preemption=preemption, prefix_caching=prefix_caching, max_num_batched_tokens=64
    )
    computed: dict[int, int] = {}

    def preempt_all_that_moved(engine: Engine, step: int) -> None:
        for s in engine.scheduler.running:
            # A chunk that is lost each time would never end: a sequence that has begun to answer is fair game each step.
            if s.num_generated > computed.get(s.sequence_id, 0):
                computed[s.sequence_id] = s.num_generated
                engine.scheduler.preempt(s.request.request_id)

    assert tokens(run(engine, PROMPTS, GREEDY, before_step=preempt_all_that_moved)) == alone
    counters = engine.scheduler.counters
    assert counters.preemptions_recompute + counters.preemptions_swap >= len(PROMPTS) * (NEW_TOKENS - 1)
    assert (counters.preemptions_swap > 0) == (preemption == "swap")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("step", [0, 1, 2, 5, 9, 14])
def test_preempted_once_at_any_step(model, alone, preemption, step):
    engine = make_engine(model, preemption=preemption, max_num_batched_tokens=48)

    def preempt_all_once(engine: Engine, now: int) -> None:
        if now == step:
            for s in engine.scheduler.running:
                engine.scheduler.preempt(s.request.request_id)

    assert tokens(run(engine, PROMPTS[:12], GREEDY, before_step=preempt_all_once)) == alone[:12]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_pool_for_one_and_a_bit(model, alone, preemption):
    longest = max(map(len, PROMPTS)) + NEW_TOKENS
    engine = make_engine(model, block_size=4, num_blocks=longest // 4 + 8, preemption=preemption)
    assert tokens(run(engine, PROMPTS, GREEDY)) == alone
    assert engine.scheduler.counters.preemptions_recompute + engine.scheduler.counters.preemptions_swap > 0


def test_swap_without_room_in_the_host_store_falls_back_to_recompute(model, alone):
    engine = make_engine(model, block_size=4, num_blocks=48, preemption="swap", swap_bytes=0)
    assert tokens(run(engine, PROMPTS, GREEDY)) == alone
    assert engine.scheduler.counters.preemptions_swap == 0
    assert engine.scheduler.counters.preemptions_recompute > 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_logprobs_and_penalties_survive_preemption(model, preemption):
    params = SamplingParams(
        temperature=0.9, top_p=0.95, seed=11, max_tokens=NEW_TOKENS, min_tokens=6, logprobs=3,
        presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.1,
    )  # fmt: skip
    calm = run(make_engine(model), PROMPTS[:12], params)
    engine = make_engine(model, block_size=4, preemption=preemption)

    def preempt_all(engine: Engine, step: int) -> None:
        for s in engine.scheduler.running if step % 3 == 1 else ():
            engine.scheduler.preempt(s.request.request_id)

    pressed = run(engine, PROMPTS[:12], params, before_step=preempt_all)
    assert engine.scheduler.counters.preemptions_recompute + engine.scheduler.counters.preemptions_swap > 0
    for a, b in zip(calm, pressed, strict=True):
        assert a.token_ids == b.token_ids and a.finish_reason == b.finish_reason
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert x == pytest.approx(y, abs=1e-4)


def test_seeded_samples_do_not_depend_on_neighbours(model):
    params = [
        SamplingParams(temperature=1, seed=i, max_tokens=NEW_TOKENS, ignore_eos=True) for i in range(32)
    ]
    engine = make_engine(model)
    single = [run(engine, [p], [q])[0].token_ids for p, q in zip(PROMPTS, params, strict=True)]
    assert tokens(run(make_engine(model), PROMPTS, params)) == single


def test_n_samples_equal_their_solo_runs_and_differ(model):
    params = SamplingParams(n=5, temperature=1, seed=3, max_tokens=NEW_TOKENS, ignore_eos=True)
    calm = run_all(make_engine(model), PROMPTS[:6], params)
    for options in ({"prefix_caching": False}, {"max_num_seqs": 2}, {"block_size": 4, "num_blocks": 60}):
        again = run_all(make_engine(model, **options), PROMPTS[:6], params)
        assert [[a.token_ids for a in group] for group in again] == [[a.token_ids for a in g] for g in calm]
    assert all(len({tuple(a.token_ids) for a in group}) > 1 for group in calm)


def test_prompt_of_n_samples_is_computed_once(model):
    engine = make_engine(model, prefix_caching=False)
    run_all(engine, [PROMPTS[0]], SamplingParams(n=4, temperature=1, max_tokens=2, ignore_eos=True))
    # The prompt once, its last token once more for each of the others, one decode for each of the four.
    assert engine.scheduler.counters.step_tokens == len(PROMPTS[0]) + 3 + 4
