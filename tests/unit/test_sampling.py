"""The sampler as the runner sees it: edits, greedy and random choice, log probabilities, faults of rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.sampling.sampler import Sampler, prompt_logprobs
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import SampledToken, SequenceStart

VOCAB = 1000
EOS = (2, 5)
MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0, "logprobs": 4},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 1.0},
    {"top_k": 20, "frequency_penalty": -1.0, "logprobs": 0},
    {"top_p": 0.5, "min_p": 0.01, "logit_bias": {3: 5.0, 7: -100.0}},
    {"allowed_token_ids": [1, 4, 9, 16, 25], "temperature": 3.0},
    {"min_tokens": 10, "stop_token_ids": [8, 9], "temperature": 2.0},
]


def _logits(seed: int, count: int, size: int = VOCAB, levels: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, size, generator=generator) * 3
    return (rows * levels).round() / levels if levels else rows


def _start(
    sampler: Sampler, sequence_id: int, seed: int = 0, prompt: tuple[int, ...] = (), **options: Any
) -> None:
    sampler.start(SequenceStart(sequence_id, SamplingParams(max_tokens=None, **options), prompt, seed))


def _one(logits: torch.Tensor, prompt: tuple[int, ...] = (), **options: Any) -> SampledToken:
    sampler = Sampler(logits.shape[1], EOS)
    _start(sampler, 1, prompt=prompt, **options)
    return sampler.sample(logits, [1])[0]


def _log_softmax(row: torch.Tensor) -> NDArray[np.float64]:
    values = row.numpy().astype(np.float64)
    return np.asarray(values - values.max() - np.log(np.exp(values - values.max()).sum()))


# Greedy


@pytest.mark.parametrize("levels", [0, 1])
def test_greedy_takes_the_greatest_and_of_equals_the_lowest_id(levels: int) -> None:
    logits = _logits(1, 40, levels=levels)
    sampler = Sampler(VOCAB, EOS)
    for i in range(40):
        _start(sampler, i, temperature=0)
    found = sampler.sample(logits, range(40))
    assert [token.token_id for token in found] == [int(np.argmax(row)) for row in logits.numpy()]
    assert all(token.logprobs is None and token.error is None for token in found)


def test_top_k_of_one_equals_greedy() -> None:
    for levels in (0, 1, 4):
        for seed in range(30):
            logits = _logits(seed, 1, levels=levels)
            assert _one(logits, top_k=1).token_id == _one(logits, temperature=0).token_id


def test_an_empty_batch_gives_nothing() -> None:
    assert Sampler(VOCAB, EOS).sample(torch.zeros(0, VOCAB), []) == []


def test_logits_are_not_changed() -> None:
    logits = _logits(2, len(MIXED))
    before = logits.clone()
    sampler = Sampler(VOCAB, EOS)
    for i, options in enumerate(MIXED):
        _start(sampler, i, prompt=(1, 2, 3), **options)
    for _ in range(3):
        sampler.sample(logits, range(len(MIXED)))
    assert torch.equal(logits, before)


# Edits


def test_bias_forces_and_bans() -> None:
    logits = _logits(3, 1)
    best = int(logits.argmax())
    assert _one(logits, logit_bias={77: 100}).token_id == 77
    assert _one(logits, temperature=0, logit_bias={77: 100, best: -100}).token_id == 77
    assert all(_one(logits, seed=seed, logit_bias={best: -100}).token_id != best for seed in range(50))
    logits[0, 500], logits[0, 501] = 20.0, 20.5
    assert _one(logits, temperature=0, logit_bias={500: 0.75}).token_id == 500
    assert _one(logits, temperature=0, logit_bias={500: 0.25}).token_id == 501


def test_only_allowed_tokens_are_chosen() -> None:
    logits = _logits(4, 1)
    allowed = (10, 500, 999, 10)
    found = {
        _one(logits, seed=seed, temperature=50, allowed_token_ids=allowed).token_id for seed in range(60)
    }
    assert found == {10, 500, 999}
    # Bias comes before the mask: it cannot let in what is not allowed.
    biased = _one(logits, temperature=0, allowed_token_ids=allowed, logit_bias={3: 100, 500: 60})
    assert biased.token_id == 500


def _penalised(
    row: NDArray[np.float64], prompt: tuple[int, ...], output: list[int], params: SamplingParams
) -> NDArray[np.float64]:
    row = row.copy()
    for token in set(prompt) | set(output):
        positive = row[token] > 0
        row[token] *= 1 / params.repetition_penalty if positive else params.repetition_penalty
    for token in set(output):
        row[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return row


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.5},
        {"presence_penalty": -0.8},
        {"frequency_penalty": 0.6},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4},
    ],
    ids=str,
)
def test_penalties_follow_the_formulas(options: dict[str, Any]) -> None:
    prompt = (3, 4, 4, 17, 40)
    params = SamplingParams(temperature=0, max_tokens=None, **options)
    sampler = Sampler(50, EOS)
    sampler.start(SequenceStart(1, params, prompt, 0))
    output: list[int] = []
    for step in range(200):
        logits = _logits(step, 1, 50)
        wanted = _penalised(logits[0].numpy().astype(np.float64), prompt, output, params)
        output.append(sampler.sample(logits, [1])[0].token_id)
        assert output[-1] == int(np.argmax(wanted))
    assert len(set(output)) > 20


def test_a_token_repeats_until_its_penalty_outweighs_its_lead() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 7], logits[0, 4] = 2.0, 1.0
    sampler = Sampler(10, ())
    _start(sampler, 1, temperature=0, frequency_penalty=0.4)
    found = [sampler.sample(logits, [1])[0].token_id for _ in range(6)]
    assert found == [7, 7, 7, 4, 7, 4]


def test_presence_and_frequency_ignore_the_prompt() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 7] = 0.5
    assert _one(logits, (7, 7), temperature=0, frequency_penalty=2.0, presence_penalty=2.0).token_id == 7
    assert _one(logits, (7, 7), temperature=0, repetition_penalty=2.0).token_id == 7
    logits[0, 8] = 0.4
    assert _one(logits, (7, 7), temperature=0, repetition_penalty=2.0).token_id == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_token_before_min_tokens(temperature: float) -> None:
    logits = torch.zeros(1, 20)
    for token in (*EOS, 11):
        logits[0, token] = 30.0
    sampler = Sampler(20, EOS)
    _start(
        sampler, 1, temperature=temperature, min_tokens=4, stop_token_ids=[11, 10_000], logit_bias={2: 100}
    )
    found = [sampler.sample(logits, [1])[0].token_id for _ in range(6)]
    assert not set(found[:4]) & {*EOS, 11}
    assert found[4:] == [2, 2]


def test_ignore_eos_does_not_ban_it() -> None:
    logits = torch.zeros(1, 20)
    logits[0, 2] = 30.0
    assert _one(logits, temperature=0, ignore_eos=True).token_id == 2


# Faults of single rows


def test_what_is_wrong_with_one_row_leaves_the_others_alone() -> None:
    logits = _logits(6, 9)
    logits[1, 400] = math.nan
    logits[2] = -math.inf
    logits[3, 5] = math.inf
    logits[7, 400] = math.nan
    sampler = Sampler(VOCAB, EOS)
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {},
        {"top_p": 0.5},
        {"allowed_token_ids": [2, 5], "min_tokens": 1},
        {"logit_bias": {VOCAB: 1.0}},
        {"temperature": 0, "logprobs": 1},
        {"allowed_token_ids": [1, 3]},
        {"repetition_penalty": 1.1, "prompt": (VOCAB + 5,)},
    ]
    for i, option in enumerate(options):
        _start(sampler, i, **option)
    found = sampler.sample(logits, range(9))
    bad = [1, 2, 3, 4, 5, 7, 8]
    for i, token in enumerate(found):
        if i in bad:
            assert token.token_id == -1 and token.logprobs is None and token.error
        else:
            assert token.token_id >= 0 and token.error is None
    assert "forbidden" in str(found[4].error)
    assert "1,000" in str(found[5].error) and "logit_bias" in str(found[5].error)
    assert "not finite" in str(found[7].error)
    assert found[0].token_id == _one(logits[:1]).token_id
    assert found[6] == _one(logits[6:7], temperature=0, logprobs=1)


def test_absurd_ids_are_a_fault_of_their_row_and_not_a_crash() -> None:
    huge = 10**30
    for option in ({"logit_bias": {huge: 1.0}}, {"allowed_token_ids": [3, huge]}):
        found = _one(_logits(7, 1), repetition_penalty=1.1, **option)
        assert found.token_id == -1 and found.error
    assert _one(_logits(7, 1), stop_token_ids=[huge], min_tokens=1).error is None


def test_ending_is_forgiving_and_a_new_start_forgets_the_old_output() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 7], logits[0, 4] = 1.0, 0.5
    sampler = Sampler(10, ())
    sampler.end(12)
    _start(sampler, 1, temperature=0, presence_penalty=1.0)
    assert [sampler.sample(logits, [1])[0].token_id for _ in range(2)] == [7, 4]
    sampler.end(1)
    sampler.end(1)
    _start(sampler, 1, temperature=0, presence_penalty=1.0)
    assert sampler.sample(logits, [1])[0].token_id == 7


# Answers do not move


def _run(
    options: list[dict[str, Any]], order: list[int], batches: list[list[int]], steps: int, levels: int
) -> dict[int, list[SampledToken]]:
    """Generate `steps` tokens for each sequence of `order`; logits depend on sequence and position alone."""
    sampler = Sampler(VOCAB, EOS)
    for i in order:
        _start(sampler, i, seed=i * 17, prompt=(i, 5, 9), **options[i])
    output: dict[int, list[SampledToken]] = {i: [] for i in order}
    while any(len(tokens) < steps for tokens in output.values()):
        for batch in batches:
            members = [i for i in batch if len(output[i]) < steps]
            rows = [_logits(1000 * i + len(output[i]), 1, levels=levels) for i in members]
            if members:
                for i, token in zip(members, sampler.sample(torch.cat(rows), members), strict=True):
                    output[i].append(token)
    return output


@pytest.mark.parametrize("levels", [0, 2])
def test_tokens_do_not_depend_on_the_batch_the_order_or_the_neighbours(levels: int) -> None:
    count, steps = 33, 25
    options = [MIXED[i % len(MIXED)] for i in range(count)]
    order = list(range(count))
    together = _run(options, order, [order], steps, levels)
    alone = {i: _run(options, [i], [[i]], steps, levels)[i] for i in order}
    assert together == alone
    shuffled = [order[::-1][:20], order[:13][::2], order[:13][1::2]]
    assert _run(options, order[::-1], shuffled, steps, levels) == alone


def test_seeds_decide_and_global_generators_do_not() -> None:
    def tokens(seed: int, noise: int) -> list[int]:
        torch.manual_seed(noise)
        sampler = Sampler(VOCAB, EOS)
        _start(sampler, 1, seed=seed)
        return [sampler.sample(torch.zeros(1, VOCAB), [1])[0].token_id for _ in range(20)]

    assert tokens(5, 1) == tokens(5, 2)
    assert tokens(5, 1) != tokens(6, 1)
    assert len(set(tokens(5, 1))) > 15


# Log probabilities


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**30), st.sampled_from([3, 300, 8200]), st.integers(0, 20), st.sampled_from([0, 2]))
def test_logprobs_are_the_raw_log_softmax(seed: int, size: int, k: int, levels: int) -> None:
    logits = _logits(seed, 1, size, levels)
    found = _one(logits, seed=seed, logprobs=k, temperature=2.0, logit_bias={0: 3.0}, presence_penalty=1.0)
    assert found.logprobs is not None
    wanted = _log_softmax(logits[0])
    k = min(k, size)
    best = sorted(range(size), key=lambda token: (-wanted[token], token))[:k]
    ids = list(found.logprobs)
    assert ids[0] == found.token_id
    assert ids[1:] == [token for token in best if token != found.token_id]
    assert len(ids) in (k, k + 1)
    for token, value in found.logprobs.items():
        assert abs(value - wanted[token]) < 1e-4
        assert value == float(np.float32(value))


def test_the_chosen_logprob_is_the_same_for_every_k_and_batch() -> None:
    logits = _logits(9, 33, 9000)
    sampler = Sampler(9000, EOS)
    for i in range(33):
        _start(sampler, i, seed=i, logprobs=i % 21)
    together = sampler.sample(logits, range(33))
    for i in (0, 5, 20, 32):
        mine = together[i].logprobs
        for k in (0, 1, 20):
            alone = _one(logits[i : i + 1], seed=i, logprobs=k)
            assert alone.token_id == together[i].token_id
            assert alone.logprobs is not None and mine is not None
            assert alone.logprobs[alone.token_id] == mine[alone.token_id]


def test_prompt_logprobs_match_and_do_not_depend_on_slices() -> None:
    logits = _logits(10, 50, 20_000)
    targets = [(i * 397) % 20_000 for i in range(50)]
    found = prompt_logprobs(logits, targets, 3)
    assert len(found) == 50
    for i in range(50):
        wanted = _log_softmax(logits[i])
        assert next(iter(found[i])) == targets[i]
        assert all(abs(value - wanted[token]) < 1e-4 for token, value in found[i].items())
        assert prompt_logprobs(logits[i : i + 1], targets[i : i + 1], 3) == found[i : i + 1]
        zero = prompt_logprobs(logits[i : i + 1], targets[i : i + 1], 0)[0]
        assert zero == {targets[i]: found[i][targets[i]]}
    assert prompt_logprobs(logits[:0], [], 3) == ()


@pytest.mark.parametrize(("count", "size"), [(300, 600), (600, 4000), (100, 40_000)])
def test_extra_memory_of_prompt_logprobs_is_bounded(count: int, size: int) -> None:
    logits = _logits(12, count, size)
    prompt_logprobs(logits, [0] * count, 20)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        prompt_logprobs(logits, [0] * count, 20)
    held = peak = 0
    for event in sorted(profile.events() or [], key=lambda event: event.time_range.start):
        held += event.self_cpu_memory_usage
        peak = max(peak, held)
    assert 0 < peak < 16 * 2**20


def test_extreme_logits_have_finite_logprobs() -> None:
    logits = torch.tensor(
        [[1e30, -1e30, 3e38, 0.0], [-3e38, -3e38, -3e38, -3e38], [88.0, 89.0, 1000.0, -math.inf]]
    )
    found = prompt_logprobs(logits, [2, 0, 3], 4)
    assert found[0][2] == 0.0
    assert found[1][0] == pytest.approx(-math.log(4), abs=1e-6)
    assert found[2][3] == -math.inf and found[2][2] == 0.0
