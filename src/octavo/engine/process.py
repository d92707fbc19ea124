"""The engine process: the loop that owns the model, behind a socket.

    python -m octavo.engine.process ADDRESS PARENT      started by `link.py`, which sends the config as the first message

The loop sleeps in `poll` while there is no work (an idle server takes no CPU), takes in all messages that wait before each
step, and reports after each step. It ends when told to, when the process PARENT is gone, or when it fails; then
the last message, and the last line of its log, is the root cause.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
import traceback

import msgspec
import zmq

from octavo.engine.engine import Engine
from octavo.engine.messages import (
    Failed,
    Finish,
    FromEngine,
    Ready,
    SequenceUpdate,
    Start,
    StepReport,
    Stop,
    Submit,
    ToEngine,
)
from octavo.errors import OctavoError

logger = logging.getLogger(__name__)

# How often an idle loop looks whether its parent still lives.
_IDLE_POLL_MS = 1000


class EngineLoop:
    """Drives one engine from messages. `serve` returns when it is told to stop or its parent is gone.

    parent: id of the process that started this one. It may end while the model is loading, so it cannot be asked for here.
    """

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes], parent: int) -> None:
        self._engine = engine
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._parent = parent
        self._stopping = False

    def serve(self) -> None:
        # What exists now stays for good: spare the collector from walking through it with every generation.
        gc.collect()
        gc.freeze()
        reporting_s = 0.0
        while not self._stopping and os.getppid() == self._parent:
            if not self._engine.has_work and not self._socket.poll(_IDLE_POLL_MS):
                continue
            began = time.monotonic()
            updates = self._take_messages()
            host_s = None
            if self._engine.has_work:
                computed_s = self._engine.compute_s
                updates += self._engine.step(began)
                host_s = time.monotonic() - began + reporting_s - (self._engine.compute_s - computed_s)
            elif not updates:
                continue
            ended = time.monotonic()
            self._report(updates, host_s)
            reporting_s = time.monotonic() - ended

    def _take_messages(self) -> list[SequenceUpdate]:
        updates: list[SequenceUpdate] = []
        while self._socket.poll(0):
            updates += self._handle(self._decoder.decode(self._socket.recv()))
        return updates

    def _handle(self, message: ToEngine) -> list[SequenceUpdate]:
        match message:
            case Submit(requests):
                now = time.monotonic()
                return [update for request in requests for update in self._engine.submit(request, now)]
            case Finish(request_id, index, reason):
                return self._engine.finish(request_id, index, reason)
            case Stop():
                self._stopping = True
        return []

    def _report(self, updates: list[SequenceUpdate], host_s: float | None) -> None:
        report = StepReport(tuple(updates), self._engine.stats(), host_s)
        self._socket.send(self._encoder.encode(report))


def main(address: str, parent: int) -> int:
    """Run one engine until it is told to stop. Returns the exit code."""
    # Ctrl-C reaches the whole process group; when to stop is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.linger = 2000
    socket.connect(address)
    try:
        return _run(socket, parent)
    finally:
        socket.close()
        context.term()


def _run(socket: zmq.Socket[bytes], parent: int) -> int:
    try:
        while not socket.poll(_IDLE_POLL_MS):
            if os.getppid() != parent:
                return 1
        start = msgspec.msgpack.decode(socket.recv(), type=Start)
        logging.basicConfig(level=start.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        # Imported here, so that a process that only relays an error starts without torch.
        from octavo.engine.build import build_engine

        engine, facts = build_engine(start.config)
        _send(socket, Ready(facts))
        EngineLoop(engine, socket, parent).serve()
        return 0
    except Exception as e:
        if isinstance(e, OctavoError):
            _send(socket, Failed(e.message, e.code))
        else:
            traceback.print_exc()
            _send(socket, Failed(f"{type(e).__name__}: {e}"))
        return 1


def _send(socket: zmq.Socket[bytes], message: FromEngine) -> None:
    socket.send(msgspec.msgpack.encode(message))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
