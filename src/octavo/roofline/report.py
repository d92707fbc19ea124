"""The tables of `octavo bench kernels`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from octavo.roofline.limits import Limits
from octavo.roofline.measured import Judged

# Wide enough for a table when the output goes to a file.
_WIDTH_OF_FILE = 120
# More waiting than this needs saying.
_CALM_RATIO = 0.02


def print_report(limits: Limits, results: Sequence[Judged], waited_ratio: float | None) -> None:
    """Limits, then products (a table for each shape), then everything else, on standard output.

    waited_ratio: the share of time in which threads waited for a CPU; None if that is not known.
    """
    plain = Console()
    to = plain if plain.is_terminal else Console(width=_WIDTH_OF_FILE)
    to.print(_limits_table(limits))
    products = [result for result in results if result.measured.kernel == "product"]
    for case in dict.fromkeys(result.measured.case for result in products):
        to.print(_products_table(case, [result for result in products if result.measured.case == case]))
    others = [result for result in results if result.measured.kernel != "product"]
    if others:
        to.print(_others_table(others))
    if waited_ratio is not None and waited_ratio > _CALM_RATIO:
        text = (
            f"other programs ran: {100 * waited_ratio:.0f} % of the time threads waited for a CPU. Times are the best of"
            " their rounds; long ones are too long all the same"
        )
        to.print(text, style="yellow", markup=False, soft_wrap=True)


def _limits_table(limits: Limits) -> Table:
    table = Table(title="what this machine can do, all threads", title_justify="left")
    table.add_column("limit")
    table.add_column("rate", justify="right")
    table.add_row("last-level cache", f"{limits.cache_bytes / 2**20:.0f} MiB")
    table.add_row("read, at best", f"{limits.read_bytes / 1e9:.1f} GB/s")
    table.add_row("copy, read and written, at best", f"{limits.copy_bytes / 1e9:.1f} GB/s")
    for kind, rate in limits.peak_operations.items():
        table.add_row(f"multiply-add {kind}", f"{rate / 1e9:.0f} Gop/s")
    return table


def _products_table(case: str, results: Sequence[Judged]) -> Table:
    """Weights by number of rows: microseconds, and the share of the limit with what sets it."""
    table = Table(title=f"product, {case}", title_justify="left")
    table.add_column("weights")
    cells = {(r.measured.numbers, r.measured.num_rows): _cell(r) for r in results}
    counts = sorted({num_rows for _, num_rows in cells})
    for count in counts:
        table.add_column(f"{count} row{'s' if count > 1 else ''}", justify="right")
    for numbers in dict.fromkeys(numbers for numbers, _ in cells):
        table.add_row(numbers, *(cells.get((numbers, count), "-") for count in counts))
    table.caption = "µs at best; share of the limit: m what memory did meanwhile, c compute"
    table.caption_justify = "left"
    return table


def _cell(result: Judged) -> str:
    return f"{1e6 * result.measured.seconds:,.0f} {100 * result.ratio:4.0f} % {result.bound[0]}"


def _others_table(results: Sequence[Judged]) -> Table:
    table = Table(title="attention and rows", title_justify="left")
    table.add_column("case")
    table.add_column("numbers")
    for heading in ("µs", "GB/s", "memory GB/s", "Gop/s", "limit", "reached"):
        table.add_column(heading, justify="right")
    for result in results:
        timed = result.measured
        table.add_row(
            timed.case,
            timed.numbers,
            f"{1e6 * timed.seconds:,.0f}",
            f"{timed.moved_bytes / timed.median_s / 1e9:.1f}",
            f"{timed.memory_rate / 1e9:.1f}",
            f"{timed.operations / timed.seconds / 1e9:.0f}" if timed.operations else "-",
            result.bound,
            f"{100 * result.ratio:.0f} %",
        )
    return table
