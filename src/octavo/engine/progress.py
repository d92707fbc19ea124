"""A progress bar for many prompts: requests done, tokens made, tokens per second."""

from __future__ import annotations

from types import TracebackType

from rich import progress as bars
from rich.console import Console


class Progress:
    """Shown on standard error while it is entered."""

    def __init__(self, num_requests: int) -> None:
        self._bar = bars.Progress(
            bars.TextColumn("requests"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.1f} tokens/s"),
            bars.TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("requests", total=num_requests, tokens=0, rate=0.0)
        self._tokens = 0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tokens(self, count: int) -> None:
        """Note new tokens."""
        self._tokens += count
        elapsed = self._bar.tasks[0].elapsed or 0.0
        self._bar.update(self._task, tokens=self._tokens, rate=self._tokens / elapsed if elapsed else 0.0)

    def request_done(self) -> None:
        """Note a finished request."""
        self._bar.advance(self._task)
