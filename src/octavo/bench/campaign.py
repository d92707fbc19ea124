"""Runs in turn: every repeat goes through all rates, every rate through all servers (A B A B), so that what changes on a
machine over time hits all of them alike.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from octavo.bench.client import CompletionsClient, RequestSettings
from octavo.bench.load import Load, LoadResult, run_load
from octavo.bench.memory import MemoryUse, MemoryWatch
from octavo.bench.outcome import Outcome
from octavo.bench.slo import Slo
from octavo.bench.summary import Summary, summarize
from octavo.bench.workload import WorkloadRequest, warmup_requests
from octavo.errors import BenchmarkError, ConfigError

# A label, then the address: ours=http://127.0.0.1:8000
_TARGET = re.compile(r"(?:(?P<label>[^=/]+)=)?(?P<url>https?://.+)")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server to measure. url: without /v1. server_pid: the process whose tree's memory is watched, None: none."""

    label: str
    url: str
    server_pid: int | None = None


@dataclass(frozen=True, kw_only=True)
class Procedure:
    """What to run. loads: one or more, in this order. warmup: requests sent to each server before anything is measured.

    fresh_cache: give each run a cache_salt of its own, so that it finds nothing of an earlier one in a prefix cache.
    """

    loads: tuple[Load, ...]
    repeats: int = 1
    warmup: int = 0
    fresh_cache: bool = False
    slo: Slo | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"--repeats is {self.repeats}; it must be at least 1")
        if self.warmup < 0:
            raise ConfigError(f"--warmup is {self.warmup}; it must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the workload against one server. repeat: counted from 1."""

    label: str
    load: Load
    repeat: int
    summary: Summary
    outcomes: tuple[Outcome, ...]
    memory: MemoryUse | None = None
    cache_salt: str | None = None


@dataclass
class Campaign:
    """All runs so far. `run_campaign` writes it. models and versions: by label."""

    runs: list[Run] = field(default_factory=list)
    models: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    interrupted: bool = False


def parse_target(text: str, server_pid: int | None = None) -> Target:
    """Read `URL` or `label=URL`; the label of a bare address is its host and port. Raises ConfigError.

    >>> parse_target("ours=http://127.0.0.1:8000/v1/").url
    'http://127.0.0.1:8000'
    """
    found = _TARGET.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            f"{text!r} is no address; give one such as http://127.0.0.1:8000 or name=http://..."
        )
    url = found["url"].rstrip("/").removesuffix("/v1").rstrip("/")
    return Target(label=found["label"] or url.partition("://")[2], url=url, server_pid=server_pid)


def check_targets(targets: Sequence[Target]) -> None:
    """Raises ConfigError if two servers have the same label: their figures could not be told apart."""
    labels = [target.label for target in targets]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"two servers are called {label!r}; name them apart, as in first=http://...")


async def run_campaign(
    targets: Sequence[Target],
    requests: list[WorkloadRequest],
    settings: RequestSettings,
    procedure: Procedure,
    say: Callable[[str], None] = lambda _: None,
) -> Campaign:
    """Measure all servers. say: is told in a line what begins.

    When the task is cancelled (Ctrl-C), what was measured so far is returned, and `interrupted` is set. Raises ConfigError,
    and BenchmarkError for a server that does not answer at all.
    """
    check_targets(targets)
    campaign = Campaign()
    try:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(CompletionsClient(t.url, settings)) for t in targets]
            for target, client in zip(targets, clients, strict=True):
                campaign.models[target.label] = await client.find_model()
                campaign.versions[target.label] = await client.version()
                await _warm_up(target, client, requests, procedure, say)
            for repeat in range(1, procedure.repeats + 1):
                for load in procedure.loads:
                    for target, client in zip(targets, clients, strict=True):
                        say(f"run {repeat} of {procedure.repeats}: {target.label}, {load}")
                        campaign.interrupted = await _run(
                            campaign, target, client, requests, load, repeat, procedure
                        )
                        if campaign.interrupted:
                            return campaign
    except asyncio.CancelledError:
        campaign.interrupted = True
    return campaign


async def _warm_up(
    target: Target,
    client: CompletionsClient,
    requests: list[WorkloadRequest],
    procedure: Procedure,
    say: Callable[[str], None],
) -> None:
    if not procedure.warmup:
        return
    say(f"warming {target.label} up")
    result = await run_load(client, warmup_requests(requests, procedure.warmup), Load())
    if result.interrupted:
        raise asyncio.CancelledError
    failed = next((outcome.error for outcome in result.outcomes if outcome.error is not None), None)
    if failed is not None:
        raise BenchmarkError(f"a warm-up request to {target.label} failed: {failed}")


async def _run(
    campaign: Campaign,
    target: Target,
    client: CompletionsClient,
    requests: list[WorkloadRequest],
    load: Load,
    repeat: int,
    procedure: Procedure,
) -> bool:
    """Add one run to the campaign; returns whether it was cut off."""
    salt = uuid.uuid4().hex if procedure.fresh_cache else None
    async with AsyncExitStack() as stack:
        watch = None
        if target.server_pid is not None:
            watch = await stack.enter_async_context(MemoryWatch(target.server_pid))
        result: LoadResult = await run_load(client, requests, load, salt)
    campaign.runs.append(
        Run(
            label=target.label,
            load=load,
            repeat=repeat,
            summary=summarize(
                result.outcomes, result.wall_s, num_unfinished=result.num_unfinished, slo=procedure.slo
            ),
            outcomes=result.outcomes,
            memory=None if watch is None else watch.use,
            cache_salt=salt,
        )
    )
    return result.interrupted
