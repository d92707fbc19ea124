"""The peer driver in `benchmarks/peers`: its table, its servers' ends, its static batches. No peer is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))


def spread(p50: float) -> dict[str, float]:
    return {"p50": p50, "p99": 2 * p50}


def record(peer: str, repeat: int, rate: float, *, errors: int = 0) -> dict[str, Any]:
    return {
        "label": peer,
        "case": "w3",
        "title": "one at a time",
        "repeat": repeat,
        "ready_s": 5.0 + repeat,
        "memory": {"peak_rss_bytes": 2**20 * 100 * repeat, "peak_pss_bytes": 0},
        "summary": {
            "num_ok": 3 - errors,
            "num_errors": errors,
            "num_doubtful": 0,
            "output_tokens_per_s": rate,
            "ttft_s": spread(0.25),
            "tpot_s": None if errors == 3 else spread(0.02),
        },
    }


def results(*runs: dict[str, Any]) -> dict[str, Any]:
    yardstick = {
        "load_average": 0.1,
        "linear_tflops": {name: {"1": 0.01, "2048": 0.5} for name in ("bfloat16", "float32")},
        "weights_gb_per_s": {"bfloat16": 20.0, "float32": 21.0},
        "copy_gb_per_s": 15.0,
    }
    machine = {
        "cpu": "A CPU",
        "cpu_features": ["avx2"],
        "num_cpus": 2,
        "memory_bytes": 2**34,
        "began": "2026-01-02T03:04:05",
        "python": "3.11",
        "command": "run.py run",
    }
    return {
        "machine": machine,
        "model": "tiny",
        "peers": {"octavo": "0.1", "other": "2.0"},
        "calibrations": [yardstick, yardstick],
        "runs": list(runs),
        "failures": [{"peer": "other", "repeat": 2, "error": "it ended\nwith a log"}],
    }


def test_table_has_every_repeat_and_the_ratio_to_the_best_other() -> None:
    from table import markdown

    page = markdown(
        results(
            record("octavo", 1, 30.0), record("other", 1, 20.0), record("octavo", 2, 40.0), record("other", 2, 0.0, errors=3)
        )
    )  # fmt: skip
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    assert rows["w3 output tokens/s"] == "| w3 output tokens/s | 30.0, 40.0 | 20.0 |"
    assert rows["start to ready, s"] == "| start to ready, s | 6.0, 7.0 | 6.0, 7.0 |"
    assert rows["highest resident memory, MiB"] == "| highest resident memory, MiB | 200 | 200 |"
    assert rows["w3 TPOT p99, ms"] == "| w3 TPOT p99, ms | 40.0, 40.0 | 40.0 |"
    assert rows["w3 requests that failed"] == "| w3 requests that failed | 0, 0 | 0, 3 |"
    assert "- w3: 1.75 (over other)" in page
    assert "**other** failed in repeat 2: it ended" in page


def test_cases_follow_the_order_and_the_rates_asked_for() -> None:
    from workloads import cases

    assert [case.key for case in cases(["w5", "w3"], [1.0, 2.5])] == ["w5@1", "w5@2.5", "w3"]
    assert all(case.file.exists() for case in cases(["w1", "w2", "w3", "w4", "w5", "w6"], [1.0]))


def test_static_batch_is_judged_like_a_stream() -> None:
    from measure import _outcome
    from octavo.bench.timing import tpot_s, ttft_s
    from workloads import cases

    at_once, one_by_one = cases(["w1", "w3"], [])
    entry = {"id": "a", "num_prompt_tokens": 5, "began_s": 2.0, "times_s": [[3.0, 3.5, 4.0]]}
    assert ttft_s(_outcome(entry, at_once)) == 3.0
    assert ttft_s(_outcome(entry, one_by_one)) == 1.0
    assert tpot_s(_outcome(entry, at_once)) == 0.5
    assert _outcome({**entry, "error": "not finished"}, at_once).error == "not finished"


def test_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    from peer import PeerError, Start
    from processes import free_port, running

    start = Start(command=[sys.executable, "-c", "import sys; sys.exit('no such model')"])
    with (
        pytest.raises(PeerError, match=r"(?s)the server ended with 1.*no such model"),
        running(start, free_port(), tmp_path / "log", timeout_s=30),
    ):
        pytest.fail("it was never ready")


def test_server_is_ready_when_it_answers_and_gone_afterwards(tmp_path: Path) -> None:
    from peer import Start
    from processes import free_port, running

    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    start = Start(command=command, ready_path="/")
    with running(start, port, tmp_path / "log", timeout_s=60) as server:
        assert Path(f"/proc/{server.pid}").exists()
        assert 0 < server.ready_s < 60
    assert not Path(f"/proc/{server.pid}").exists()


def test_peer_that_is_not_installed_says_how_to(tmp_path: Path) -> None:
    from peer import PeerError, Place
    from registry import PEERS as peers

    place = Place(venvs=tmp_path, gguf=tmp_path / "x.gguf", num_cpus=2)
    for name in ("vllm-cpu", "llama-cpp", "transformers"):
        with pytest.raises(PeerError, match=f"run.py install {name}"):
            peers[name].version(place)
