"""Servers side by side: the median of each figure over the repeats, and its ratio to the first server's.

Ratios within one campaign are what counts on a machine that others use too; figures of different days are not compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from octavo.bench.campaign import Run
from octavo.bench.summary import Spread, Summary


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure of a run that can be compared. scale: what multiplies it on the screen."""

    name: str
    unit: str
    read: Callable[[Summary], float | None]
    more_is_better: bool
    scale: float = 1.0


def _of_spread(field: str, value: str) -> Callable[[Summary], float | None]:
    def read(summary: Summary) -> float | None:
        spread: Spread | None = getattr(summary, field)
        return None if spread is None else float(getattr(spread, value))

    return read


METRICS: tuple[Metric, ...] = (
    Metric(name="requests", unit="1/s", read=lambda s: s.requests_per_s, more_is_better=True),
    Metric(name="output tokens", unit="1/s", read=lambda s: s.output_tokens_per_s, more_is_better=True),
    Metric(name="all tokens", unit="1/s", read=lambda s: s.total_tokens_per_s, more_is_better=True),
    *(
        Metric(
            name=f"{name} {value}",
            unit="ms",
            read=_of_spread(f"{name.lower()}_s", value),
            more_is_better=False,
            scale=1000,
        )
        for name in ("TTFT", "TPOT", "ITL", "E2E")
        for value in ("p50", "p90", "p99", "mean")
    ),
    Metric(
        name="goodput",
        unit="1/s",
        read=lambda s: None if s.goodput is None else s.goodput.requests_per_s,
        more_is_better=True,
    ),
    Metric(
        name="within SLO",
        unit="%",
        read=lambda s: None if s.goodput is None else s.goodput.met_ratio,
        more_is_better=True,
        scale=100,
    ),
    Metric(
        name="cached prompt tokens", unit="%", read=lambda s: s.cached_ratio, more_is_better=True, scale=100
    ),
    Metric(name="errors", unit="", read=lambda s: float(s.num_errors), more_is_better=False),
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One figure of all servers. medians and ratios: by label; None where a server has no such figure.

    ratios: to the first server; above 1 means more, whether that is good or not.
    """

    metric: str
    unit: str
    more_is_better: bool
    medians: dict[str, float | None]
    ratios: dict[str, float | None]


def compare(runs: Sequence[Run]) -> list[Compared]:
    """Compare runs of one load; the first label that appears is what the others are held against.

    Figures that no server has are left out.
    """
    labels = list(dict.fromkeys(run.label for run in runs))
    rows = []
    for metric in METRICS:
        medians = {
            label: _median(metric.read(run.summary) for run in runs if run.label == label) for label in labels
        }
        if all(value is None for value in medians.values()):
            continue
        first = medians[labels[0]]
        rows.append(
            Compared(
                metric=metric.name,
                unit=metric.unit,
                more_is_better=metric.more_is_better,
                medians=medians,
                ratios={label: _ratio(value, first) for label, value in medians.items()},
            )
        )
    return rows


def same_answers(runs: Sequence[Run]) -> dict[str, tuple[int, int]]:
    """By label: (requests with the very text that the first server gave, requests that both answered), first repeats."""
    texts: dict[str, dict[str, str]] = {}
    for run in runs:
        answers = {o.request_id: o.text_digest for o in run.outcomes if o.error is None}
        texts.setdefault(run.label, answers)
    first, *others = texts
    return {
        label: (
            sum(texts[first].get(request_id) == digest for request_id, digest in texts[label].items()),
            len(texts[first].keys() & texts[label].keys()),
        )
        for label in others
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ratio(value: float | None, first: float | None) -> float | None:
    return None if value is None or not first else value / first
