"""One peer, all cases: started, warmed up, measured, stopped. All figures come from `octavo.bench`, whoever the peer is."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench.campaign import Procedure, Run, Target, run_campaign
from octavo.bench.client import RequestSettings
from octavo.bench.load import Load
from octavo.bench.memory import MemoryUse, MemoryWatch
from octavo.bench.outcome import Delivery, Outcome
from octavo.bench.record import run_record
from octavo.bench.summary import summarize
from octavo.bench.workload import WorkloadRequest, read_workload
from peer import OfflinePeer, PeerError, Place, ServerPeer
from processes import Running, free_port, running
from workloads import WARMUP, Case


@dataclass(frozen=True, kw_only=True)
class Limits:
    """start_s: until a server must be ready. case_s: after which a request of a case counts as failed.

    num_requests: the first so many of each workload; None: all.
    """

    start_s: float
    case_s: float
    num_requests: int | None = None

    def requests(self, case: Case) -> list[WorkloadRequest]:
        return read_workload(case.file)[: self.num_requests]


def measure(
    peer: ServerPeer | OfflinePeer,
    place: Place,
    cases: Sequence[Case],
    repeat: int,
    log: Path,
    limits: Limits,
) -> list[dict[str, Any]]:
    """A record for each case, in order. Raises PeerError for a peer that does not start; failed requests are counted."""
    if hasattr(peer, "start"):
        return _measure_server(peer, place, cases, repeat, log, limits)
    return [
        _measure_offline(peer, place, case, repeat, log, limits) for case in cases if not case.is_open_loop
    ]


def _measure_server(
    peer: ServerPeer, place: Place, cases: Sequence[Case], repeat: int, log: Path, limits: Limits
) -> list[dict[str, Any]]:
    port = free_port()
    with running(peer.start(place, port), port, log, limits.start_s) as server:
        print(f"  ready after {server.ready_s:.1f} s", flush=True)
        settings = RequestSettings(extra_body=peer.extra_body, timeout_s=limits.case_s)
        _warm_up(peer, server, settings)
        return [_measure_case(peer, server, settings, case, limits.requests(case), repeat) for case in cases]


def _warm_up(peer: ServerPeer, server: Running, settings: RequestSettings) -> None:
    """At once and one by one, so that a peer that compiles for each batch size has done so."""
    target = Target(label=peer.name, url=server.url)
    for load in (Load(), Load(concurrency=1)):
        procedure = Procedure(loads=(load,), fresh_cache=True)
        campaign = asyncio.run(run_campaign([target], read_workload(WARMUP), settings, procedure))
        failed = campaign.runs[0].summary.first_error if campaign.runs else "interrupted"
        if failed is not None:
            raise PeerError(f"a warm-up request to {peer.name} failed: {failed}")


def _measure_case(
    peer: ServerPeer,
    server: Running,
    settings: RequestSettings,
    case: Case,
    requests: list[WorkloadRequest],
    repeat: int,
) -> dict[str, Any]:
    target = Target(label=peer.name, url=server.url, server_pid=server.pid)
    # A salt of its own for each run: nothing of an earlier one is found, what requests of this run share is.
    procedure = Procedure(loads=(case.load,), fresh_cache=True)
    campaign = asyncio.run(run_campaign([target], requests, settings, procedure))
    if campaign.interrupted:
        raise KeyboardInterrupt
    return _record(campaign.runs[0], case, repeat, server.ready_s)


def _measure_offline(
    peer: OfflinePeer, place: Place, case: Case, repeat: int, log: Path, limits: Limits
) -> dict[str, Any]:
    command = peer.command(place, case.file, case.batch_size, limits.case_s)
    if limits.num_requests is not None:
        command = [*command, "--num-requests", str(limits.num_requests)]
    output, memory = asyncio.run(_run_watched(command, log))
    found = json.loads(output.splitlines()[-1])
    outcomes = tuple(_outcome(entry, case) for entry in found["requests"])
    run = Run(
        label=peer.name,
        load=case.load,
        repeat=repeat,
        summary=summarize(outcomes, found["wall_s"]),
        outcomes=outcomes,
        memory=memory,
    )
    return _record(run, case, repeat, found["load_s"])


async def _run_watched(command: Sequence[str], log: Path) -> tuple[str, MemoryUse]:
    with log.open("ab") as sink:
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=sink)
    try:
        async with MemoryWatch(process.pid) as watch:
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise PeerError(f"{' '.join(command)} failed with {process.returncode}; see {log}")
    return output.decode(), watch.use


def _outcome(entry: dict[str, Any], case: Case) -> Outcome:
    """What `static_batches.py` says of a request, as if it had been streamed.

    All were due at the start, unless the case sends one after the other: then when its batch began.
    """
    due_s = entry["began_s"] if case.load.concurrency is not None else 0.0
    times: list[list[float]] = entry["times_s"]
    num_tokens = sum(map(len, times))
    return Outcome(
        request_id=entry["id"],
        num_sequences=len(times),
        due_s=due_s,
        sent_s=due_s,
        done_s=max((each[-1] for each in times if each), default=0.0),
        deliveries={i: [Delivery(time, 1) for time in each] for i, each in enumerate(times)},
        num_prompt_tokens=entry["num_prompt_tokens"],
        num_reported_tokens=num_tokens,
        error=entry.get("error"),
    )


def _record(run: Run, case: Case, repeat: int, ready_s: float) -> dict[str, Any]:
    summary = run.summary
    print(
        f"  {case.key}: {summary.output_tokens_per_s:.1f} output tokens/s, {summary.num_errors} errors"
        + (f" (first: {summary.first_error})" if summary.first_error else ""),
        flush=True,
    )
    record = {**run_record(run), "case": case.key, "title": case.title, "repeat": repeat, "ready_s": ready_s}
    del record["requests"]  # a megabyte for a whole run; the summary has what is shown
    return record
