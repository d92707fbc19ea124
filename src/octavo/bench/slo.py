"""Goodput: the requests a second that were answered within every limit of a service level objective (SLO).

A failed request met nothing, and one that was still running when the run was cut off is not counted at all.

Source: DistServe, Zhong et al., OSDI 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.bench.outcome import Outcome
from octavo.bench.timing import latency_s, tpot_s, ttft_s
from octavo.errors import ConfigError

_NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Limits in seconds; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def needs_stream(self) -> bool:
        """Whether a limit is on something that only a streamed reply shows."""
        return self.ttft_s is not None or self.tpot_s is not None

    def is_met(self, outcome: Outcome) -> bool:
        """Whether a request succeeded within all limits. One token has no TPOT, which meets any limit."""
        if outcome.error is not None:
            return False
        measured = (
            (ttft_s(outcome), self.ttft_s),
            (tpot_s(outcome), self.tpot_s),
            (latency_s(outcome), self.e2e_s),
        )
        return all(limit is None or value is None or value <= limit for value, limit in measured)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """How a run did under an SLO. met_ratio: of all requests that ended, those that failed included."""

    slo: Slo
    num_met: int
    met_ratio: float
    requests_per_s: float


def parse_slo(text: str) -> Slo:
    """Read `ttft=0.5,tpot=0.05`. Raises ConfigError with the names there are.

    >>> parse_slo("ttft=0.5,tpot=0.05").tpot_s
    0.05
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if name not in _NAMES or not (math.isfinite(seconds) and seconds > 0) or name in limits:
            raise ConfigError(
                f"--slo is {text!r}, whose part {part!r} cannot be used; give seconds for {', '.join(_NAMES)},"
                " each at most once, as in ttft=0.5,tpot=0.05"
            )
        limits[name] = seconds
    return Slo(**{f"{name}_s": seconds for name, seconds in limits.items()})


def goodput(outcomes: Sequence[Outcome], wall_s: float, slo: Slo) -> Goodput:
    """Judge the requests of a run that took `wall_s`."""
    num_met = sum(slo.is_met(outcome) for outcome in outcomes)
    return Goodput(
        slo=slo,
        num_met=num_met,
        met_ratio=num_met / len(outcomes) if outcomes else 0.0,
        requests_per_s=num_met / wall_s if wall_s > 0 else 0.0,
    )
