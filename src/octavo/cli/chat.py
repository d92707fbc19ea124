"""`octavo chat`: a conversation in the terminal, or with a pipe as its other end.

Ctrl-C stops the answer that is being written and keeps what there is of it; the engine is only ever left between two
steps, so it stays whole. Ctrl-D or /quit ends. A line that begins with a slash is a command.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.command import report_error
from octavo.cli.offline import open_llm, refused_requests
from octavo.cli.options import EngineOptions, ModelOption, SamplingOptions
from octavo.cli.terminal import say
from octavo.errors import ConfigError, EngineDeadError, OctavoError
from octavo.sampling_params import SamplingParams
from octavo.weights.locate import DEFAULT_MODEL

if TYPE_CHECKING:
    from octavo.llm import LLM

_HELP = """\
/system TEXT   begin anew with TEXT as system prompt (without TEXT: with none)
/reset         forget the conversation, keep the system prompt
/quit          end (also Ctrl-D)
Ctrl-C         stop the answer that is being written"""


def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    model: ModelOption = DEFAULT_MODEL,
    system: Annotated[str, typer.Option(help="System prompt to begin with.", show_default=False)] = "",
) -> None:
    """Chat with a model in the terminal.

    /help lists what can be typed. Works in a pipe too: one line in, one answer out.
    """
    params = sampling.params(seed=engine.seed)
    llm = open_llm(model, engine)
    Conversation(llm, params, system=system).run()


@dataclass
class Conversation:
    """A chat with its history. Written by its own methods only."""

    llm: LLM
    params: SamplingParams
    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> None:
        """Read lines and answer them until the input ends. Raises EngineDeadError if the engine does."""
        interactive = sys.stdin.isatty()
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() a history and line editing)
            say("Type a message, or /help.")
        while (line := _read_line(interactive)) is not None:
            text = line.strip()
            if text in ("/quit", "/exit"):
                return
            if text.startswith("/"):
                self._obey(text)
            elif text:
                self._answer(text, interactive)

    def _obey(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        if word == "/reset":
            self.turns.clear()
            say("The conversation is forgotten.")
        elif word == "/system":
            self.system = rest.strip()
            self.turns.clear()
            say("A new conversation begins" + (" with that system prompt." if self.system else "."))
        else:
            say(_HELP if word == "/help" else f"unknown command {word}\n{_HELP}")

    def _answer(self, text: str, interactive: bool) -> None:
        self.turns.append({"role": "user", "content": text})
        head = [{"role": "system", "content": self.system}] if self.system else []
        started_s = time.monotonic()
        pieces: list[str] = []
        num_tokens = 0
        try:
            with refused_requests():
                for delta in _until_interrupted(self.llm.stream_chat([*head, *self.turns], self.params)):
                    pieces.append(delta.text)
                    num_tokens += len(delta.token_ids)
                    typer.echo(delta.text, nl=False)
        except EngineDeadError:
            raise
        except OctavoError as e:
            # One message that cannot be answered, say because the context is full, does not end the talk.
            self.turns.pop()
            report_error(e)
            return
        typer.echo()
        answer = "".join(pieces)
        if answer:
            self.turns.append({"role": "assistant", "content": answer})
        else:
            self.turns.pop()
        if interactive:
            rate = num_tokens / max(time.monotonic() - started_s, 1e-9)
            typer.secho(f"[{num_tokens} tokens, {rate:.1f} tokens/s]", err=True, dim=True)


def _read_line(interactive: bool) -> str | None:
    """The next line, or None at the end of the input. Raises ConfigError for input that is not text."""
    try:
        return _typed_line() if interactive else sys.stdin.readline() or None
    except UnicodeDecodeError as e:
        raise ConfigError(f"the input is not text: {e}; send {e.encoding}") from e


def _typed_line() -> str | None:
    while True:
        try:
            return input("> ")
        except EOFError:
            say("")
            return None
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /quit ends)")


def _until_interrupted(deltas: Iterator[Any]) -> Iterator[Any]:
    """Pass deltas on until Ctrl-C. The signal only sets a mark, so that no step of the engine is torn apart.

    A second Ctrl-C interrupts at once.
    """
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        for delta in deltas:
            yield delta
            if pressed:
                break
    finally:
        signal.signal(signal.SIGINT, before)
        close = getattr(deltas, "close", None)
        if close is not None:
            close()
