"""`serve`: an engine process, the HTTP server in front of it, and their common end.

    start   the engine process loads the model; what it found is printed; only then is the port opened for requests
    SIGTERM or Ctrl-C: new requests get 503, running ones may finish within the drain time, else get an error; exit code 0
    again:  exit now
    SIGTERM during the start: the engine process is ended, exit code 0

Source of the signal handling: uvicorn leaves it to a context manager of its server, which is replaced here because it would
raise the signal again after the shutdown and so spoil the exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
import uvloop
from fastapi import FastAPI

from octavo.config import EngineConfig
from octavo.engine.client import EngineClient
from octavo.errors import ConfigError
from octavo.outputs import EngineFacts
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from octavo.text.tokenizer import Tokenizer
from octavo.weights.tokenizer_files import prepare_tokenizer

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.05
# When draining is over: how long replies that have ended may take to reach their clients.
_LAST_WORDS_S = 2


def serve(config: EngineConfig, settings: ServerSettings, *, log_level: str = "INFO") -> None:
    """Serve until a signal ends it. Raises OctavoError with the root cause if it cannot start."""
    with (
        contextlib.suppress(asyncio.CancelledError),  # SIGTERM while starting
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(config, settings, log_level))


def startup_lines(facts: EngineFacts) -> list[str]:
    """What was found, for the reader of the terminal: one line a subject."""
    mib, gib = 2**20, 2**30
    pool_bytes = facts.num_blocks * facts.block_bytes
    full = facts.pool_tokens / facts.max_model_len
    lines = [
        f"model      {facts.model} ({facts.architecture}), {facts.dtype}, quantization {facts.quantization},"
        f" {facts.weight_bytes / mib:,.0f} MiB of weights",
        f"compute    {facts.attention_backend}{f' kernels for {facts.isa}' if facts.isa else ''},"
        f" {facts.num_threads} threads,"
        f" CPU {' '.join(facts.cpu_features) or 'without notable features'}",
        f"KV memory  {pool_bytes / gib:.2f} GiB in {facts.num_blocks:,} blocks of {facts.block_size} tokens"
        f" in {facts.kv_cache_dtype or facts.dtype} ({facts.block_bytes / 1024:,.0f} KiB each);"
        f" prefix cache {'on' if facts.prefix_caching else 'off'}; preemption {facts.preemption}"
        + (f" ({facts.num_host_blocks:,} host blocks)" if facts.num_host_blocks else ""),
        f"context    {facts.max_model_len:,} tokens; {full:.1f} full-length requests fit;"
        f" up to {facts.max_num_seqs} sequences and {facts.max_num_batched_tokens} tokens a step; policy {facts.policy}",
    ]
    if facts.note:
        lines.append(f"note       {facts.note}")
    if full < 1:
        lines.append(
            f"note       the pool holds {facts.pool_tokens:,} tokens, less than one full-length request;"
            " longer ones are refused: raise --kv-cache-gb"
        )
    return lines


class _Server(uvicorn.Server):
    """uvicorn's server with our signals: the first drains, the second ends at once; the exit code stays 0.

    While running requests finish, the door stays open, so that others get their 503; uvicorn alone would close it first.
    """

    def __init__(
        self, config: uvicorn.Config, app: FastAPI, drain_timeout_s: float, end_requests: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._octavo = app
        self._drain_timeout_s = drain_timeout_s
        self._end_requests = end_requests

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        deadline = time.monotonic() + self._drain_timeout_s
        while self.server_state.tasks and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        if self.server_state.tasks:
            logger.warning("requests that are still running get an error")
            self._end_requests()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        kept = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn forces an exit on a second Ctrl-C only; a second SIGTERM means the same.
        self.force_exit = self.force_exit or self.should_exit
        self.should_exit = True
        self._octavo.state.shutting_down = True
        if self.server_state.tasks and not self.force_exit:
            _say(
                f"stopping   running requests have {self._drain_timeout_s:.0f} s to finish; a second signal ends them now"
            )


async def _serve(config: EngineConfig, settings: ServerSettings, log_level: str) -> None:
    # Bound before the model is loaded: a port in use is known at once. Listening starts when there is an engine.
    with _named_address(settings):
        listener = _bind(settings)
    try:
        tokenizer = Tokenizer(prepare_tokenizer(config.model.path))
        with _cancelled_by_sigterm():
            engine = await EngineClient.start(
                config, tokenizer, log_level=log_level, stall_timeout_s=settings.stall_timeout_s
            )
    except BaseException:
        listener.close()
        raise
    try:
        with _named_address(settings):
            listener.listen()  # another server may have begun to listen meanwhile
        for line in startup_lines(engine.facts):
            _say(line)
        app = create_app(engine, settings)
        options = uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
        host, port = listener.getsockname()[:2]
        _say(f"ready      http://{host}:{port}/v1 after {engine.facts.load_s:.1f} s of loading")
        server = _Server(options, app, settings.drain_timeout_s, engine.end_requests)
        await server.serve([listener])
    finally:
        await engine.stop()


@contextlib.contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """Cancel the current task on SIGTERM, so that what it has started is ended as well."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _bind(settings: ServerSettings) -> socket.socket:
    family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((settings.host, settings.port))
    listener.set_inheritable(False)
    return listener


@contextlib.contextmanager
def _named_address(settings: ServerSettings) -> Iterator[None]:
    """Turn what the system says about an address into an error that names it."""
    try:
        yield
    except OSError as e:
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {e.strerror or e}; choose another --host or --port"
        ) from e


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
