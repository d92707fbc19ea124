"""POST /v1/chat/completions: answer a conversation.

The messages become a prompt through the model's chat template; from there on it is like a completion with one
prompt. In a stream, the first chunk of each choice names the role, and its last one has the finish reason.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.engine.messages import GenerateRequest
from octavo.outputs import RequestDelta, TokenLogprobs
from octavo.server.body import parse_body, read_body
from octavo.server.engine_api import EngineAPI
from octavo.server.json_response import event, json_response
from octavo.server.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.params import chat_params, check_stream_options
from octavo.server.prompts import checked
from octavo.server.replies import Frame, Usage, ignored_header, new_id
from octavo.server.schemas import ChatBody
from octavo.server.settings import Context
from octavo.server.streaming import DONE, EventStream, until_disconnect


def router() -> APIRouter:
    """The routes of this file."""
    routes = APIRouter()
    routes.add_api_route("/v1/chat/completions", create_chat_completion, methods=["POST"])
    return routes


async def create_chat_completion(request: Request) -> Response:
    """Answer one call, whole or as a stream. Raises OctavoError subclasses, which `errors.py` answers."""
    context: Context = request.app.state.context
    raw = await read_body(request, context.settings.max_body_bytes)
    body, ignored = parse_body(raw, ChatBody, "chat")
    context.require_model(body.model)
    check_stream_options(body)
    params = chat_params(body)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    frame = Frame(kind, body.model, new_id("chatcmpl"))
    proceed = bool(body.continue_final_message)
    prompt = await context.api.render_chat(
        body.messages,
        add_generation_prompt=not proceed
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        continue_final_message=proceed,
        tools=None,
    )
    engine_request = checked(
        context.api,
        prompt.token_ids,
        params,
        request_id=frame.id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    call = Call(context.api, frame, body, engine_request)
    headers = ignored_header(body, ignored, context.api.facts.policy)
    if body.stream:
        return EventStream(call.events(), headers)
    return json_response(await until_disconnect(request.receive, call.reply()), headers=headers)


class Call:
    """One call under way. Used once: either `events` or `reply`."""

    def __init__(self, api: EngineAPI, frame: Frame, body: ChatBody, request: GenerateRequest) -> None:
        self._api = api
        self._frame = frame
        self._body = body
        self._request = request
        self._usage = Usage([len(request.prompt_token_ids)])

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events."""
        # With include_usage, every chunk has the field, and all but the last have null in it.
        more: dict[str, Any] = {"usage": None} if self._body.include_usage else {}
        begun = False
        async with aclosing(self._api.generate(self._request)) as deltas:
            async for delta in deltas:
                self._usage.add(0, delta)
                if not begun:
                    begun = True
                    for index in range(self._request.params.n):
                        yield event(
                            self._frame.around([_chunk(index, {"role": "assistant", "content": ""})], **more)
                        )
                if choice := self._news(delta):
                    yield event(self._frame.around([choice], **more))
        if self._body.include_usage:
            yield event(self._frame.around([], usage=self._usage.body()))
        yield DONE

    async def reply(self) -> dict[str, Any]:
        """The whole reply."""
        choices: list[dict[str, Any]] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": {"content": [], "refusal": None} if self._body.logprobs else None,
                "finish_reason": None,
                "stop_reason": None,
            }
            for index in range(self._request.params.n)
        ]
        texts: list[list[str]] = [
            [] for _ in choices
        ]  # joined at the end: adding each time would be quadratic
        scores: tuple[TokenLogprobs | None, ...] = ()
        async with aclosing(self._api.generate(self._request)) as deltas:
            async for delta in deltas:
                self._usage.add(0, delta)
                scores = delta.prompt_logprobs or scores
                texts[delta.index].append(delta.text)
                self._append(choices[delta.index], delta)
        for choice, parts in zip(choices, texts, strict=True):
            choice["message"]["content"] = "".join(parts)
        more: dict[str, Any] = {"usage": self._usage.body()}
        if self._body.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(self._api.tokenizer, scores, self._body.prompt_logprobs)
        return self._frame.around(choices, **more)

    def _news(self, delta: RequestDelta) -> dict[str, Any] | None:
        logprobs = self._logprobs(delta)
        if not (delta.text or delta.finish_reason or logprobs):
            return None
        content = {"content": delta.text} if delta.text else {}
        choice = _chunk(delta.index, content, logprobs, delta.finish_reason)
        if delta.finish_reason:
            choice["stop_reason"] = delta.stop_reason
        return choice

    def _append(self, choice: dict[str, Any], delta: RequestDelta) -> None:
        if logprobs := self._logprobs(delta):
            choice["logprobs"]["content"] += logprobs["content"]
        if delta.finish_reason:
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason

    def _logprobs(self, delta: RequestDelta) -> dict[str, Any] | None:
        if not self._body.logprobs or not delta.token_ids:
            return None
        return chat_logprobs(
            self._api.tokenizer, delta.token_ids, delta.logprobs or (), self._body.top_logprobs or 0
        )


def _chunk(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
