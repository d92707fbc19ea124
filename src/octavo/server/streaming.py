"""Many token streams into one, one reply out of it, and an end to both as soon as the client has gone.

    generate() of each prompt --merge--> (prompt, delta), ... --route--> events --EventStream--> socket
                                                            until_disconnect watches the socket meanwhile

Closing any of these closes what is before it, down to `generate()`, whose closing aborts the request in the
engine. Nothing here polls: the server's `receive` wakes up when the connection ends.

A reply's status is sent with its first event, not before: an engine that fails while a request is still
waiting gives a proper 503. A failure after that becomes one `{"error": ...}` event, and the stream ends
without `[DONE]`, because `[DONE]` says that a reply is complete.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from octavo.errors import OctavoError
from octavo.outputs import RequestDelta
from octavo.server.errors import error_body
from octavo.server.json_response import event

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
T = TypeVar("T")
_Item = tuple[int, RequestDelta | Exception | None]


async def merge(
    streams: Sequence[AsyncGenerator[RequestDelta, None]],
) -> AsyncGenerator[tuple[int, RequestDelta], None]:
    """The deltas of all streams as they come, each with the index of its stream.

    The first error of any stream ends all. Closing this closes every stream.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield 0, delta
        return
    queue: asyncio.Queue[_Item] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    receive: the ASGI callable of a request whose body has been read. Raises ClientDisconnect, and what `work`
        raises.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """A reply of server-sent events; see the head of this file for when it begins and how it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        self._events = events
        self.background = None
        self.status_code = 200
        # The second keeps a proxy from collecting the whole stream before it passes anything on.
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; raises what the first of them raises, before anything is sent."""
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientDisconnect:
            logger.debug("client went away; its request is aborted")

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in _to_the_end(events):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _to_the_end(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in events:
            yield piece
    except OctavoError as e:
        logger.warning("a stream ended early: %s", e)
        yield event(error_body(e))
    except Exception as e:
        logger.exception("a stream failed")
        yield event(error_body(e))


async def _pump(index: int, stream: AsyncGenerator[RequestDelta, None], queue: asyncio.Queue[_Item]) -> None:
    try:
        async with aclosing(stream):
            async for delta in stream:
                queue.put_nowait((index, delta))
        queue.put_nowait((index, None))
    except Exception as e:
        queue.put_nowait((index, e))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
