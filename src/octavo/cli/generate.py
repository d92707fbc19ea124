"""`octavo generate`: complete prompts offline, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.offline import open_llm, refused_requests
from octavo.cli.options import EngineOptions, ModelOption, SamplingOptions
from octavo.cli.prompts import PromptLine, json_answers, read_prompts
from octavo.cli.terminal import say
from octavo.errors import ConfigError
from octavo.outputs import RequestOutput
from octavo.weights.locate import DEFAULT_MODEL

_PANEL = "Prompts and answers"


def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    model: ModelOption = DEFAULT_MODEL,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Text to continue; may be repeated.", rich_help_panel=_PANEL),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="One prompt a line; as .jsonl, an object a line with prompt or prompt_token_ids and its own"
            " max_tokens, temperature and so on. - reads stdin.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write answers as JSONL here instead of printing them.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="Answers for each prompt.", rich_help_panel=_PANEL)] = 1,
) -> None:
    """Complete one or many prompts and print the answers.

    Example: octavo generate -p "The capital of France is" --max-tokens 8
    """
    defaults = sampling.params(n=n, seed=engine.seed)
    lines = [PromptLine(text, defaults) for text in prompt or ()]
    if file is not None:
        lines += read_prompts(file, defaults)
    if not lines:
        raise ConfigError("there is nothing to complete; give --prompt TEXT or --file FILE")
    if output is not None:
        _check_writable(output)
    llm = open_llm(model, engine)
    with refused_requests():
        if output is None and len(lines) == 1 and lines[0].params.n == 1:
            for delta in llm.stream(lines[0].for_llm, lines[0].params):
                typer.echo(delta.text, nl=False)
            typer.echo()
            return
        prompts = [line.for_llm for line in lines]
        outputs = llm.generate(prompts, [line.params for line in lines], progress=len(lines) > 1)
    if output is None:
        _print_answers(outputs)
    else:
        _write_answers(output, lines, outputs)


def _print_answers(outputs: Sequence[RequestOutput]) -> None:
    """Answers with a heading each, as there are several."""
    for number, output in enumerate(outputs, 1):
        for sequence in output.outputs:
            of = f", answer {sequence.index + 1}" if len(output.outputs) > 1 else ""
            typer.echo(f"--- prompt {number}{of} ({sequence.finish_reason})")
            typer.echo(sequence.text)


def _write_answers(path: Path, lines: Sequence[PromptLine], outputs: Sequence[RequestOutput]) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(f"{answer}\n" for answer in json_answers(lines, outputs))
    except OSError as e:
        raise ConfigError(f"cannot write answers to {path}: {e.strerror}") from e
    say(f"{len(outputs)} answers in {path}")


def _check_writable(path: Path) -> None:
    """Find out before the work is done, not after."""
    try:
        path.open("a").close()
    except OSError as e:
        raise ConfigError(f"cannot write answers to {path}: {e.strerror}") from e
