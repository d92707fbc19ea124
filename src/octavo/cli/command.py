"""What every command has in common: options in groups, flags that take several values, errors in one line.

A command takes whole groups of options as dataclasses instead of twenty parameters:

    @command
    def serve(model: ModelArgument, engine: EngineOptions, server: ServerOptions) -> None: ...

`command` shows typer a signature in which each group is replaced by its fields, and puts the groups together
again when the command runs. It is also the one place that turns errors into exit codes: 2 for options that
cannot be used, 1 for all else that a user can cause, 130 for Ctrl-C. Tracebacks come only with
`--log-level debug`.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import sys
import traceback
import typing
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand

from octavo.errors import ConfigError, OctavoError

# Flags that take one or more values after one mention, as in `--served-model-name alpha beta`.
SPREAD_FLAGS = ("--served-model-name", "--allowed-origins", "--rate", "--compare", "--server-pid")


class SpreadCommand(TyperCommand):
    """A command whose SPREAD_FLAGS may be followed by several values or be repeated, which means the same."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_repeat_flags(args)))


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a typer command of `function`: expand its option groups, report its errors."""
    signature = inspect.signature(function, eval_str=True)
    groups = {name: p.annotation for name, p in signature.parameters.items() if _is_group(p.annotation)}
    parameters = list(_expanded(signature))

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(
                **{field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            )
        with_reported_errors(lambda: function(**values))

    # What typer reads. Not functools.wraps: its link to the original would lead typer to the unexpanded one.
    run.__name__, run.__doc__, run.__module__ = function.__name__, function.__doc__, function.__module__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def with_reported_errors(action: Callable[[], None]) -> None:
    """Run `action`; on an error that a user can cause write one line to stderr. Raises typer.Exit then."""
    try:
        action()
    except OctavoError as e:
        report_error(e)
        raise typer.Exit(2 if isinstance(e, ConfigError) else 1) from e
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # The reader of our output has seen enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None


def report_error(error: OctavoError) -> None:
    """`error: ...` on stderr, in one line whatever the message holds; with a traceback if debugging."""
    if logging.getLogger("octavo").isEnabledFor(logging.DEBUG):
        typer.echo("".join(traceback.format_exception(error)), err=True)
    typer.echo(f"error: {' '.join(str(error).split())}", err=True)


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _expanded(signature: inspect.Signature) -> Iterator[inspect.Parameter]:
    for parameter in signature.parameters.values():
        if not _is_group(parameter.annotation):
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            continue
        hints = typing.get_type_hints(parameter.annotation, include_extras=True)
        for field in dataclasses.fields(parameter.annotation):
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )


def _repeat_flags(args: list[str]) -> Iterator[str]:
    """`--flag a b` as `--flag a --flag b`. A value that begins with a dash ends the list."""
    flag: str | None = None
    first = True
    for arg in args:
        if arg.startswith("-"):
            flag, first = (arg if arg in SPREAD_FLAGS else None), True
        elif flag is not None:
            if not first:
                yield flag
            first = False
        yield arg
