"""The async face of an engine process: starts it, sends it requests, and hands each request its own stream of deltas.

    generate() --Submit--> engine process --StepReport--> receive loop --queue of the request--> generate() yields deltas

Whatever ends a `generate` early (the consumer closes it, a task is cancelled, a stop string is seen) tells the engine, which
frees the blocks before its next step. If the engine process dies, every request in flight gets the root cause at once.

This process imports no torch: it tokenises, watches and relays.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from octavo.config import EngineConfig
from octavo.engine.messages import (
    EngineStats,
    Failed,
    Finish,
    FromEngine,
    GenerateRequest,
    Ready,
    SequenceUpdate,
    StepReport,
    Stop,
    Submit,
)
from octavo.engine.metrics import Metrics, RequestTimer
from octavo.engine.process import Start
from octavo.engine.streams import RequestStream, with_special_stops
from octavo.errors import ConfigError, EngineDeadError, OctavoError
from octavo.outputs import EngineFacts, RequestDelta
from octavo.scheduler.limits import Limits, check_request
from octavo.text.chat_template import ChatPrompt, render_chat
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_Queue = asyncio.Queue[SequenceUpdate | EngineDeadError]


class EngineClient:
    """One engine process and everything needed to talk to it. Make it with `start`.

    facts: what the engine found at start. stats: its latest report. stall_timeout_s: without a step for so long while
    there is work, `health` says so.
    """

    def __init__(self, tokenizer: Tokenizer, stall_timeout_s: float = 60.0) -> None:
        self.tokenizer = tokenizer
        self.metrics = Metrics()
        self.stats = EngineStats()
        self.facts: EngineFacts
        self._limits: Limits
        self._stall_timeout_s = stall_timeout_s
        self._queues: dict[str, _Queue] = {}
        self._dead: EngineDeadError | None = None
        self._closing = False
        self._last_news = time.monotonic()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._tasks: list[asyncio.Task[None]] = []

    # -- life

    @classmethod
    async def start(
        cls, config: EngineConfig, tokenizer: Tokenizer, *, log_level: str = "INFO", stall_timeout_s: float = 60.0
    ) -> EngineClient:
        """Start an engine process and wait until it is ready.

        Raises ConfigError for what the user can mend (a bad model file, an option that does not fit), EngineDeadError with
        the root cause for anything else.
        """
        client = cls(tokenizer, stall_timeout_s)
        # A private directory: nobody else on this machine can connect.
        client._folder = Path(tempfile.mkdtemp(prefix="octavo-"))
        address = f"ipc://{client._folder}/engine"
        client._context = zmq.asyncio.Context()
        client._socket = client._context.socket(zmq.PAIR)
        client._socket.set_hwm(0)
        client._socket.linger = 0
        client._socket.bind(address)
        client._process = await asyncio.create_subprocess_exec(sys.executable, "-m", "octavo.engine.process", address)
        try:
            await client._socket.send(client._encoder.encode(Start(config, log_level)))
            client._set_facts(await client._first_message())
        except BaseException:
            await client.stop()
            raise
        client._tasks = [asyncio.create_task(client._receive()), asyncio.create_task(client._watch_process())]
        return client

    async def stop(self) -> None:
        """Stop the engine process and give back everything. Requests still in flight get an error."""
        self._closing = True
        self._fail_all(EngineDeadError("the server is stopping; send the request again"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process.returncode is None:
            await self._socket.send(self._encoder.encode(Stop()))
            try:
                await asyncio.wait_for(self._process.wait(), 5)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._socket.close()
        self._context.term()
        self._pool.shutdown(wait=False, cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def health(self) -> str | None:
        """None if all is well, otherwise why not, in one line."""
        if self._dead is not None:
            return self._dead.message
        silence = time.monotonic() - self._last_news
        if self._queues and silence > self._stall_timeout_s:
            return f"the engine has work but has finished no step for {silence:.0f} s"
        return None

    # -- requests

    def check(self, request: GenerateRequest) -> GenerateRequest:
        """Refuse what can never be served; returns the request with max_tokens resolved.

        Raises ValidationError or ContextLengthError, EngineDeadError if there is no engine to serve it.
        """
        if self._dead is not None:
            raise EngineDeadError(self._dead.message)
        params = check_request(request.prompt_token_ids, request.params, self._limits)
        return with_special_stops(replace(request, params=params), self.tokenizer)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestDelta]:
        """Yield the deltas of all sequences of a request until each has a finish_reason.

        Closing the iterator early aborts the request. Raises what `check` raises, before anything runs; EngineDeadError if
        the engine dies on the way, OctavoError if this request alone fails.
        """
        request = self.check(request)
        stream = RequestStream(request, self.tokenizer)
        timer = RequestTimer(self.metrics, time.monotonic(), len(request.prompt_token_ids))
        queue: _Queue = asyncio.Queue()
        if not self._queues:
            self._last_news = time.monotonic()  # an idle engine reports nothing: the clock starts now
        self._queues[request.request_id] = queue
        try:
            await self._socket.send(self._encoder.encode(Submit((request,))))
            while not stream.finished:
                update = await queue.get()
                if isinstance(update, EngineDeadError):
                    raise EngineDeadError(update.message)
                delta = self._take(update, stream, timer)
                if delta is not None:
                    if delta.finish_reason is not None and update.finish_reason is None:
                        self._tell_finish(request.request_id, update.index, "stop")
                    yield delta
        finally:
            del self._queues[request.request_id]
            if not stream.finished:
                self._tell_finish(request.request_id, None, "abort")

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, worked out in a thread so that a long one stalls nobody."""
        return await self._in_thread(lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def render_chat(self, messages: Any, **options: Any) -> ChatPrompt:
        """Text and token ids of a conversation, worked out in a thread. Raises ValidationError."""
        return await self._in_thread(lambda: render_chat(self.tokenizer, messages, **options))

    # -- inside

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _take(self, update: SequenceUpdate, stream: RequestStream, timer: RequestTimer) -> RequestDelta | None:
        if update.error is not None:
            raise OctavoError(update.error, code="request_failed")
        delta = stream.feed(update)
        if delta is not None:
            now = time.monotonic()
            timer.tokens(len(delta.token_ids), now, delta.index)
            if stream.finished:
                timer.finished(delta.finish_reason or "stop", now)
        return delta

    def _tell_finish(self, request_id: str, index: int | None, reason: str) -> None:
        if self._dead is None and not self._closing:
            message = self._encoder.encode(Finish(request_id, index, reason))
            # PAIR without a high-water mark never blocks; this may run while a generator is being closed.
            self._socket.send(message, zmq.NOBLOCK)

    async def _first_message(self) -> Ready:
        receive = asyncio.ensure_future(self._socket.recv())
        ended = asyncio.ensure_future(self._process.wait())
        await asyncio.wait({receive, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not receive.done():
            # The last words may still be on their way.
            await asyncio.wait({receive}, timeout=0.5)
        if not receive.done():
            receive.cancel()
            raise EngineDeadError(f"the engine process {_how_it_ended(await ended)} while starting")
        ended.cancel()
        message = self._decoder.decode(receive.result())
        if isinstance(message, Ready):
            return message
        reason = message.reason if isinstance(message, Failed) else "unexpected first message"
        if isinstance(message, Failed) and message.user_error:
            raise ConfigError(reason)
        raise EngineDeadError(f"the engine could not start: {reason}")

    def _set_facts(self, ready: Ready) -> None:
        self.facts = ready.facts
        self._limits = Limits(
            self.facts.max_model_len,
            self.facts.pool_tokens,
            self.facts.vocab_size,
            frozenset(self.facts.eos_token_ids),
        )
        self.stats = EngineStats(blocks_total=self.facts.num_blocks)
        self.metrics.update(self.stats)

    async def _receive(self) -> None:
        while True:
            message = self._decoder.decode(await self._socket.recv())
            self._last_news = time.monotonic()
            if isinstance(message, StepReport):
                self.stats = message.stats
                self.metrics.update(message.stats)
                for update in message.updates:
                    queue = self._queues.get(update.request_id)
                    if queue is not None:
                        queue.put_nowait(update)
            elif isinstance(message, Failed):
                self._die(message.reason)

    async def _watch_process(self) -> None:
        code = await self._process.wait()
        # Let the engine's own last words, if any, arrive before judging by the exit code.
        await asyncio.sleep(0.2)
        if not self._closing:
            self._die(f"the engine process {_how_it_ended(code)}")

    def _die(self, reason: str) -> None:
        if self._dead is not None:
            return
        self._dead = EngineDeadError(reason)
        self.stats = EngineStats(blocks_total=self.facts.num_blocks)
        logger.error("the engine has died: %s", reason)
        self._fail_all(self._dead)

    def _fail_all(self, error: EngineDeadError) -> None:
        for queue in self._queues.values():
            queue.put_nowait(error)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = "; was the machine out of memory?" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
