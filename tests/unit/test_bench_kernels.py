"""`octavo bench kernels`: everything is measured and judged, in the tables and in the file. Not: how fast it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.kernels import library
from octavo.kernels.packed import Format
from octavo.roofline import attention, products, rows, torch_gemm, workbench
from octavo.roofline.disturbance import CpuTimes, cpu_times, waited_ratio
from octavo.roofline.limits import Limits
from octavo.roofline.measured import judge, summarise
from octavo.roofline.report import print_report
from octavo.roofline.workbench import last_level_cache_bytes

needs_kernels = pytest.mark.skipif(library.missing() is not None, reason="the native kernels are not built")

SHAPES = (products.Shape("gated", 96, 2 * 80, gated=True), products.Shape("plain", 64, 72))
STEPS = (
    attention.Step("decode", 1, 1, 160),
    attention.Step("shared", 3, 1, 16, 128),
    attention.Step("prefill", 1, 32, 48),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same measurements on little matrices and a cache that is soon full."""
    for module in (products, torch_gemm):
        monkeypatch.setattr(module, "SHAPES", SHAPES)
        monkeypatch.setattr(module, "NUM_ROWS", (1, 5))
    monkeypatch.setattr(attention, "STEPS", STEPS)
    monkeypatch.setattr(rows, "_WIDTHS", (96,))
    monkeypatch.setattr(workbench, "last_level_cache_bytes", lambda: 2**20)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "kernels", "--seconds", "0.001", *arguments])


@needs_kernels
@pytest.mark.parametrize("isa", library.instruction_sets() if library.missing() is None else ())
def test_every_kernel_is_measured_and_judged(small: None, isa: str, tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    done = run("--isa", isa, "--threads", "2", "--save", str(file))
    assert done.exit_code == 0, done.output
    for text in ("product, gated", "product, plain", "4-bit groups", "decode", "rotate q and k", "copy"):
        assert text in done.output
    record = json.loads(file.read_text())
    assert record["isa"] == isa and record["num_threads"] == 2 and record["machine"]["cpu"]
    assert set(record["limits"]["peak_operations"]) == {"float32", "bfloat16", "int8"}
    assert min(record["limits"]["peak_operations"].values()) > 0
    assert record["limits"]["read_bytes"] > 0 and record["limits"]["copy_bytes"] > 0
    measured = {(k["kernel"], k["case"], k["numbers"], k["num_rows"]): k for k in record["kernels"]}
    assert len(measured) == len(record["kernels"])
    for numbers, *_ in products.FORMATS:
        for shape in SHAPES:
            for num_rows in (1, 5):
                product = measured["product", shape.name, numbers, num_rows]
                assert product["operations"] == 2 * num_rows * shape.inputs * shape.outputs
    assert sum(key[0] == "attention" for key in measured) == len(STEPS) * len(attention.NUMBERS)
    assert {key[0] for key in measured} == {"product", "attention", "norm", "rotation"}
    for kernel in record["kernels"]:
        assert 0 < kernel["seconds"] <= kernel["median_s"] and kernel["num_rounds"] > 0
        assert kernel["bound"] in ("memory", "compute")
        assert kernel["ratio"] > 0 and kernel["memory_rate"] > 0


@needs_kernels
def test_parts_can_be_left_out(small: None) -> None:
    done = run("--only", "attention")
    assert done.exit_code == 0 and "decode" in done.output and "product" not in done.output


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    for arguments, text in (
        (("--only", "everything"), "product, attention, rows, torch"),
        (("--isa", "sse9"), "sse9"),
        (("--save", str(tmp_path / "no" / "file.json")), "cannot write"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2 and text in done.output, done.output


@needs_kernels
def test_tiles_are_multiplied_too() -> None:
    """The limit of AMX, in software: its instructions are used as they must be, or the process would end."""
    native = library.load()
    try:
        machine = native.make_machine(1, "amx_emulated")
    except ValueError:
        pytest.skip("this CPU cannot emulate tiles")
    for kind in (Format.BFLOAT16, Format.INT8):
        assert min(native.peak_rates(machine, int(kind), 0.0)) > 0


def test_tables_name_shared_blocks_and_own_ones() -> None:
    items = attention._items(attention.Step("", 3, 1, 32, 64))
    assert [start for start, _, _ in items] == [95, 95, 95]
    tables = [table for _, _, table in items]
    assert all(len(table) == 6 for table in tables)
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert sorted({block for table in tables for block in table}) == list(range(10))


def test_caches_of_all_cpus_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    for cpu, shared_by in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        for index, level, size, sharing in ((0, 1, "32K", str(cpu)), (3, 3, "16384K", shared_by)):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text(f"{sharing}\n")
    assert last_level_cache_bytes(tmp_path) == 2 * 2**24
    assert last_level_cache_bytes(tmp_path / "nothing") == 2**26


def test_the_limit_that_is_reached_first_counts() -> None:
    machine = Limits(1, 99.0, 99.0, {"float32": 2.0, "bfloat16": 4.0, "int8": 8.0})
    rounds = ([8.0, 16.0, 32.0], [10.0, 5.0, 1.0])
    memory = judge(summarise("product", "", "", 1, rounds, moved_bytes=40, operations=2), machine)
    assert (memory.bound, memory.ratio) == ("memory", 40 / 5.0 / 16.0)
    grouped = summarise(
        "product", "", "", 1, rounds, per_round=2, moved_bytes=10, operations=16, multiplied_as=Format.GROUP4
    )
    assert (grouped.seconds, grouped.median_s, grouped.num_rounds) == (4.0, 8.0, 3)
    assert (judge(grouped, machine).bound, judge(grouped, machine).ratio) == ("compute", 16 / 8.0 / 4.0)


def test_a_busy_machine_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine = Limits(1, 1.0, 1.0, {"float32": 1.0, "bfloat16": 1.0, "int8": 1.0})
    print_report(machine, [], 0.38)
    assert "38 % of the time" in capsys.readouterr().out
    print_report(machine, [], None)
    assert "other programs" not in capsys.readouterr().out
    assert cpu_times(tmp_path / "nothing") is None and waited_ratio(None, CpuTimes(1, 1)) is None
