"""Figures of requests and runs, against examples worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.bench.campaign import Run
from octavo.bench.comparison import compare, same_answers
from octavo.bench.load import Load
from octavo.bench.outcome import Delivery, Outcome
from octavo.bench.slo import Goodput, Slo, goodput, parse_slo
from octavo.bench.summary import percentile, spread, summarize
from octavo.bench.timing import itl_s, latency_s, tpot_s, ttft_s
from octavo.errors import ConfigError


def outcome(*times: float, due: float = 0.0, tokens: int | None = None, **fields: Any) -> Outcome:
    """A request with one sequence whose pieces came at `times`; one token each unless said otherwise."""
    return Outcome(
        **{
            "request_id": "r",
            "due_s": due,
            "sent_s": due,
            "done_s": times[-1] if times else due,
            "deliveries": {0: [Delivery(time) for time in times]} if times else {},
            "num_reported_tokens": len(times) if tokens is None else tokens,
            **fields,
        }
    )


def failed(**fields: Any) -> Outcome:
    return outcome(1.0, error="HTTP 500", **fields)


# --- one request


def test_times_of_a_stream_of_single_tokens() -> None:
    one = outcome(1.5, 1.7, 2.0, 2.6, due=1.0, done_s=2.7)
    assert ttft_s(one) == pytest.approx(0.5)
    assert tpot_s(one) == pytest.approx(1.1 / 3)
    assert itl_s(one) == pytest.approx([0.2, 0.3, 0.6])
    assert latency_s(one) == pytest.approx(1.7)


def test_gap_before_several_tokens_is_shared_by_them() -> None:
    told = outcome(tokens=6, deliveries={0: [Delivery(1.0, 1), Delivery(2.0, 4), Delivery(2.5, 1)]})
    assert itl_s(told) == pytest.approx([0.25] * 4 + [0.5])
    assert tpot_s(told) == pytest.approx(1.5 / 5)


def test_tokens_are_spread_over_pieces_if_the_server_does_not_say_which_had_more() -> None:
    # 5 tokens in 3 pieces: 1, 2, 2
    assert itl_s(outcome(1.0, 2.0, 4.0, tokens=5)) == pytest.approx([0.5, 0.5, 1.0, 1.0])


def test_end_without_text_is_a_token_only_if_one_is_missing() -> None:
    pieces = [Delivery(1.0), Delivery(2.0), Delivery(5.0, None, True)]
    assert tpot_s(outcome(deliveries={0: pieces}, tokens=2)) == pytest.approx(1.0)
    assert tpot_s(outcome(deliveries={0: pieces}, tokens=3)) == pytest.approx(2.0)


def test_sequences_of_one_request_are_timed_apart() -> None:
    two = outcome(
        num_sequences=2,
        tokens=4,
        deliveries={0: [Delivery(1.0), Delivery(2.0)], 1: [Delivery(1.5), Delivery(4.5)]},
    )
    assert ttft_s(two) == pytest.approx(1.0)
    assert tpot_s(two) == pytest.approx(2.0)
    assert sorted(itl_s(two)) == pytest.approx([1.0, 3.0])


def test_request_that_failed_or_was_not_streamed_has_no_token_times() -> None:
    for one in (failed(), outcome(tokens=3, done_s=1.0)):
        assert (ttft_s(one), tpot_s(one), itl_s(one)) == (None, None, [])
    assert latency_s(failed()) is None
    assert tpot_s(outcome(1.0)) is None, "one token has no gap"


@pytest.mark.parametrize(
    ("fields", "doubt"),
    [
        ({}, None),
        ({"num_expected_tokens": 2}, None),
        ({"num_expected_tokens": 3}, "3 new tokens were asked for, 2 came"),
        (
            {"num_sent_tokens": 7, "num_prompt_tokens": 8},
            "7 prompt tokens were sent, the server counted 8",
        ),
        ({"num_reported_tokens": 1}, "2 pieces of text came, but only 1 tokens were counted"),
        ({"num_reported_tokens": None}, "the server reports no usage"),
        ({"num_reported_tokens": None, "error": "broken"}, None),
    ],
)
def test_counts_that_do_not_agree_are_doubtful(fields: dict[str, Any], doubt: str | None) -> None:
    found = outcome(1.0, 2.0, **fields).doubt()
    assert found is None if doubt is None else doubt in (found or "")


# --- a run


def test_percentiles_are_interpolated() -> None:
    values = [10.0, 20.0, 30.0, 40.0, 50.0]
    assert [percentile(values, p) for p in (0, 50, 90, 99, 100)] == pytest.approx([10, 30, 46, 49.6, 50])
    assert percentile([7.0], 99) == 7.0


def test_spread_leaves_out_what_is_missing() -> None:
    found = spread([3.0, None, 1.0])
    assert found is not None
    assert (found.count, found.mean, found.p50, found.max) == (2, 2.0, 2.0, 3.0)
    assert spread([None]) is None


def test_failed_request_is_an_error_and_never_a_fast_one() -> None:
    good = outcome(1.0, 2.0, num_prompt_tokens=8, num_cached_tokens=4)
    summary = summarize([good, failed(done_s=0.001)], 4.0, num_unfinished=1)
    assert (summary.num_requests, summary.num_ok, summary.num_errors, summary.num_unfinished) == (3, 1, 1, 1)
    assert summary.first_error == "HTTP 500"
    assert summary.requests_per_s == 0.25
    assert (summary.output_tokens_per_s, summary.total_tokens_per_s) == (0.5, 2.5)
    assert summary.cached_ratio == 0.5
    assert summary.ttft_s is not None and (summary.ttft_s.count, summary.ttft_s.max) == (1, 1.0)
    assert summary.e2e_s is not None and summary.e2e_s.count == 1


def test_run_without_any_success_has_no_times() -> None:
    summary = summarize([failed()], 1.0)
    assert (summary.ttft_s, summary.cached_ratio, summary.output_tokens_per_s) == (None, None, 0.0)


def test_lag_of_the_client_is_reported_and_counts_in_ttft() -> None:
    late = outcome(1.0, 2.0, sent_s=0.4)
    summary = summarize([late], 2.0)
    assert summary.max_lag_s == pytest.approx(0.4)
    assert summary.ttft_s is not None and summary.ttft_s.mean == pytest.approx(1.0)


# --- goodput


def test_goodput_counts_what_met_every_limit() -> None:
    outcomes = [
        outcome(0.4, 0.5, 0.6),  # meets both
        outcome(0.6, 0.7, 0.8),  # first token too late
        outcome(0.4, 1.4, 2.4),  # too slow after it
        outcome(0.5),  # exactly at the limit, one token
        failed(),
    ]
    slo = parse_slo("ttft=0.5, tpot=0.2")
    assert goodput(outcomes, 4.0, slo) == Goodput(slo=slo, num_met=2, met_ratio=0.4, requests_per_s=0.5)
    assert goodput(outcomes, 4.0, Slo(e2e_s=0.55)).num_met == 1


@pytest.mark.parametrize("text", ["", "ttft", "ttft=x", "ttft=0", "ttft=nan", "itl=1", "ttft=1,ttft=2"])
def test_slo_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="each at most once"):
        parse_slo(text)


# --- comparison


def run_of(label: str, repeat: int, *outcomes: Outcome, wall_s: float = 1.0) -> Run:
    return Run(
        label=label, load=Load(), repeat=repeat, summary=summarize(outcomes, wall_s), outcomes=outcomes
    )


def test_medians_of_the_repeats_are_held_against_the_first_server() -> None:
    runs = [
        run_of(label, repeat, outcome(1.0, 1.0 + gap), wall_s=wall_s)
        for label, each in {"a": [(4.0, 0.1), (2.0, 0.2), (1.0, 0.6)], "b": [(0.5, 0.4)]}.items()
        for repeat, (wall_s, gap) in enumerate(each, 1)
    ]
    rows = {row.metric: row for row in compare(runs)}
    assert rows["output tokens"].medians == {"a": 1.0, "b": 4.0}
    assert rows["output tokens"].ratios == {"a": 1.0, "b": 4.0}
    assert rows["TPOT p50"].medians == pytest.approx({"a": 0.2, "b": 0.4})
    assert rows["TPOT p50"].ratios["b"] == pytest.approx(2.0)
    assert rows["errors"].ratios == {"a": None, "b": None}, "nothing can be divided by no errors"
    assert "goodput" not in rows and "cached prompt tokens" not in rows


def test_figure_that_one_server_lacks_has_no_ratio() -> None:
    rows = {r.metric: r for r in compare([run_of("a", 1, outcome(1.0, 2.0)), run_of("b", 1, failed())])}
    assert rows["TTFT p50"].medians == {"a": 1.0, "b": None}
    assert rows["TTFT p50"].ratios["b"] is None
    assert rows["errors"].medians == {"a": 0.0, "b": 1.0}


def test_answers_are_compared_by_their_text() -> None:
    def answers(*digests: str) -> list[Outcome]:
        return [outcome(1.0, request_id=str(i), text_digest=d) for i, d in enumerate(digests)]

    runs = [run_of("a", 1, *answers("x", "y", "z")), run_of("b", 1, *answers("x", "Y"))]
    assert same_answers(runs) == {"b": (1, 2)}
