"""The results as one markdown table: a column for each peer, a row for each figure of each case, all repeats in a cell."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
_MIB = 2**20


def markdown(results: Mapping[str, Any]) -> str:
    """The whole page: machine, yardstick, table, failures. results: what `run.py` writes to results.json."""
    peers = list(results["peers"])
    lines = ["# Octavo and its peers, one machine, one run", "", *_machine(results), ""]
    lines += ["| | " + " | ".join(f"{name} {results['peers'][name]}" for name in peers) + " |"]
    lines += ["|---|" + "---|" * len(peers)]
    for title, cells in _rows(results["runs"], peers):
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Several values in a cell: one for each repeat, in order; the peers took turns. `-`: not measured.",
    ]
    lines += ["Requests that failed, or were not done in time, have no part in any figure but their own."]
    lines += _ratios(results["runs"], peers)
    for failure in results["failures"]:
        first_line = failure["error"].splitlines()[0]
        lines += ["", f"**{failure['peer']}** failed in repeat {failure['repeat']}: {first_line}"]
    return "\n".join(lines) + "\n"


def cases_of(runs: Sequence[Record]) -> dict[str, str]:
    """Key and title of each case that was run, in order."""
    return {run["case"]: run["title"] for run in runs}


def figures(
    runs: Sequence[Record], case: str, peer: str, read: Callable[[Record], float | None]
) -> list[float]:
    """A figure of a case and a peer in every repeat that has it."""
    found = (read(run) for run in runs if run["case"] == case and run["label"] == peer)
    return [value for value in found if value is not None]


def output_rate(run: Record) -> float | None:
    return run["summary"]["output_tokens_per_s"] if run["summary"]["num_ok"] else None


def of(name: str, part: str, scale: float = 1.0) -> Callable[[Record], float | None]:
    """Reads one value of a spread, such as of("ttft_s", "p50")."""

    def read(run: Record) -> float | None:
        spread = run["summary"][name]
        return None if spread is None else scale * spread[part]

    return read


def _machine(results: Mapping[str, Any]) -> Iterator[str]:
    machine = results["machine"]
    features = ", ".join(machine["cpu_features"])
    yield f"- Machine: {machine['cpu']}, {machine['num_cpus']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB; {features}"
    yield f"- Began: {machine['began']}; Python {machine['python']}; model: {results['model']}"
    yield f"- Command: `{machine['command']}`"
    for name in ("bfloat16", "float32"):
        rates = {
            rows: _several([c["linear_tflops"][name][rows] for c in results["calibrations"]], 3)
            for rows in results["calibrations"][0]["linear_tflops"][name]
        }
        shown = "; ".join(f"M={rows}: {values}" for rows, values in rates.items())
        yield f"- torch linear, {name}, K=2048, N=8192, TFLOP/s, before each repeat and at the end: {shown}"
    streamed = _several([c["weights_gb_per_s"]["bfloat16"] for c in results["calibrations"]], 1)
    copied = _several([c["copy_gb_per_s"] for c in results["calibrations"]], 1)
    loads = _several([c["load_average"] for c in results["calibrations"]], 1)
    yield f"- Weights streamed at M=1: {streamed} GB/s; copy: {copied} GB/s; load average before each: {loads}"


def _rows(runs: Sequence[Record], peers: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    yield "start to ready, s", [_several(_once_a_repeat(runs, peer), 1) for peer in peers]
    peak = [
        max(
            (r["memory"]["peak_rss_bytes"] / _MIB for r in runs if r["label"] == peer and r["memory"]),
            default=0,
        )
        for peer in peers
    ]
    yield "highest resident memory, MiB", [f"{value:.0f}" if value else "-" for value in peak]
    shown: tuple[tuple[str, Callable[[Record], float | None], int], ...] = (
        ("output tokens/s", output_rate, 1),
        ("TTFT p50, s", of("ttft_s", "p50"), 2),
        ("TTFT p99, s", of("ttft_s", "p99"), 2),
        ("TPOT p50, ms", of("tpot_s", "p50", 1000), 1),
        ("TPOT p99, ms", of("tpot_s", "p99", 1000), 1),
    )
    for case, title in cases_of(runs).items():
        yield f"**{case}**: {title}", [""] * len(peers)
        for name, read, digits in shown:
            yield f"{case} {name}", [_several(figures(runs, case, peer, read), digits) for peer in peers]
        errors = [figures(runs, case, peer, lambda run: run["summary"]["num_errors"]) for peer in peers]
        if any(map(any, errors)):
            yield f"{case} requests that failed", [_several(each, 0) for each in errors]
        doubts = [figures(runs, case, peer, lambda run: run["summary"]["num_doubtful"]) for peer in peers]
        if any(map(any, doubts)):
            yield f"{case} requests of doubtful counts", [_several(each, 0) for each in doubts]


def _once_a_repeat(runs: Sequence[Record], peer: str) -> list[float]:
    """A server is started once for all cases of a repeat, an offline peer for each."""
    return list({run["repeat"]: run["ready_s"] for run in runs if run["label"] == peer}.values())


def _ratios(runs: Sequence[Record], peers: Sequence[str]) -> Iterator[str]:
    """The throughput of the first peer, and of its variants (name-...), against the best of the others, case by case."""
    ours = [peer for peer in peers if peer == peers[0] or peer.startswith(f"{peers[0]}-")]
    if len(ours) == len(peers):
        return
    yield ""
    yield f"Output tokens/s of {' and '.join(ours)}, median, over the best other's median:"
    yield ""
    for case in cases_of(runs):
        medians = {
            peer: statistics.median(values)
            for peer in peers
            if (values := figures(runs, case, peer, output_rate))
        }
        others = {peer: value for peer, value in medians.items() if peer not in ours and value > 0}
        if others:
            best = max(others, key=others.__getitem__)
            ratios = [f"{medians[peer] / others[best]:.2f}" for peer in ours if peer in medians]
            yield f"- {case}: {', '.join(ratios)} (over {best})"


def _several(values: Sequence[float], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values) or "-"
