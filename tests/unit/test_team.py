"""The threads of a native machine: they end every phase, sleep when there is nothing to do, and go away."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from native_machines import ISAS
from octavo.errors import ConfigError
from octavo.kernels.library import load
from octavo.kernels.machine import make_machine
from packed_weights import F32, multiply, native, packed

ISA = ISAS[0]


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_thousands_of_tiny_products_in_a_row_end(threads: int) -> None:
    machine = load().make_machine(threads, ISA)
    weights = np.random.default_rng(1).integers(-3, 4, (40, 8)).astype(F32)
    m = native(machine, packed("float32", weights))
    out = np.empty((2, 40), F32)
    for i in range(2000):
        x = np.full((2, 8), i % 7, F32)
        load().multiply_rows(machine, m, x, out)
        # Sums of small whole numbers: what a thread did too early or not at all shows.
        assert out[1, 39] == i % 7 * weights[39].sum() and out[0, 0] == i % 7 * weights[0].sum()


def test_more_threads_than_work() -> None:
    machine = load().make_machine(16, ISA)
    m = native(machine, packed("float32", np.ones((1, 1), F32)))
    for _ in range(50):
        assert multiply(machine, m, np.full((1, 1), 3, F32), 1)[0, 0] == 3


def test_machines_are_made_and_thrown_away() -> None:
    before = num_threads()
    for _ in range(20):
        machine = load().make_machine(3, ISA)
        assert num_threads() == before + 2  # the caller is the third
        m = native(machine, packed("float32", np.eye(4, dtype=F32)))
        assert multiply(machine, m, np.ones((1, 4), F32), 4).sum() == 4
        del m, machine
        assert num_threads() == before


def test_machines_work_side_by_side() -> None:
    weights = np.random.default_rng(2).integers(-3, 4, (64, 32)).astype(F32)
    x = np.random.default_rng(3).integers(-3, 4, (20, 32)).astype(F32)

    def work(threads: int) -> bool:
        machine = load().make_machine(threads, ISA)
        m = native(machine, packed("float32", weights))
        return all(np.array_equal(multiply(machine, m, x, 64), x @ weights.T) for _ in range(200))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, [1, 2, 3]))


def test_python_runs_while_a_product_is_computed() -> None:
    """The interpreter lock is given up: another thread counts while one multiplies."""
    machine = load().make_machine(1, ISA)
    m = native(machine, packed("float32", np.ones((2000, 2000), F32)))
    x, out = np.ones((1500, 2000), F32), np.empty((1500, 2000), F32)
    began, ended = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        load().multiply_rows(machine, m, x, out)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    began.wait(10)
    turns = 0
    while not ended.is_set():
        turns += 1
        ended.wait(0.0005)
    thread.join()
    assert turns > 3 and (out == 2000).all()


def _seconds_of_idle_threads(ids: list[int]) -> float:
    ticks = 0
    for task in ids:
        fields = Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _asleep(task: int) -> bool:
    return Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_an_idle_machine_takes_no_cpu_time() -> None:
    before = {int(path.name) for path in Path("/proc/self/task").iterdir()}
    machine = load().make_machine(4, ISA)
    mine = sorted({int(path.name) for path in Path("/proc/self/task").iterdir()} - before)
    assert len(mine) == 3
    m = native(machine, packed("float32", np.ones((64, 64), F32)))
    multiply(machine, m, np.ones((4, 64), F32), 64)
    deadline = time.monotonic() + 30
    while not all(_asleep(task) for task in mine):
        assert time.monotonic() < deadline, "threads do not fall asleep"
    # From now on the caller alone is busy, for so long that a thread that spins would be seen.
    used, end = _seconds_of_idle_threads(mine), time.process_time() + 0.3
    while time.process_time() < end:
        pass
    # One of them may have been on its way from one sleep to the next.
    assert _seconds_of_idle_threads(mine) - used <= 0.03


def test_a_machine_tells_what_it_is() -> None:
    machine = make_machine(2, "portable")
    assert (machine.isa, machine.num_threads) == ("portable", 2)
    assert (machine.handle.isa, machine.handle.threads) == ("portable", 2)
    assert make_machine(1).isa == ISA
    with pytest.raises(ValueError, match="threads must be at least 1"):
        load().make_machine(0, ISA)
    with pytest.raises(ValueError, match="instruction set"):
        load().make_machine(1, "mmx")
    with pytest.raises(ConfigError, match="'mmx', which this CPU cannot run"):
        make_machine(1, "mmx")
