"""A run in figures. Only requests that succeeded have times and tokens; those that failed are counted as errors.

Percentiles are interpolated between the two nearest values (what numpy calls linear), because a run of twenty requests
has no 99th value of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.bench.outcome import Outcome
from octavo.bench.slo import Goodput, Slo, goodput
from octavo.bench.timing import itl_s, latency_s, tpot_s, ttft_s


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How values are spread, in their own unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one run. Times in seconds.

    num_unfinished: requests that had not ended when the run was cut off. num_doubtful: requests that succeeded but whose
    counts do not agree, `first_doubt` says how. cached_ratio: prompt tokens that a prefix cache had, None if the server does
    not say. max_lag_s: how late the client itself sent a request; far below TTFT, or the client was the bottleneck.
    """

    num_requests: int
    num_ok: int
    num_errors: int
    first_error: str | None
    num_unfinished: int
    num_doubtful: int
    first_doubt: str | None
    wall_s: float
    requests_per_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    cached_ratio: float | None
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    e2e_s: Spread | None
    max_lag_s: float
    goodput: Goodput | None = None


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the sorted `values` lie, interpolated. Needs at least one value.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50)
    2.5
    """
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def spread(values: Iterable[float | None]) -> Spread | None:
    """How the values that exist are spread; None if there are none."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return Spread(
        count=len(known),
        mean=statistics.fmean(known),
        p50=percentile(known, 50),
        p90=percentile(known, 90),
        p99=percentile(known, 99),
        max=known[-1],
    )


def summarize(
    outcomes: Sequence[Outcome], wall_s: float, *, num_unfinished: int = 0, slo: Slo | None = None
) -> Summary:
    """The figures of a run that took `wall_s`, in which `outcomes` ended and `num_unfinished` requests did not."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    doubts = [doubt for outcome in good if (doubt := outcome.doubt()) is not None]
    num_prompt = sum(outcome.prompt_tokens for outcome in good)
    num_output = sum(outcome.num_output_tokens for outcome in good)
    seconds = max(wall_s, 1e-9)
    return Summary(
        num_requests=len(outcomes) + num_unfinished,
        num_ok=len(good),
        num_errors=len(outcomes) - len(good),
        first_error=next((outcome.error for outcome in outcomes if outcome.error is not None), None),
        num_unfinished=num_unfinished,
        num_doubtful=len(doubts),
        first_doubt=doubts[0] if doubts else None,
        wall_s=wall_s,
        requests_per_s=len(good) / seconds,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        output_tokens_per_s=num_output / seconds,
        total_tokens_per_s=(num_prompt + num_output) / seconds,
        cached_ratio=_cached_ratio(good, num_prompt),
        ttft_s=spread(map(ttft_s, good)),
        tpot_s=spread(map(tpot_s, good)),
        itl_s=spread(gap for outcome in good for gap in itl_s(outcome)),
        e2e_s=spread(map(latency_s, good)),
        max_lag_s=max((outcome.sent_s - outcome.due_s for outcome in outcomes), default=0.0),
        goodput=None if slo is None else goodput(outcomes, wall_s, slo),
    )


def _cached_ratio(good: Sequence[Outcome], num_prompt_tokens: int) -> float | None:
    told = [outcome.num_cached_tokens for outcome in good if outcome.num_cached_tokens is not None]
    return sum(told) / num_prompt_tokens if told and num_prompt_tokens else None
