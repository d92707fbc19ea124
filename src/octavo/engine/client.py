"""The async face of an engine process: sends it requests and hands each request its own stream of deltas.

    generate() --Submit--> engine process --StepReport--> receive loop --queue of the request--> generate() yields deltas

Whatever ends a `generate` early (the consumer closes it, a task is cancelled, a stop string is seen) tells the engine, which
frees the blocks before its next step. If the engine process dies, every request in flight gets the root cause at once.

This process imports no torch: it tokenises, watches and relays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from octavo.config import EngineConfig
from octavo.engine.link import EngineLink, start_engine
from octavo.engine.messages import (
    EngineStats,
    Failed,
    Finish,
    GenerateRequest,
    SequenceUpdate,
    StepReport,
    Submit,
)
from octavo.engine.metrics import Metrics, RequestTimer
from octavo.engine.streams import RequestStream, with_special_stops
from octavo.errors import EngineDeadError, OctavoError
from octavo.outputs import EngineFacts, RequestDelta
from octavo.scheduler.limits import Limits, check_request
from octavo.text.chat_template import ChatPrompt, render_chat
from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_Queue = asyncio.Queue[SequenceUpdate | EngineDeadError]


class EngineClient:
    """One engine process and everything needed to serve from it. Make it with `start`.

    facts: what the engine found at start. stats: its latest report. stall_timeout_s: without a step for so long while
    there is work, `health` says so.
    """

    def __init__(
        self, link: EngineLink, facts: EngineFacts, tokenizer: Tokenizer, stall_timeout_s: float
    ) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.stats = EngineStats(blocks_total=facts.num_blocks)
        self.metrics = Metrics()
        self.metrics.update(self.stats)
        self._link = link
        self._limits = Limits(
            facts.max_model_len, facts.pool_tokens, facts.vocab_size, frozenset(facts.eos_token_ids)
        )
        self._stall_timeout_s = stall_timeout_s
        self._queues: dict[str, _Queue] = {}
        # Sequences of each request that the engine has not ended; a client that reads slowly keeps it in _queues for longer.
        self._num_open: dict[str, int] = {}
        self._dead: EngineDeadError | None = None
        self._last_news = time.monotonic()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        log_level: str = "INFO",
        stall_timeout_s: float = 60.0,
    ) -> EngineClient:
        """Start an engine process and wait until it is ready. Raises what `start_engine` raises."""
        link, facts = await start_engine(config, log_level)
        return cls(link, facts, tokenizer, stall_timeout_s)

    def end_requests(self) -> None:
        """Requests in flight get an error now, and no new ones are taken: the server is stopping."""
        self._end_all(EngineDeadError("the server is stopping; send the request again"))

    async def stop(self) -> None:
        """Stop the engine process and give back everything. Requests still in flight get an error."""
        self.end_requests()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def engine_pid(self) -> int:
        """Process id of the engine."""
        return self._link.pid

    def health(self) -> str | None:
        """None if all is well, otherwise why not, in one line."""
        if self._dead is not None:
            return self._dead.message
        silence = time.monotonic() - self._last_news
        if self._num_open and silence > self._stall_timeout_s:
            return f"the engine has work but has finished no step for {silence:.0f} s"
        return None

    def check(self, request: GenerateRequest) -> GenerateRequest:
        """Refuse what can never be served; returns the request with max_tokens resolved.

        Raises ValidationError or ContextLengthError, EngineDeadError if there is no engine to serve it.
        """
        if self._dead is not None:
            raise EngineDeadError(self._dead.message)
        request = with_special_stops(request, self.tokenizer)
        params = check_request(request.prompt_token_ids, request.params, self._limits)
        return replace(request, params=params)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestDelta, None]:
        """Yield the deltas of all sequences of a request until each has a finish_reason.

        Closing the iterator early aborts the request. Raises what `check` raises, before anything runs; EngineDeadError if
        the engine dies on the way, OctavoError if this request alone fails.
        """
        request = self.check(request)
        stream = RequestStream(request, self.tokenizer)
        timer = RequestTimer(self.metrics, time.monotonic(), len(request.prompt_token_ids))
        queue: _Queue = asyncio.Queue()
        if not self._num_open:
            self._last_news = time.monotonic()  # an idle engine reports nothing: the clock starts now
        self._queues[request.request_id] = queue
        self._num_open[request.request_id] = request.params.n
        try:
            self._link.send(Submit((request,)))
            while not stream.finished:
                update = await queue.get()
                if isinstance(update, EngineDeadError):
                    raise EngineDeadError(update.message)
                delta = self._take(update, stream, timer)
                if delta is not None:
                    yield delta
        finally:
            del self._queues[request.request_id]
            self._num_open.pop(request.request_id, None)
            if not stream.finished:
                self._tell_finish(request.request_id, None, "abort")

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, worked out in a thread so that a long one stalls nobody."""
        return await self._in_thread(
            lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def render_chat(self, messages: Any, **options: Any) -> ChatPrompt:
        """Text and token ids of a conversation, worked out in a thread. Raises ValidationError."""
        return await self._in_thread(lambda: render_chat(self.tokenizer, messages, **options))

    # -- inside

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _take(
        self, update: SequenceUpdate, stream: RequestStream, timer: RequestTimer
    ) -> RequestDelta | None:
        if update.error is not None:
            raise OctavoError(update.error, code="request_failed")
        delta = stream.feed(update)
        if delta is None:
            return None
        if delta.finish_reason is not None and update.finish_reason is None:
            # A stop string: the engine does not know of it.
            self._tell_finish(update.request_id, update.index, "stop")
        now = time.monotonic()
        timer.tokens(len(delta.token_ids), now, delta.index)
        if stream.finished:
            timer.finished(delta.finish_reason or "stop", now)
        return delta

    def _tell_finish(self, request_id: str, index: int | None, reason: str) -> None:
        if self._dead is None:
            self._link.send(Finish(request_id, index, reason))

    async def _receive(self) -> None:
        while True:
            message = await self._link.receive()
            self._last_news = time.monotonic()
            if isinstance(message, StepReport):
                self.stats = message.stats
                self.metrics.update(message.stats, message.host_s)
                for update in message.updates:
                    self._relay(update)
            elif isinstance(message, Failed):
                self._die(message.reason)

    def _relay(self, update: SequenceUpdate) -> None:
        queue = self._queues.get(update.request_id)
        if queue is None:
            return
        queue.put_nowait(update)
        if update.finish_reason is not None and update.request_id in self._num_open:
            self._num_open[update.request_id] -= 1
            if not self._num_open[update.request_id]:
                del self._num_open[update.request_id]

    async def _watch(self) -> None:
        self._die(await self._link.ended())

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A fault of our own in receiving or watching must not leave requests waiting for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("reading from the engine failed", exc_info=error)
            self._die(f"its messages cannot be read: {type(error).__name__}: {error}")

    def _die(self, reason: str) -> None:
        if self._dead is not None:
            return
        # The engine's own words come first; the exit code that follows adds nothing.
        idle = dict.fromkeys(
            ("num_running", "num_waiting", "num_swapped", "blocks_used", "host_blocks_used"), 0
        )
        self.stats = msgspec.structs.replace(self.stats, **idle)
        self.metrics.update(self.stats)
        self._end_all(EngineDeadError(f"the engine has died: {reason}"))
        logger.error("the engine has died: %s", reason)

    def _end_all(self, error: EngineDeadError) -> None:
        self._dead = self._dead or error
        for queue in self._queues.values():
            queue.put_nowait(error)
