"""The link to an engine process: starting it, the socket to it, its last words, its end.

The socket lies in a private directory, so that no other user of the machine can connect. Messages are msgspec structs; what
arrives is decoded against their types and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from octavo.config import EngineConfig
from octavo.engine.machine import patient_threads
from octavo.engine.messages import Failed, FromEngine, Ready, Start, Stop, ToEngine
from octavo.errors import ConfigError, EngineDeadError, OctavoError
from octavo.outputs import EngineFacts

# After the process is gone, its last message may still be on its way.
_LAST_WORDS_S = 0.5
_STOP_TIMEOUT_S = 5.0


class EngineLink:
    """A running engine process. Made by `start_engine`; closed with `close`."""

    def __init__(
        self, folder: Path, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, process: Process
    ) -> None:
        self._folder = folder
        self._context = context
        self._socket = socket
        self._process = process
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine | Start) -> None:
        """Hand a message over. Never waits: what cannot go out yet is queued, in order, and dropped by `close`."""
        self._socket.send(self._encoder.encode(message))

    async def receive(self) -> FromEngine:
        data: bytes = await self._socket.recv()
        message: FromEngine = self._decoder.decode(data)
        return message

    async def ended(self) -> str:
        """Wait for the end of the process; returns how it ended, in words."""
        code = await self._process.wait()
        await asyncio.sleep(_LAST_WORDS_S)
        if code >= 0:
            return f"the engine process ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = "; was the machine out of memory?" if name == "SIGKILL" else ""
        return f"the engine process was ended by {name}{hint}"

    async def close(self) -> None:
        """End the process and give everything back."""
        if self._process.returncode is None:
            self.send(Stop())
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


async def start_engine(config: EngineConfig, log_level: str) -> tuple[EngineLink, EngineFacts]:
    """Start an engine process and wait until it is ready.

    Raises ConfigError for an option that does not fit, OctavoError for what else the user can mend (a bad model file),
    EngineDeadError with the root cause for anything else.
    """
    folder = Path(tempfile.mkdtemp(prefix="octavo-"))
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    address = f"ipc://{folder}/engine"
    socket.bind(address)
    # -P: a module that happens to lie in the working directory (a random.py, say) is not the one that the engine means.
    command = (sys.executable, "-P", "-m", "octavo.engine.process", address, str(os.getpid()))
    environment = {**patient_threads(), **os.environ}
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    link = EngineLink(folder, context, socket, process)
    try:
        link.send(Start(config, log_level))
        return link, await _first_words(link)
    except BaseException:
        await link.close()
        raise


async def _first_words(link: EngineLink) -> EngineFacts:
    words, end = asyncio.create_task(link.receive()), asyncio.create_task(link.ended())
    try:
        await asyncio.wait({words, end}, return_when=asyncio.FIRST_COMPLETED)
        if not words.done():
            raise EngineDeadError(f"{end.result()} while starting")
        message = words.result()
    finally:
        words.cancel()
        end.cancel()
    if isinstance(message, Ready):
        return message.facts
    assert isinstance(message, Failed), "the first message is Ready or Failed"
    if message.code == ConfigError.code:
        raise ConfigError(message.reason)
    if message.code is not None:
        raise OctavoError(message.reason, code=message.code)
    raise EngineDeadError(f"the engine could not start: {message.reason}")
