"""The results as one picture: throughput, first token and token gap of each case, a colour for each peer, a dot a repeat.

Throughput has bars from 0. Times span three powers of ten, so their axis is logarithmic and has marks at the medians
instead: a bar has no foot there.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from table import cases_of, figures, of, output_rate

_PANELS = (
    ("output tokens/s (more is better)", output_rate, False),
    ("time to first token, p50, s (less is better, logarithmic)", of("ttft_s", "p50"), True),
    ("time per output token, p50, ms (less is better, logarithmic)", of("tpot_s", "p50", 1000), True),
)


def draw(results: Mapping[str, Any], file: Path) -> None:
    """Write a PNG. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    runs, peers, cases = results["runs"], list(results["peers"]), list(cases_of(results["runs"]))
    machine = results["machine"]
    figure, panels = pyplot.subplots(len(_PANELS), 1, figsize=(max(8, 1.6 * len(cases) + 3), 11))
    for panel, (title, read, is_logarithmic) in zip(panels, _PANELS, strict=True):
        for i, peer in enumerate(peers):
            for k, case in enumerate(cases):
                values = figures(runs, case, peer, read)
                if values:
                    place, width = _place(i, k, len(peers))
                    _mark(panel, place, width, values, f"C{i}", with_bar=not is_logarithmic)
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xticks(range(len(cases)), cases)
        panel.set_xlim(-0.5, len(cases) - 0.5)
        panel.spines[["top", "right"]].set_visible(False)
        if is_logarithmic:
            panel.set_yscale("log")
            panel.grid(axis="y", which="both", alpha=0.25)
            panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            panel.yaxis.set_minor_formatter(ticker.NullFormatter())
    for i, peer in enumerate(peers):
        panels[0].bar(0, 0, color=f"C{i}", label=f"{peer} {results['peers'][peer]}")
    figure.suptitle(
        f"{results['model']}, {machine['cpu']}, {machine['num_cpus']} cores, {machine['began'][:10]}"
    )
    figure.legend(*panels[0].get_legend_handles_labels(), loc="upper center", bbox_to_anchor=(0.5, 0.965), ncols=2,
                  fontsize=8, frameon=False)  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _place(peer: int, case: int, num_peers: int) -> tuple[float, float]:
    """Where a peer's mark stands in its case's group, and how wide it may be."""
    width = 0.8 / max(1, num_peers)
    return case + (peer - (num_peers - 1) / 2) * width, 0.92 * width


def _mark(
    panel: Any, place: float, width: float, values: list[float], colour: str, *, with_bar: bool
) -> None:
    median = statistics.median(values)
    if with_bar:
        panel.bar(place, median, width, color=colour)
    else:
        panel.hlines(median, place - width / 2, place + width / 2, color=colour, linewidth=4)
    panel.plot([place] * len(values), values, "k.", markersize=4)
