"""POST /tokenize and /detokenize: the model's tokenizer, exactly as the other routes use it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from octavo.errors import ValidationError
from octavo.server.body import parse_body, read_body
from octavo.server.engine_api import EngineAPI
from octavo.server.json_response import json_response
from octavo.server.schemas import DetokenizeBody, TokenizeBody
from octavo.server.settings import Context


def router() -> APIRouter:
    """The routes of this file."""
    routes = APIRouter()
    routes.add_api_route("/tokenize", tokenize, methods=["POST"])
    routes.add_api_route("/detokenize", detokenize, methods=["POST"])
    return routes


async def tokenize(request: Request) -> Response:
    """Token ids of a text or of a chat, as `{tokens, count, max_model_len}`. Raises ValidationError (400)."""
    context: Context = request.app.state.context
    body, _ = parse_body(await read_body(request, context.settings.max_body_bytes), TokenizeBody)
    if body.model is not None:
        context.require_model(body.model)
    token_ids = list(await _encode(context.api, body))
    reply = {"tokens": token_ids, "count": len(token_ids), "max_model_len": context.api.facts.max_model_len}
    if body.return_token_strs:
        reply["token_strs"] = [context.api.tokenizer.token_text(token_id) for token_id in token_ids]
    return json_response(reply)


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included, as `{prompt}`. Raises ValidationError (400)."""
    context: Context = request.app.state.context
    body, _ = parse_body(await read_body(request, context.settings.max_body_bytes), DetokenizeBody)
    if body.model is not None:
        context.require_model(body.model)
    tokenizer = context.api.tokenizer
    limit = context.api.facts.vocab_size
    for i, token_id in enumerate(body.tokens):
        if not 0 <= token_id < limit:
            raise ValidationError(
                f"tokens[{i}] is {token_id}; token ids of this model go from 0 to {limit - 1:,}",
                param="tokens",
            )
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


async def _encode(api: EngineAPI, body: TokenizeBody) -> Sequence[int]:
    texts = [text for text in (body.prompt, body.content) if text is not None]
    if len({*texts}) + (body.messages is not None) != 1:
        raise ValidationError(
            "send one of prompt (or content, which means the same) and messages", param="prompt"
        )
    if body.messages is None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return await api.encode(texts[0], add_special_tokens=special)
    proceed = bool(body.continue_final_message)
    chat = await api.render_chat(
        body.messages,
        add_generation_prompt=not proceed
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        continue_final_message=proceed,
    )
    return chat.token_ids
