"""What the user sees while something takes time. All on stderr, so that stdout holds nothing but answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def say(text: str) -> None:
    """One line on stderr."""
    typer.echo(text, err=True)


class ByteBars:
    """Bars for whatever is reported as (label, bytes done, bytes in all); each new label is a new bar.

    Nothing is drawn, or even imported, before the first report. Use as a context manager.
    """

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> ByteBars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, label: str, done: int, total: int) -> None:
        """Move the bar of `label`, drawing it if it is new."""
        if self._bars is None:
            self._bars = _byte_bars()
            self._bars.start()
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=total)
        self._bars.update(self._tasks[label], completed=done, total=total)


def find_model(name: str) -> Path:
    """The local path of a model; a hub name that is not here is pulled if the hub answers.

    Raises ModelUnavailableError, ModelFileError.
    """
    from octavo.weights.pull import locate_or_pull

    with ByteBars() as bars:
        return locate_or_pull(name, say=say, progress=bars.show)


def _byte_bars() -> Progress:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
