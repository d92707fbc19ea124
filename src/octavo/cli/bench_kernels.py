"""`octavo bench kernels`: how near do the native kernels come to what this machine can do? See `octavo.roofline`."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.terminal import say
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.roofline.limits import Limits
    from octavo.roofline.measured import Judged, Measured
    from octavo.roofline.workbench import Workbench

PARTS = ("product", "attention", "rows", "torch")


def kernels(
    isa: Annotated[str, typer.Option(help="Instruction set of the kernels, as in `octavo serve`.")] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(help="Threads to compute with.", show_default="all CPUs this process may use", min=1),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds to measure each case.", min=0)] = 0.2,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Measure this part only: {', '.join(PARTS)}. May be repeated.",
            metavar="PART",
            show_default="all",
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write everything to this JSON file as well.", show_default="nowhere")
    ] = None,
) -> None:
    """Measure each native kernel against the limits of this machine.

    Limits are memory bandwidth and the rate of multiplications, measured in the same run. Needs no model.

    Example: octavo bench kernels --isa avx2 --only product --only torch
    """
    from octavo.bench.machine import this_machine
    from octavo.bench.record import check_writable, save_record
    from octavo.engine.machine import patient_threads, usable_cpus
    from octavo.kernels import library
    from octavo.kernels.machine import make_machine
    from octavo.roofline.disturbance import cpu_times, waited_ratio
    from octavo.roofline.report import print_report
    from octavo.roofline.workbench import make_workbench

    parts = _parts(only)
    if save is not None:
        check_writable(save)
    missing = library.missing()
    if missing is not None:
        raise ConfigError(f"there is nothing to measure: {missing}")
    about = this_machine()
    for name, value in patient_threads().items():
        os.environ.setdefault(name, value)  # before torch is imported, which reads it once
    machine = make_machine(threads or usable_cpus(), isa)
    say(f"measuring {machine.isa} with {machine.num_threads} threads, {seconds:g} s a case")
    before = cpu_times()
    limits, results = _measure(make_workbench(machine, seconds), parts)
    waited = waited_ratio(before, cpu_times())
    print_report(limits, results, waited)
    if save is not None:
        record: dict[str, Any] = {
            "format": 1,
            "machine": asdict(about),
            "isa": machine.isa,
            "num_threads": machine.num_threads,
            "seconds_a_case": seconds,
            "waited_ratio": waited,
            "limits": asdict(limits),
            "kernels": [
                {
                    **asdict(result.measured),
                    "multiplied_as": result.measured.multiplied_as.name.lower(),
                    "bound": result.bound,
                    "ratio": result.ratio,
                }
                for result in results
            ],
        }
        save_record(save, record)
        say(f"saved in {save}")


def _parts(only: list[str] | None) -> tuple[str, ...]:
    for part in only or ():
        if part not in PARTS:
            raise ConfigError(f"--only is {part!r}; there is: {', '.join(PARTS)}")
    return tuple(only) if only else PARTS


def _measure(bench: Workbench, parts: tuple[str, ...]) -> tuple[Limits, list[Judged]]:
    """Everything that was asked for, judged by the limits as they were measured before or after it."""
    from octavo.roofline.attention import measure_attention
    from octavo.roofline.limits import measure_limits
    from octavo.roofline.measured import judge
    from octavo.roofline.products import measure_products
    from octavo.roofline.rows import measure_rows
    from octavo.roofline.torch_gemm import measure_torch

    limits = measure_limits(bench)
    results: list[Measured] = []
    if "product" in parts:
        results += measure_products(bench)
    if "attention" in parts:
        results += measure_attention(bench)
    if "rows" in parts:
        results += measure_rows(bench)
    if "torch" in parts:
        results += measure_torch(bench)
    limits = limits.best_of(measure_limits(bench))
    return limits, [judge(result, limits) for result in results]
