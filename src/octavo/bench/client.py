"""One request to /v1/completions, timed token by token, for any server that speaks the OpenAI API.

Nothing that goes wrong with a request escapes: a refusal, a broken stream, an answer that makes no sense or a timeout
becomes the `error` of its outcome, because a benchmark must count it. Only a server that does not answer at all when it
is asked for its models ends the benchmark.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from octavo.bench.outcome import Delivery, Outcome
from octavo.bench.workload import WorkloadRequest
from octavo.errors import BenchmarkError

_MOST_ERROR_TEXT = 300
_ASK_TIMEOUT_S = 30.0
# What a peer can do to us; anything else is our own fault and is raised.
_PEER_FAULTS = (aiohttp.ClientError, TimeoutError, OSError, ValueError, msgspec.MsgspecError, BenchmarkError)


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    """How every request of a benchmark is sent.

    model: None takes the first of /v1/models. extra_body: fields that are added to each body, or replace fields of it.
    """

    model: str | None = None
    send_text: bool = False
    stream: bool = True
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    timeout_s: float = 1800.0


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    finish_reason: str | None = None


class _Reply(msgspec.Struct):
    """A whole reply, or one event of a streamed one."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class CompletionsClient:
    """A connection to one server. Use as an asynchronous context manager.

    url: without /v1. model: what requests ask for; empty until `find_model` unless the settings name one.
    """

    def __init__(self, url: str, settings: RequestSettings) -> None:
        self.url = url
        self.model = settings.model or ""
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> CompletionsClient:
        key = self._settings.api_key
        self._session = aiohttp.ClientSession(
            # A connection for each request, as independent users have: one kept from an earlier request may have been
            # closed by the server meanwhile, and the next request on it would fail through no fault of the server.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self._settings.timeout_s, sock_connect=_ASK_TIMEOUT_S),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open_session.close()

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside of its context"
        return self._session

    async def find_model(self) -> str:
        """The model that was given, else the first that the server names. Raises BenchmarkError if it names none."""
        if self.model:
            return self.model
        try:
            async with self._open_session.get(
                f"{self.url}/v1/models", timeout=aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
            ) as response:
                raw = await response.read()
                if response.status != 200:
                    raise BenchmarkError(f"HTTP {response.status}: {_shown(raw)}")
                models = msgspec.json.decode(raw, type=_Models).data
        except _PEER_FAULTS as e:
            raise BenchmarkError(
                f"no OpenAI-compatible server at {self.url}: {_described(e)}; start it, or correct the address or --api-key"
            ) from e
        if not models:
            raise BenchmarkError(f"the server at {self.url} names no model; give --model")
        self.model = models[0].id
        return self.model

    async def version(self) -> str | None:
        """What GET /version says, as Octavo and vLLM offer it; None where there is no such thing."""
        try:
            async with self._open_session.get(
                f"{self.url}/version", timeout=aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
            ) as response:
                if response.status != 200:
                    return None
                return str(msgspec.json.decode(await response.read(), type=dict[str, Any]).get("version"))
        except _PEER_FAULTS:
            return None

    def body(self, request: WorkloadRequest, cache_salt: str | None = None) -> dict[str, Any]:
        """The JSON body for a request of the workload."""
        settings = self._settings
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": request.prompt_to_send(send_text=settings.send_text),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
        }
        if settings.ignore_eos:
            body["ignore_eos"] = True
        if request.n > 1:
            body["n"] = request.n
        if settings.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        return {**body, **request.extra_body, **settings.extra_body}

    async def send(
        self,
        request: WorkloadRequest,
        *,
        began: float,
        due_s: float | None = None,
        cache_salt: str | None = None,
    ) -> Outcome:
        """Send one request and read its reply to the end.

        began: when the run began, by time.perf_counter. due_s: when the request was due, in seconds after that; None: now.
        """
        body = self.body(request, cache_salt)
        payload = msgspec.json.encode(body)
        sent_s = time.perf_counter() - began
        sent_ids = isinstance(body["prompt"], list)
        outcome = Outcome(
            request_id=request.request_id,
            num_sequences=request.n,
            num_expected_tokens=request.max_tokens * request.n if self._settings.ignore_eos else None,
            num_sent_tokens=len(body["prompt"]) if sent_ids else None,
            due_s=sent_s if due_s is None else due_s,
            sent_s=sent_s,
        )
        reading = _Reading(outcome, lambda: time.perf_counter() - began)
        try:
            async with self._open_session.post(
                f"{self.url}/v1/completions", data=payload, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    raise BenchmarkError(f"HTTP {response.status}: {_shown(await response.read())}")
                if self._settings.stream:
                    await reading.stream(response.content)
                else:
                    reading.whole(await response.read())
        except _PEER_FAULTS as e:
            outcome.error = _described(e)
        outcome.done_s = time.perf_counter() - began
        return outcome


class _Reading:
    """Reads one reply into its outcome. clock: seconds since the start of the run."""

    def __init__(self, outcome: Outcome, clock: Callable[[], float]) -> None:
        self._outcome = outcome
        self._clock = clock
        self._decoder = msgspec.json.Decoder(_Reply)
        self._texts: dict[int, list[str]] = {}
        # Tokens of each sequence, as far as the server counts them one by one.
        self._told: dict[int, int] = {}

    def whole(self, raw: bytes) -> None:
        reply = self._decoder.decode(raw)
        for choice in reply.choices:
            self._texts[choice.index] = [choice.text or ""]
        self._take_usage(reply.usage)
        self._end()

    async def stream(self, lines: AsyncIterable[bytes]) -> None:
        """Take server-sent events until [DONE]. Raises BenchmarkError for a stream that says it failed, or ends early."""
        async for raw in lines:
            name, _, value = raw.strip().partition(b":")
            if name == b"error":
                raise BenchmarkError(f"the stream reports: {_shown(value)}")
            if name != b"data":
                continue
            if value.strip() == b"[DONE]":
                self._end()
                return
            event = self._decoder.decode(value)
            if event.error is not None:
                raise BenchmarkError(f"the stream reports: {_shown(value)}")
            self._take_event(event)
        raise BenchmarkError("the stream ended without [DONE]")

    def _take_event(self, event: _Reply) -> None:
        now = self._clock()
        num_tokens = self._newly_told(event)
        for choice in event.choices:
            text = choice.text or ""
            self._texts.setdefault(choice.index, []).append(text)
            is_bare_end = not text and choice.finish_reason is not None
            self._outcome.deliveries.setdefault(choice.index, []).append(
                Delivery(now, num_tokens, is_bare_end)
            )
        self._take_usage(event.usage)
        if event.choices and self._told:
            self._outcome.num_reported_tokens = sum(self._told.values())

    def _newly_told(self, event: _Reply) -> int | None:
        """New tokens of this event's sequence, if it says. Usage beside a choice is of that sequence alone: llama.cpp sends
        it at each sequence's end, vLLM's continuous_usage_stats always. Usage without a choice is of the whole request.
        """
        if event.usage is None or event.usage.completion_tokens is None or len(event.choices) != 1:
            return None
        index = event.choices[0].index
        new = event.usage.completion_tokens - self._told.get(index, 0)
        self._told[index] = event.usage.completion_tokens
        return new

    def _take_usage(self, usage: _Usage | None) -> None:
        if usage is None:
            return
        outcome = self._outcome
        if usage.completion_tokens is not None:
            outcome.num_reported_tokens = usage.completion_tokens
        if usage.prompt_tokens is not None:
            outcome.num_prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            outcome.num_cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _end(self) -> None:
        """Judge the whole. Raises BenchmarkError for an answer that lacks a sequence."""
        if len(self._texts) != self._outcome.num_sequences:
            raise BenchmarkError(
                f"{self._outcome.num_sequences} sequences were asked for, {len(self._texts)} came"
            )
        text = "\0".join("".join(self._texts[index]) for index in sorted(self._texts))
        self._outcome.text_digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _shown(raw: bytes) -> str:
    text = " ".join(raw.decode("utf-8", "replace").split())
    return text if len(text) <= _MOST_ERROR_TEXT else f"{text[:_MOST_ERROR_TEXT]}..."


def _described(error: Exception) -> str:
    """The error in one line; its class as well where the text alone says little (a timeout has none at all)."""
    if isinstance(error, BenchmarkError):
        return error.message
    return f"{type(error).__name__}: {error}".rstrip(": ")
