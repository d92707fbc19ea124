"""`octavo generate` and `octavo chat`: answers go to stdout, everything else to stderr. The model is a fake."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.cli.chat import Conversation, _until_interrupted
from octavo.cli.main import app
from octavo.config import EngineConfig
from octavo.errors import ContextLengthError, EngineDeadError, OctavoError, ValidationError
from octavo.outputs import CompletionOutput, RequestDelta, RequestOutput
from octavo.sampling_params import SamplingParams

Run = Callable[..., Any]


@pytest.fixture
def run() -> Run:
    def invoke(*args: str, stdin: str | bytes = "") -> Any:
        return CliRunner().invoke(app, list(args), input=stdin)

    return invoke


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "tiny").mkdir()
    return str(tmp_path / "tiny")


class FakeLLM:
    """Repeats its prompt in capitals, a word at a time."""

    def __init__(self) -> None:
        self.config: EngineConfig | None = None
        self.asked: list[Any] = []
        self.params: list[SamplingParams] = []
        self.failing: OctavoError | None = None
        self.cancelled = False

    def generate(
        self, prompts: list[Any], params: list[SamplingParams], *, progress: bool
    ) -> list[RequestOutput]:
        self.asked, self.params = prompts, params
        return [
            RequestOutput(
                request_id=str(i),
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=[1, 2, 3],
                outputs=[CompletionOutput(k, str(prompt).upper(), [7], None, "length") for k in range(p.n)],
            )
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        ]

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[RequestDelta]:
        self.asked.append(prompt)
        self.params.append(params)
        if isinstance(self.failing, ValidationError):
            raise ValueError(self.failing.message) from self.failing
        if self.failing is not None:
            raise self.failing
        try:
            for word in str(prompt).upper().split():
                yield RequestDelta(0, f"{word} ", (7,))
        finally:
            self.cancelled = True

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[RequestDelta]:
        self.asked.append([dict(message) for message in messages])
        yield from self.stream(messages[-1]["content"], params)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    module = ModuleType("octavo.llm")

    class LLM:
        @staticmethod
        def from_config(config: EngineConfig) -> FakeLLM:
            fake.config = config
            return fake

    module.LLM = LLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "octavo.llm", module)
    return fake


# --- generate


def test_single_prompt_is_streamed_to_stdout(run: Run, llm: FakeLLM, model: str) -> None:
    result = run("generate", "-p", "hello there", "--model", model, "--max-tokens", "5", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert result.stdout == "HELLO THERE \n"
    assert llm.params == [SamplingParams(max_tokens=5, temperature=0.0, seed=3)]


def test_several_prompts_are_printed_in_order_under_headings(run: Run, llm: FakeLLM, model: str) -> None:
    result = run("generate", "-p", "one", "-p", "two", "-m", model, "--n", "2", "--temperature", "1")
    lines = result.stdout.splitlines()
    assert [line for line in lines if not line.startswith("---")] == ["ONE", "ONE", "TWO", "TWO"]
    assert lines[0] == "--- prompt 1, answer 1 (length)"


def test_file_of_lines_and_output_as_jsonl(run: Run, llm: FakeLLM, model: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\r\n\n  two {not json}\n", encoding="utf-8")
    out = tmp_path / "out.jsonl"
    result = run("generate", "-f", str(tmp_path / "in.txt"), "-o", str(out), "-m", model)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert llm.asked == ["one", "  two {not json}"]
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [answer["prompt"] for answer in answers] == llm.asked
    assert answers[0]["outputs"] == [
        {"index": 0, "text": "ONE", "token_ids": [7], "finish_reason": "length", "stop_reason": None}
    ]


def test_jsonl_lines_have_their_own_parameters(run: Run, llm: FakeLLM, model: str, tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "max_tokens": 3, "id": "first"},
        {"prompt_token_ids": [5, 6], "temperature": 0.5, "logit_bias": {"9": 1}},
    ]
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert run("generate", "-f", str(file), "-o", str(out), "-m", model, "--max-tokens", "9").exit_code == 0
    assert llm.asked == ["a", {"prompt_token_ids": [5, 6]}]
    assert [params.max_tokens for params in llm.params] == [3, 9]
    assert llm.params[1].logit_bias == {9: 1}
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert answers[0]["id"] == "first"
    assert answers[1]["prompt_token_ids"] == [5, 6]


def test_jsonl_may_come_from_stdin(run: Run, llm: FakeLLM, model: str) -> None:
    assert run("generate", "-f", "-", "-m", model, stdin='{"prompt": "a"}\n{"prompt": "b"}\n').exit_code == 0
    assert llm.asked == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ('{"prompt": "a", "max_token": 3}', "unknown field 'max_token'"),
        ('{"max_tokens": 3}', "either prompt or prompt_token_ids"),
        ('{"prompt": 3}', "must be a string"),
        ('{"prompt_token_ids": [1, true]}', "list of integers"),
        ('{"prompt": "a", "temperature": -1}', "temperature is -1"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "wrong kind"),
        ('{"prompt": "a", "stop": 3}', "stop is a int"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_jsonl_line_is_named_with_its_number(
    run: Run, llm: FakeLLM, model: str, tmp_path: Path, line: str, message: str
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    result = run("generate", "-f", str(file), "-m", model)
    assert result.exit_code == 2
    assert f"{file}:3: " in result.stderr
    assert message in result.stderr
    assert llm.config is None


@pytest.mark.parametrize("flags", ["--top-p 0", "--temperature nan", "--n 0", "--max-tokens -1"])
def test_bad_sampling_flag_exits_with_2(run: Run, llm: FakeLLM, model: str, flags: str) -> None:
    result = run("generate", "-p", "x", "-m", model, *flags.split())
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def test_generate_without_prompts_says_how_to_give_them(run: Run, llm: FakeLLM, model: str) -> None:
    result = run("generate", "-m", model)
    assert result.exit_code == 2
    assert "--prompt TEXT" in result.stderr


def test_output_that_cannot_be_written_is_found_out_before_the_work(
    run: Run, llm: FakeLLM, model: str
) -> None:
    result = run("generate", "-p", "x", "-o", "/no/such/folder/out.jsonl", "-m", model)
    assert result.exit_code == 2
    assert llm.config is None


def test_request_that_can_never_be_served_is_one_line(run: Run, llm: FakeLLM, model: str) -> None:
    llm.failing = ContextLengthError("prompt has 9 tokens;\nthe limit is 4")
    result = run("generate", "-p", "x", "-m", model)
    assert result.exit_code == 1
    assert result.stderr == "error: prompt has 9 tokens; the limit is 4\n"


# --- chat


def test_chat_in_a_pipe_answers_each_line_and_remembers(run: Run, llm: FakeLLM, model: str) -> None:
    result = run("chat", "-m", model, stdin="hi there\nand you\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "HI THERE \nAND YOU \n"
    assert [message["role"] for message in llm.asked[2]] == ["user", "assistant", "user"]
    assert llm.asked[2][1]["content"] == "HI THERE "


def test_input_that_is_not_text_ends_the_chat_with_one_line(run: Run, llm: FakeLLM, model: str) -> None:
    result = run("chat", "-m", model, stdin=b"hi\n\xff\xfe\n")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and "utf-8" in result.stderr


def test_chat_commands_change_the_conversation(run: Run, llm: FakeLLM, model: str) -> None:
    script = "one\n/reset\ntwo\n/system be brief\nthree\n/bogus\n/quit\nnever\n"
    result = run("chat", "-m", model, stdin=script)
    assert result.exit_code == 0
    assert "unknown command /bogus" in result.stderr
    histories = [asked for asked in llm.asked if isinstance(asked, list)]
    assert histories[1] == [{"role": "user", "content": "two"}]
    assert histories[2] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "three"}]
    assert len(histories) == 3


def test_message_that_cannot_be_answered_does_not_end_the_chat(
    llm: FakeLLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    talk = Conversation(llm, SamplingParams())  # type: ignore[arg-type]
    llm.failing = ContextLengthError("too long")
    talk._answer("much", interactive=False)
    assert talk.turns == []
    assert capsys.readouterr().err == "error: too long\n"
    llm.failing = EngineDeadError("gone")
    with pytest.raises(EngineDeadError):
        talk._answer("again", interactive=False)


def test_ctrl_c_ends_the_answer_between_two_deltas_and_cancels_it() -> None:
    fake = FakeLLM()
    seen = []
    before = signal.getsignal(signal.SIGINT)
    for delta in _until_interrupted(fake.stream("a b c d", SamplingParams())):
        seen.append(delta.text)
        if delta.text == "B ":
            os.kill(os.getpid(), signal.SIGINT)
    assert seen == ["A ", "B "]
    assert fake.cancelled
    assert signal.getsignal(signal.SIGINT) is before
