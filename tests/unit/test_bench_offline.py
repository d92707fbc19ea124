"""`octavo bench offline`: the workload through the offline API, steps timed. The model is a fake."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.bench.offline import run_offline
from octavo.bench.workload import WorkloadRequest
from octavo.cli.main import app
from octavo.engine.messages import EngineStats, SequenceUpdate
from octavo.errors import ConfigError, ContextLengthError
from octavo.sampling_params import SamplingParams

Run = Callable[..., Any]


@dataclass
class FakeEngine:
    """One token a step of every request; its numbers are those of an engine that has been at work before."""

    left: dict[str, int] = field(default_factory=dict)
    num_prompt_tokens: int = 1000
    num_dropped: int = 0

    @property
    def scheduler(self) -> Any:
        return SimpleNamespace(pool=SimpleNamespace(drop_idle=self._drop))

    def _drop(self) -> None:
        self.num_dropped += 1

    def stats(self) -> EngineStats:
        return EngineStats(
            prompt_tokens=self.num_prompt_tokens,
            prefix_hit_tokens=self.num_prompt_tokens // 2,
            preemptions_swap=self.num_prompt_tokens // 1001,
        )

    def step(self, now: float) -> list[SequenceUpdate]:
        updates = []
        for request_id in list(self.left):
            self.left[request_id] -= 1
            over = not self.left[request_id]
            updates.append(SequenceUpdate(request_id, 0, (7,), finish_reason="length" if over else None))
            if over:
                del self.left[request_id]
        return updates


class FakeLLM:
    def __init__(self) -> None:
        self.engine: Any = FakeEngine()
        self.asked: list[tuple[Any, SamplingParams]] = []
        self.stop_after: int | None = None
        self.failing: Exception | None = None

    def generate(self, prompts: Any, params: Any, *, progress: bool = False) -> list[Any]:
        if self.failing is not None:
            raise ValueError(str(self.failing)) from self.failing
        self.asked += zip(prompts, params, strict=True)
        engine = self.engine
        for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            engine.left[str(i)] = each.max_tokens
            engine.inner.num_prompt_tokens += len(
                prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
            )
        num_steps = 0
        while engine.left:
            if num_steps == self.stop_after:
                raise KeyboardInterrupt
            engine.step(0.0)
            num_steps += 1
        return []


def requests(*lengths: int) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(request_id=str(i), prompt_token_ids=(1, 2, 3), max_tokens=length)
        for i, length in enumerate(lengths)
    ]


def test_tokens_steps_and_counters_of_the_run_alone_are_counted() -> None:
    llm = FakeLLM()
    engine = llm.engine
    run = run_offline(llm, requests(2, 5))
    assert (run.num_sequences, run.num_ended, run.num_output_tokens, run.num_steps) == (2, 2, 7, 5)
    assert (run.num_prompt_tokens, run.num_cached_tokens, run.num_preemptions) == (6, 3, 1)
    assert run.output_tokens_per_s == pytest.approx(7 / run.wall_s)
    assert run.total_tokens_per_s == pytest.approx(13 / run.wall_s)
    assert run.step_s is not None and run.step_s.count == 5
    assert 0 < run.step_ratio <= 1
    assert llm.engine is engine, "the model has its own engine back"
    assert llm.asked[0] == (
        {"prompt_token_ids": [1, 2, 3]},
        SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
    )


def test_being_cut_off_keeps_what_was_done() -> None:
    llm = FakeLLM()
    llm.stop_after = 3
    run = run_offline(llm, requests(2, 5))
    assert run.interrupted
    assert (run.num_ended, run.num_output_tokens, run.num_steps) == (1, 5, 3)


def test_extra_body_must_be_a_sampling_parameter() -> None:
    [request] = requests(1)
    fields = {"request_id": "a", "prompt_token_ids": (1,), "max_tokens": 1}
    llm = FakeLLM()
    run_offline(llm, [WorkloadRequest(**fields, extra_body={"top_k": 3})])
    assert llm.asked[0][1].top_k == 3
    with pytest.raises(ConfigError, match="extra_body of request a"):
        run_offline(llm, [request, WorkloadRequest(**fields, extra_body={"mirostat": 2})])


# --- the command


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    module = ModuleType("octavo.llm")
    module.LLM = SimpleNamespace(from_config=lambda config: fake)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "octavo.llm", module)
    return fake


@pytest.fixture
def bench(tmp_path: Path) -> Run:
    (tmp_path / "tiny").mkdir()

    def invoke(*args: str) -> Any:
        flags = ["--num-requests", "3", "--input-len", "4", "--output-len", "2"]
        return CliRunner().invoke(app, ["bench", "offline", str(tmp_path / "tiny"), *flags, *args])

    return invoke


def test_repeats_are_measured_shown_and_saved(bench: Run, llm: FakeLLM, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    result = bench("--repeats", "2", "--warmup", "1", "--fresh-cache", "--save", str(file))
    assert result.exit_code == 0, result.output
    assert "output tokens/s" in result.stdout and "ms per step" in result.stdout
    record = json.loads(file.read_text())
    assert [(run["repeat"], run["num_output_tokens"]) for run in record["runs"]] == [(1, 6), (2, 6)]
    assert len(llm.asked) == 1 + 2 * 3
    assert llm.engine.num_dropped == 2


def test_ctrl_c_shows_what_was_measured_and_exits_with_130(bench: Run, llm: FakeLLM) -> None:
    llm.stop_after = 1
    result = bench("--repeats", "5")
    assert result.exit_code == 130
    assert "interrupted" in result.stdout and result.stdout.count("offline, run") == 1


def test_request_that_cannot_be_served_is_one_line(bench: Run, llm: FakeLLM) -> None:
    llm.failing = ContextLengthError("prompt has 4 tokens; the limit is 3")
    result = bench()
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "error: prompt has 4 tokens; the limit is 3"


@pytest.mark.parametrize("command", ["serve", "offline"])
def test_help_describes_the_options(command: str) -> None:
    result = CliRunner().invoke(app, ["bench", command, "--help"])
    assert result.exit_code == 0
    assert "--workload" in result.stdout and "--fresh-cache" in result.stdout
    assert ("--max-model-len" in result.stdout) == (command == "offline")
