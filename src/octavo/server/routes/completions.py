"""POST /v1/completions: continue one prompt or many.

Choice i of prompt p has the index p * n + i. A whole reply is made of the same pieces as a streamed one, put
together, so the two cannot differ. `echo` puts the prompt before the text; with logprobs, the prompt is
scored as well, and `max_tokens` 0 then only scores it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.outputs import RequestDelta
from octavo.sampling_params import SamplingParams
from octavo.server.body import parse_body, read_body
from octavo.server.engine_api import EngineAPI
from octavo.server.json_response import event, json_response
from octavo.server.logprobs import CompletionLogprobs, prompt_logprobs
from octavo.server.params import check_stream_options, completion_params
from octavo.server.prompts import Prompt, prepare, split_prompts
from octavo.server.replies import Frame, ScoreGate, Usage, ignored_header, new_id
from octavo.server.schemas import CompletionBody
from octavo.server.settings import Context
from octavo.server.streaming import DONE, EventStream, merge, until_disconnect


def router() -> APIRouter:
    """The routes of this file."""
    routes = APIRouter()
    routes.add_api_route("/v1/completions", create_completion, methods=["POST"])
    return routes


async def create_completion(request: Request) -> Response:
    """Answer one call, whole or as a stream. Raises OctavoError subclasses, which `errors.py` answers."""
    context: Context = request.app.state.context
    raw = await read_body(request, context.settings.max_body_bytes)
    body, ignored = parse_body(raw, CompletionBody, "completion")
    context.require_model(body.model)
    check_stream_options(body)
    params = completion_params(body)
    frame = Frame("text_completion", body.model, new_id("cmpl"))
    prompts = await prepare(
        context.api,
        split_prompts(body.prompt),
        params,
        call_id=frame.id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        add_special_tokens=body.add_special_tokens is not False,
    )
    call = Call(context.api, frame, body, params, prompts)
    headers = ignored_header(body, ignored, context.api.facts.policy)
    if body.stream:
        return EventStream(call.events(), headers)
    return json_response(await until_disconnect(request.receive, call.reply()), headers=headers)


class Call:
    """One call under way. Used once: either `events` or `reply`."""

    def __init__(
        self,
        api: EngineAPI,
        frame: Frame,
        body: CompletionBody,
        params: SamplingParams,
        prompts: list[Prompt],
    ) -> None:
        self._api = api
        self._frame = frame
        self._body = body
        self._prompts = prompts
        self._usage = Usage([len(prompt.token_ids) for prompt in prompts])
        wait = params.prompt_logprobs is not None
        self._gates = [ScoreGate(wait=wait) for _ in prompts]
        self._choices = [
            Choice(api, body, params, prompt, gate, p * params.n + i)
            for p, (prompt, gate) in enumerate(zip(prompts, self._gates, strict=True))
            for i in range(params.n)
        ]
        self._n = params.n

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events."""
        # With include_usage, every chunk has the field, and all but the last have null in it.
        more: dict[str, Any] = {"usage": None} if self._body.include_usage else {}
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                if piece["text"] or piece["finish_reason"] or piece["logprobs"]:
                    yield event(self._frame.around([piece], **more))
        if self._body.include_usage:
            yield event(self._frame.around([], usage=self._usage.body()))
        yield DONE

    async def reply(self) -> dict[str, Any]:
        """The whole reply."""
        whole = [choice.piece("", choice.no_logprobs()) for choice in self._choices]
        texts: list[list[str]] = [[] for _ in whole]
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                texts[piece["index"]].append(piece["text"])
                _append(whole[piece["index"]], piece)
        for choice, parts in zip(whole, texts, strict=True):
            choice["text"] = "".join(parts)
        if self._body.prompt_logprobs is not None:
            for i, choice in enumerate(whole):
                scores = self._gates[i // self._n].scores or ()
                choice["prompt_logprobs"] = prompt_logprobs(
                    self._api.tokenizer, scores, self._body.prompt_logprobs
                )
        return self._frame.around(whole, usage=self._usage.body())

    async def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        streams = [self._api.generate(prompt.request) for prompt in self._prompts]
        async with aclosing(merge(streams)) as news:
            async for p, delta in news:
                self._usage.add(p, delta)
                for piece in self._pieces_of(p, self._gates[p].pass_on(delta)):
                    yield piece
        for p, gate in enumerate(self._gates):
            for piece in self._pieces_of(p, gate.flush()):
                yield piece

    def _pieces_of(self, prompt_index: int, deltas: list[RequestDelta]) -> Iterator[dict[str, Any]]:
        first = prompt_index * self._n
        return chain.from_iterable(self._choices[first + delta.index].pieces(delta) for delta in deltas)


class Choice:
    """Writes one choice of the reply, piece by piece."""

    def __init__(
        self,
        api: EngineAPI,
        body: CompletionBody,
        params: SamplingParams,
        prompt: Prompt,
        gate: ScoreGate,
        index: int,
    ) -> None:
        self._api = api
        self._prompt = prompt
        self._gate = gate
        self._index = index
        self._skip_special = params.skip_special_tokens
        self._to_echo = bool(body.echo)
        self._logprobs = (
            None
            if body.logprobs is None
            else CompletionLogprobs(api.tokenizer, body.logprobs, skip_special=self._skip_special)
        )

    def pieces(self, delta: RequestDelta) -> list[dict[str, Any]]:
        """What `delta` adds: the echoed prompt, if it is the first, and its own text."""
        pieces = []
        if self._to_echo:
            self._to_echo = False
            pieces.append(self._echo())
        logprobs = None
        if self._logprobs is not None and delta.token_ids:
            logprobs = self._logprobs.generated(delta.token_ids, delta.logprobs or ())
        return [*pieces, self.piece(delta.text, logprobs, delta.finish_reason, delta.stop_reason)]

    def piece(
        self,
        text: str,
        logprobs: dict[str, list[Any]] | None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> dict[str, Any]:
        """A choice object with this content."""
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def no_logprobs(self) -> dict[str, list[Any]] | None:
        """The logprobs of no tokens, None if they were not asked for."""
        return None if self._logprobs is None else self._logprobs.generated((), ())

    def _echo(self) -> dict[str, Any]:
        text, token_ids = self._prompt.text, self._prompt.token_ids
        if text is None:
            text = self._api.tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)
        if self._logprobs is None:
            return self.piece(text, None)
        scores = self._gate.scores or (None,) * len(token_ids)
        return self.piece(text, self._logprobs.echo(text, token_ids, scores))


def _append(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add all but the text, which is put together at the end: adding to it each time would be quadratic."""
    whole["finish_reason"] = piece["finish_reason"] or whole["finish_reason"]
    if piece["stop_reason"] is not None:
        whole["stop_reason"] = piece["stop_reason"]
    if piece["logprobs"] is not None:
        for name, values in piece["logprobs"].items():
            whole["logprobs"][name].extend(values)
