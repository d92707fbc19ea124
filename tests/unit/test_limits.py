"""What is refused at once, with both numbers, and when a sequence ends."""

from __future__ import annotations

import pytest

from octavo.errors import ContextLengthError, ValidationError
from octavo.memory.block_pool import BlockPool
from octavo.request import Request, Sequence
from octavo.sampling_params import SamplingParams
from octavo.scheduler.limits import Limits, check_request, finish_reason

WIDE = Limits(max_model_len=5_000, pool_tokens=3_200, vocab_size=100, eos_token_ids=frozenset({2}))
NARROW = Limits(max_model_len=2_048, pool_tokens=3_200, vocab_size=100, eos_token_ids=frozenset({2}))


def test_open_end_means_all_that_fits() -> None:
    assert check_request([1] * 48, SamplingParams(max_tokens=None), NARROW).max_tokens == 2_000
    assert check_request([1] * 200, SamplingParams(max_tokens=None), WIDE).max_tokens == 3_000


def test_other_params_stay_as_they_are() -> None:
    params = SamplingParams(max_tokens=7, temperature=0.5, stop="x")
    assert check_request([1], params, WIDE) == params


@pytest.mark.parametrize(("prompt", "new"), [(2_048, 0), (2_000, 48), (1, 2_047)])
def test_what_fits_exactly_is_served(prompt: int, new: int) -> None:
    assert check_request([1] * prompt, SamplingParams(max_tokens=new), NARROW).max_tokens == new


@pytest.mark.parametrize(
    ("limits", "prompt", "new", "numbers"),
    [
        (NARROW, 2_000, 49, ("2,000", "49", "2,049", "2,048", "--max-model-len")),
        (NARROW, 2_048, None, ("2,048", "2,049", "--max-model-len")),
        (WIDE, 3_000, 201, ("3,000", "201", "3,201", "3,200", "--kv-cache-gb")),
        (WIDE, 4_000, 0, ("4,000", "3,200", "--kv-cache-gb")),
    ],
)
def test_what_can_never_fit_is_refused_with_both_numbers(
    limits: Limits, prompt: int, new: int | None, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(ContextLengthError) as caught:
        check_request([1] * prompt, SamplingParams(max_tokens=new), limits)
    assert caught.value.code == "context_length_exceeded"
    assert all(number in str(caught.value) for number in numbers)


@pytest.mark.parametrize(
    ("prompt", "params", "param", "value"),
    [
        ([], SamplingParams(), "prompt", "no tokens"),
        ([1, 100], SamplingParams(), "prompt", "100"),
        ([1, -1], SamplingParams(), "prompt", "-1"),
        ([1], SamplingParams(stop_token_ids=[5, 101]), "stop_token_ids", "101"),
        ([1], SamplingParams(logit_bias={102: 1.0}), "logit_bias", "102"),
        ([1], SamplingParams(allowed_token_ids=(3, 103)), "allowed_token_ids", "103"),
        ([1] * 3_000, SamplingParams(max_tokens=None, min_tokens=300), "min_tokens", "300"),
        ([1], SamplingParams(min_tokens=4, allowed_token_ids=(2, 7), stop_token_ids=[7]), "min_tokens", "4"),
        ([1], SamplingParams(min_tokens=5, stop_token_ids=range(100)), "min_tokens", "5"),
    ],
)
def test_other_faults_name_the_field_and_the_value(
    prompt: list[int], params: SamplingParams, param: str, value: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        check_request(prompt, params, WIDE)
    assert caught.value.param == param and value in str(caught.value)


def test_allowed_tokens_that_end_the_sequence_are_fine_without_min_tokens() -> None:
    for params in (
        SamplingParams(allowed_token_ids=(2,)),
        SamplingParams(allowed_token_ids=(2, 3), min_tokens=2),
    ):
        assert check_request([1], params, WIDE) == params


def after(new: list[int], **params: object) -> tuple[str, int | None] | None:
    """Why a sequence with these new tokens ends."""
    request = Request("r", (9,), SamplingParams(**params), (0,))  # type: ignore[arg-type]
    sequence = Sequence(0, request, 0, 0, BlockPool(8, 4))
    sequence.token_ids += new
    return finish_reason(sequence, frozenset({2}))


@pytest.mark.parametrize(
    ("new", "params", "reason"),
    [
        ([5], {}, None),
        ([5, 2], {}, ("stop", None)),
        ([5, 2], {"ignore_eos": True}, None),
        ([5, 6], {"stop_token_ids": [6]}, ("stop", 6)),
        ([5, 2], {"stop_token_ids": [2], "ignore_eos": True}, ("stop", 2)),
        ([6, 5], {"stop_token_ids": [6]}, None),
        ([5, 5], {"max_tokens": 2}, ("length", None)),
        ([5, 2], {"max_tokens": 2}, ("stop", None)),
        ([], {"max_tokens": 0}, ("length", None)),
        ([2], {"min_tokens": 2}, None),
        ([6], {"min_tokens": 2, "stop_token_ids": [6]}, None),
        ([5, 2], {"min_tokens": 2}, ("stop", None)),
        ([2, 5], {"min_tokens": 2, "max_tokens": 2}, ("length", None)),
    ],
)
def test_sequence_ends_for_the_first_of_its_reasons(
    new: list[int], params: dict[str, object], reason: tuple[str, int | None] | None
) -> None:
    assert after(new, **params) == reason


def test_prompt_token_that_is_a_stop_token_ends_nothing() -> None:
    assert after([], stop_token_ids=[9]) is None
