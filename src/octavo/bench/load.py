"""Many requests at once.

Closed loop: at most `concurrency` requests are in flight, and the next is sent when one has ended. It asks how much a server
can do. Open loop (`rate`): each request is sent when it is due, whatever became of the others. It asks how well a server
answers people, who do not wait for each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.bench.arrivals import arrivals_at
from octavo.bench.client import CompletionsClient
from octavo.bench.outcome import Outcome
from octavo.bench.workload import WorkloadRequest
from octavo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Load:
    """How requests are sent: `rate` a second (open loop), or at most `concurrency` at a time; both None: all at once.

    seed: of the arrivals, where the workload brings none.
    """

    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.rate is not None:
            raise ConfigError("--concurrency and --rate exclude each other; leave one out")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"--concurrency is {self.concurrency}; it must be at least 1")

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} req/s"
        return "all at once" if self.concurrency is None else f"{self.concurrency} at a time"


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """What became of a run. outcomes: of the requests that ended, in the order in which they did.

    interrupted: the run was cut off, and `num_unfinished` requests were under way or had not been sent.
    """

    outcomes: tuple[Outcome, ...]
    wall_s: float
    num_unfinished: int = 0
    interrupted: bool = False


async def run_load(
    client: CompletionsClient, requests: Sequence[WorkloadRequest], load: Load, cache_salt: str | None = None
) -> LoadResult:
    """Send all requests and wait for their ends. Cancelling the task (Ctrl-C does) cuts the run off and keeps the rest."""
    outcomes: list[Outcome] = []
    due = None if load.rate is None else arrivals_at(requests, load.rate, load.seed)
    began = time.perf_counter()
    tasks: list[asyncio.Task[None]]
    if due is not None:
        tasks = [
            asyncio.create_task(_send_when_due(client, request, due_s, began, cache_salt, outcomes))
            for request, due_s in zip(requests, due, strict=True)
        ]
    else:
        queue = iter(requests)
        num_workers = min(load.concurrency or len(requests), len(requests))
        tasks = [
            asyncio.create_task(_send_one_by_one(client, queue, began, cache_salt, outcomes))
            for _ in range(num_workers)
        ]
    interrupted = False
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        interrupted = True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return LoadResult(
        outcomes=tuple(outcomes),
        wall_s=time.perf_counter() - began,
        num_unfinished=len(requests) - len(outcomes),
        interrupted=interrupted,
    )


async def _send_when_due(
    client: CompletionsClient,
    request: WorkloadRequest,
    due_s: float,
    began: float,
    cache_salt: str | None,
    outcomes: list[Outcome],
) -> None:
    await asyncio.sleep(due_s - (time.perf_counter() - began))
    outcomes.append(await client.send(request, began=began, due_s=due_s, cache_salt=cache_salt))


async def _send_one_by_one(
    client: CompletionsClient,
    queue: Iterator[WorkloadRequest],
    began: float,
    cache_salt: str | None,
    outcomes: list[Outcome],
) -> None:
    for request in queue:
        outcomes.append(await client.send(request, began=began, cache_salt=cache_salt))
