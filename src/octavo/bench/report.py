"""Tables for the terminal: one line of figures a run, and servers side by side. Milliseconds here, seconds elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from octavo.bench.campaign import Campaign, Run
from octavo.bench.comparison import METRICS, Compared, compare, same_answers
from octavo.bench.offline import OfflineRun
from octavo.bench.summary import Spread

# Wide enough for a table when the output goes to a file.
_WIDTH_OF_FILE = 120


def console() -> Console:
    """Where tables go: standard output."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=_WIDTH_OF_FILE)


def print_campaign(campaign: Campaign, to: Console) -> None:
    """All tables of a campaign, and what to know about its figures: one run in full, several in a line each."""
    runs = campaign.runs
    if not runs:
        to.print("nothing was measured")
        return
    to.print(_run_table(runs[0]) if len(runs) == 1 else _runs_table(runs))
    for run in runs:
        _print_remarks(run, to)
    labels = list(dict.fromkeys(run.label for run in runs))
    is_repeated = len({run.repeat for run in runs}) > 1
    for load in dict.fromkeys(run.load for run in runs):
        if len(labels) > 1 or is_repeated:
            alike = [run for run in runs if run.load == load]
            to.print(_comparison_table(str(load), compare(alike), labels))
            for label, (same, both) in same_answers(alike).items():
                text = f"{label}: {same} of {both} answers are the same text as those of {labels[0]}"
                to.print(text, markup=False, soft_wrap=True)
    if campaign.interrupted:
        to.print("[yellow]interrupted: these are the figures of what had ended by then[/]")


def print_offline(run: OfflineRun, to: Console) -> None:
    """The figures of an offline run."""
    table = Table(title=f"offline, run {run.repeat}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in (
        ("sequences done", f"{run.num_ended} of {run.num_sequences}"),
        ("wall", f"{run.wall_s:.2f} s"),
        ("prompt tokens, cached", f"{run.num_prompt_tokens}, {run.num_cached_tokens}"),
        ("output tokens", f"{run.num_output_tokens}"),
        ("output tokens/s", f"{run.output_tokens_per_s:.1f}"),
        ("all tokens/s", f"{run.total_tokens_per_s:.1f}"),
        ("steps, preemptions", f"{run.num_steps}, {run.num_preemptions}"),
        ("time in steps", f"{100 * run.step_ratio:.1f} % of wall"),
    ):
        table.add_row(name, value)
    if run.step_s is not None:
        table.add_row("ms per step", _shown(run.step_s))
    if run.interrupted:
        table.caption = "interrupted: figures of what had ended by then"
    to.print(table)


def _run_table(run: Run) -> Table:
    summary = run.summary
    table = Table(title=escape(f"{run.label}, {run.load}, run {run.repeat}"), title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("requests done", f"{summary.num_ok} of {summary.num_requests}")
    table.add_row("errors", f"[red]{summary.num_errors}[/]" if summary.num_errors else "0")
    table.add_row("wall", f"{summary.wall_s:.2f} s")
    table.add_row("prompt, output tokens", f"{summary.num_prompt_tokens}, {summary.num_output_tokens}")
    for metric in METRICS:
        value = metric.read(summary)
        if value is not None and metric.unit != "ms" and metric.name != "errors":
            table.add_row(metric.name, f"{value * metric.scale:.2f} {metric.unit}")
    for name, values in (
        ("TTFT", summary.ttft_s),
        ("TPOT", summary.tpot_s),
        ("ITL", summary.itl_s),
        ("E2E", summary.e2e_s),
    ):
        if values is not None:
            table.add_row(f"{name} ms", _shown(values))
    if run.memory is not None:
        rss, pss = run.memory.peak_rss_bytes / 2**20, run.memory.peak_pss_bytes / 2**20
        table.add_row("peak memory", f"RSS {rss:.0f} MiB, PSS {pss:.0f} MiB")
    return table


def _runs_table(runs: Sequence[Run]) -> Table:
    table = Table(title="all runs, in their order", title_justify="left")
    table.add_column("server")
    table.add_column("load")
    for heading in (
        "run",
        "done",
        "errors",
        "wall s",
        "output/s",
        "TTFT ms",
        "TPOT ms",
        "RSS MiB",
        "within SLO",
    ):
        table.add_column(heading, justify="right")
    for run in runs:
        summary = run.summary
        table.add_row(
            escape(run.label),
            str(run.load),
            str(run.repeat),
            str(summary.num_ok),
            f"[red]{summary.num_errors}[/]" if summary.num_errors else "0",
            f"{summary.wall_s:.1f}",
            f"{summary.output_tokens_per_s:.1f}",
            _p50_p99(summary.ttft_s),
            _p50_p99(summary.tpot_s),
            "-" if run.memory is None else f"{run.memory.peak_rss_bytes / 2**20:.0f}",
            "-" if summary.goodput is None else f"{100 * summary.goodput.met_ratio:.0f} %",
        )
    table.caption = "TTFT and TPOT: p50 / p99"
    return table


def _print_remarks(run: Run, to: Console) -> None:
    # What a server said is shown as it is: brackets in it are no markup.
    summary = run.summary
    if summary.first_error is not None:
        text = f"{run.label}: {summary.num_errors} requests failed; the first: {summary.first_error}"
        to.print(text, style="red", markup=False, soft_wrap=True)
    if summary.first_doubt is not None:
        text = f"{run.label}: {summary.num_doubtful} requests are doubtful; the first: {summary.first_doubt}"
        to.print(text, style="yellow", markup=False, soft_wrap=True)
    if run.load.rate is not None and summary.ttft_s and summary.max_lag_s > 0.1 * summary.ttft_s.p50:
        text = f"{run.label}: this client sent requests up to {1000 * summary.max_lag_s:.0f} ms late; TTFT includes it"
        to.print(text, style="yellow", markup=False, soft_wrap=True)


def _comparison_table(load: str, rows: Sequence[Compared], labels: Sequence[str]) -> Table:
    table = Table(title=f"{load}: medians of all runs", title_justify="left")
    table.add_column("figure")
    for i, label in enumerate(labels):
        table.add_column(escape(label), justify="right")
        if i:
            table.add_column("ratio", justify="right")
    scales = {metric.name: metric.scale for metric in METRICS}
    for row in rows:
        cells = [f"{row.metric} {row.unit}".strip()]
        for i, label in enumerate(labels):
            value, ratio = row.medians.get(label), row.ratios.get(label)
            cells.append("-" if value is None else f"{value * scales[row.metric]:.2f}")
            if i:
                cells.append("-" if ratio is None else _coloured(ratio, row.more_is_better))
        table.add_row(*cells)
    return table


def _coloured(ratio: float, more_is_better: bool) -> str:
    better = ratio >= 1 if more_is_better else ratio <= 1
    return f"[{'green' if better else 'red'}]{ratio:.2f}[/]"


def _shown(values: Spread) -> str:
    shown = (f"{name} {1000 * getattr(values, name):.1f}" for name in ("p50", "p90", "p99", "mean"))
    return ", ".join(shown)


def _p50_p99(values: Spread | None) -> str:
    return "-" if values is None else f"{1000 * values.p50:.0f} / {1000 * values.p99:.0f}"
