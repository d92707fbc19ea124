"""Answers do not move: same request, same tokens, whatever happens around it. A tiny random model, on every backend.

The baseline is each prompt alone, with the prefix cache off. Everything else must give the same greedy tokens: batching,
caching, block sizes, chunking, and preemption of both kinds at every step. The native kernels promise more, and are held to
it: the log probabilities of the most likely tokens are the same to the bit.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine_driver import Answer, make_engine, run, run_all
from octavo.engine.engine import Engine
from octavo.sampling_params import SamplingParams
from tiny_models import VOCAB_SIZE, tiny_model

NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=20)
BACKENDS: dict[str, dict[str, Any]] = {
    "reference": {"attention_backend": "reference"},
    "float32": {"attention_backend": "cpu"},
    "bfloat16": {"attention_backend": "cpu", "dtype": "bfloat16"},
    "int8 weights": {"attention_backend": "cpu", "quantization": "int8"},
    "int8 cache": {"attention_backend": "cpu", "kv_cache_dtype": "int8"},
}


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


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def prompts(backend):
    """Fewer where each takes long."""
    return PROMPTS[:9] if backend == "reference" else PROMPTS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def make(model, backend):
    """Makes engines of one backend; options as those of `make_engine`."""
    return lambda **options: make_engine(model, **BACKENDS[backend], **options)


@pytest.fixture(scope="module")
def greedy(backend):
    """Scores are taken where they are the same to the bit."""
    return GREEDY if backend == "reference" else SCORED


@pytest.fixture(scope="module")
def alone(make, prompts, greedy):
    engine = make(prefix_caching=False)
    return facts([run(engine, [prompt], greedy)[0] for prompt in prompts])


def facts(answers: list[Answer]):
    """Tokens, and scores if they were asked for: what must not move."""
    assert all(answer.finish_reason == "length" for answer in answers)
    return [(answer.token_ids, answer.logprobs) for answer in answers]


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [token_ids for token_ids, _ in facts(answers)]


def test_in_one_batch(make, prompts, alone, greedy):
    assert facts(run(make(prefix_caching=False), prompts, greedy)) == alone


def test_without_scores_only_the_greatest_logit_is_looked_for(make, prompts, alone):
    assert tokens(run(make(), prompts, GREEDY)) == [token_ids for token_ids, _ in alone]


def test_prefix_cache_cold_and_warm(make, prompts, alone, greedy):
    engine = make()
    assert facts(run(engine, prompts, greedy)) == alone
    warm = run(engine, prompts, greedy)
    assert facts(warm) == alone
    assert [a.num_cached for a in warm] == [_longest_known(prompt, prompts, alone) for prompt in prompts]


def _longest_known(prompt: list[int], prompts: list[list[int]], answers: list[tuple[list[int], Any]]) -> int:
    """By brute force: the longest beginning of `prompt`, short of its last token, in the full blocks of all runs."""
    longest = 0
    for other, (answer, _) in zip(prompts, answers, strict=True):
        # The last new token of a run is never computed.
        chain = (other + answer)[: (len(other) + NEW_TOKENS - 1) // 16 * 16]
        same = next((i for i, (a, b) in enumerate(zip(prompt, chain, strict=False)) if a != b), None)
        longest = max(longest, min(len(prompt), len(chain)) if same is None else same)
    return min(longest, len(prompt) - 1)


def test_prefix_cache_one_after_the_other(make, prompts, alone, greedy):
    engine = make()
    answers = [run(engine, [prompt], greedy)[0] for prompt in prompts]
    assert facts(answers) == alone
    assert sum(a.num_cached > 0 for a in answers) >= len(prompts) // 3 - 1


def test_warm_cache_for_every_length_of_the_last_block(make, backend, greedy):
    engine = make()
    for length in range(30, 51, 4 if backend == "reference" else 1):
        # The first token of each prompt is another, so that it finds only itself.
        prompt = [length, *((7 * i) % 500 + 3 for i in range(1, length))]
        cold, warm = run(engine, [prompt], greedy)[0], run(engine, [prompt], greedy)[0]
        assert facts([cold]) == facts([warm])
        assert (cold.num_cached, warm.num_cached) == (
            0,
            min(length - 1, (length + NEW_TOKENS - 1) // 16 * 16),
        )


@pytest.mark.parametrize("block_size", [1, 2, 4, 16, 64, 256])
def test_block_sizes(make, prompts, alone, greedy, block_size):
    engine = make(block_size=block_size, num_blocks=8192 // block_size, check=block_size >= 16)
    assert facts(run(engine, prompts, greedy)) == alone
    assert facts(run(engine, prompts, greedy)) == alone


@pytest.mark.parametrize("budget", [16, 33, 128, 2048])
def test_token_budgets(make, prompts, alone, greedy, budget):
    assert facts(run(make(max_num_batched_tokens=budget), prompts, greedy)) == alone


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_after_every_step(make, prompts, alone, greedy, preemption, prefix_caching):
    engine = make(preemption=preemption, prefix_caching=prefix_caching, max_num_batched_tokens=64)
    computed: dict[int, int] = {}

    def preempt_all_that_moved(engine: Engine, step: int) -> None:
        for s in engine.scheduler.running:
            # A chunk that is lost each time would never end: a sequence that has begun to answer is fair game each step.
            if s.num_generated > computed.get(s.sequence_id, 0):
                computed[s.sequence_id] = s.num_generated
                engine.scheduler.preempt(s.request.request_id)

    assert facts(run(engine, prompts, greedy, before_step=preempt_all_that_moved)) == alone
    counters = engine.scheduler.counters
    assert counters.preemptions_recompute + counters.preemptions_swap >= len(prompts) * (NEW_TOKENS - 1)
    assert (counters.preemptions_swap > 0) == (preemption == "swap")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("step", [0, 1, 2, 5, 9, 14])
def test_preempted_once_at_any_step(make, prompts, alone, greedy, preemption, step):
    engine = make(preemption=preemption, max_num_batched_tokens=48)

    def preempt_all_once(engine: Engine, now: int) -> None:
        if now == step:
            for s in engine.scheduler.running:
                engine.scheduler.preempt(s.request.request_id)

    assert facts(run(engine, prompts[:12], greedy, before_step=preempt_all_once)) == alone[:12]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_pool_for_one_and_a_bit(make, prompts, alone, greedy, preemption):
    longest = max(map(len, prompts)) + NEW_TOKENS
    engine = make(block_size=4, num_blocks=longest // 4 + 8, preemption=preemption)
    assert facts(run(engine, prompts, greedy)) == alone
    assert engine.scheduler.counters.preemptions_recompute + engine.scheduler.counters.preemptions_swap > 0


def test_swap_without_room_in_the_host_store_falls_back_to_recompute(make, prompts, alone, greedy):
    engine = make(block_size=4, num_blocks=48, preemption="swap", swap_bytes=0)
    assert facts(run(engine, prompts, greedy)) == alone
    assert engine.scheduler.counters.preemptions_swap == 0
    assert engine.scheduler.counters.preemptions_recompute > 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_logprobs_and_penalties_survive_preemption(make, backend, preemption):
    params = SamplingParams(
        temperature=0.9, top_p=0.95, seed=11, max_tokens=NEW_TOKENS, min_tokens=6, logprobs=3,
        presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.1,
    )  # fmt: skip
    calm = run(make(), PROMPTS[:12], params)
    engine = make(block_size=4, preemption=preemption)

    def preempt_all(engine: Engine, step: int) -> None:
        for s in engine.scheduler.running if step % 3 == 1 else ():
            engine.scheduler.preempt(s.request.request_id)

    pressed = run(engine, PROMPTS[:12], params, before_step=preempt_all)
    assert engine.scheduler.counters.preemptions_recompute + engine.scheduler.counters.preemptions_swap > 0
    for a, b in zip(calm, pressed, strict=True):
        assert a.token_ids == b.token_ids and a.finish_reason == b.finish_reason
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert x == (pytest.approx(y, abs=1e-4) if backend == "reference" else y)


def test_scores_of_prompts_do_not_move(make, backend):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5, ignore_eos=True)
    engine = make()
    single = [run(engine, [prompt], params)[0].prompt_logprobs for prompt in PROMPTS[:12]]
    assert [len(scores) for scores in single] == [len(prompt) - 1 for prompt in PROMPTS[:12]]
    for options in ({}, {"max_num_batched_tokens": 17}, {"block_size": 4}):
        together = [answer.prompt_logprobs for answer in run(make(**options), PROMPTS[:12], params)]
        for a, b in zip(single, together, strict=True):
            for x, y in zip(a, b, strict=True):
                assert x == (pytest.approx(y, abs=1e-4) if backend == "reference" else y)


def test_seeded_samples_do_not_depend_on_neighbours(make, prompts):
    params = [
        SamplingParams(temperature=1, seed=i, max_tokens=NEW_TOKENS, ignore_eos=True)
        for i in range(len(prompts))
    ]
    engine = make()
    single = [run(engine, [p], [q])[0].token_ids for p, q in zip(prompts, params, strict=True)]
    assert tokens(run(make(), prompts, params)) == single


def test_n_samples_equal_their_solo_runs_and_differ(make):
    params = SamplingParams(n=5, temperature=1, seed=3, max_tokens=NEW_TOKENS, ignore_eos=True)
    calm = run_all(make(), PROMPTS[:6], params)
    for options in ({"prefix_caching": False}, {"max_num_seqs": 2}, {"block_size": 4, "num_blocks": 60}):
        again = run_all(make(**options), PROMPTS[:6], params)
        assert [[a.token_ids for a in group] for group in again] == [[a.token_ids for a in g] for g in calm]
    assert all(len({tuple(a.token_ids) for a in group}) > 1 for group in calm)


def test_prompt_of_n_samples_is_computed_once(make):
    engine = make(prefix_caching=False)
    run_all(engine, [PROMPTS[0]], SamplingParams(n=4, temperature=1, max_tokens=2, ignore_eos=True))
    # The prompt once, its last token once more for each of the others, one decode for each of the four.
    assert engine.scheduler.counters.step_tokens == len(PROMPTS[0]) + 3 + 4


def test_threads_and_shared_reads_of_prefixes(make, backend, greedy):
    """Prompts that share two chunks of keys: read once for all, or for each, by one thread or by several."""
    rng = random.Random(8)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(280)]
    prompts = [shared + prompt for prompt in PROMPTS[:8]]
    engine = make(prefix_caching=False)
    single = facts([run(engine, [prompt], greedy)[0] for prompt in prompts])
    for options in ({}, {"shared_prefix_attention": False}, {"num_threads": 3}, {"block_size": 64}):
        if backend != "reference" or "num_threads" not in options:
            engine = make(**options)
            assert facts(run(engine, prompts, greedy)) == single
            assert facts(run(engine, prompts, greedy)) == single
