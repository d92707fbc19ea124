"""When requests arrive in an open loop: decided before the run, so that a slow server cannot slow its own load down.

Arrivals are a Poisson process of one request a second, stretched to the rate asked for. Runs of one seed at several
rates thus see the same pattern, faster or slower, and two servers compared see the very same one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from octavo.bench.workload import WorkloadRequest
from octavo.errors import ConfigError


def unit_arrivals(count: int, seed: int) -> list[float]:
    """`count` rising times in seconds, whose gaps are exponential with mean 1.

    >>> unit_arrivals(3, seed=1) == unit_arrivals(3, seed=1)
    True
    """
    chance = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += chance.expovariate(1.0)
        times.append(now)
    return times


def arrivals_at(requests: Sequence[WorkloadRequest], rate: float, seed: int) -> list[float]:
    """When each request is due at `rate` requests a second, in seconds from the start of the run.

    The workload's own `arrival_s` are used if it has any above 0 (they are for one request a second), else `seed`
    decides. Raises ConfigError for a rate that is not a positive number, and for a workload with some times only.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(f"--rate is {rate}; it must be a number of requests a second above 0")
    given = [request.arrival_s for request in requests]
    if not any(given):
        return [time / rate for time in unit_arrivals(len(requests), seed)]
    times = [time / rate for time in given if time is not None]
    if len(times) < len(given):
        raise ConfigError("only some requests of the workload have arrival_s; give it to all or to none")
    return times
