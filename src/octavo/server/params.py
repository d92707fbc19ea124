"""From the fields of a body to `SamplingParams`, for both endpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from octavo.errors import ValidationError
from octavo.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from octavo.server.schemas import ChatBody, CompletionBody, GenerationBody

DEFAULT_COMPLETION_TOKENS = 16
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")
_SAME_NAME = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
    "truncate_prompt_tokens",
)


def completion_params(body: CompletionBody) -> SamplingParams:
    """The parameters of a completion. With echo and logprobs, the prompt is scored as well.

    Raises ValidationError.
    """
    values = _common(body)
    values["max_tokens"] = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    values["logprobs"] = body.logprobs
    asked = 0 if body.prompt_logprobs is None else body.prompt_logprobs
    if body.echo and body.logprobs is not None and asked >= 0:  # what is below 0 is refused, not replaced
        values["prompt_logprobs"] = max(body.logprobs, asked)
    return SamplingParams(**values)


def chat_params(body: ChatBody) -> SamplingParams:
    """The parameters of a chat completion; without a limit it runs as far as the context goes.

    Raises ValidationError.
    """
    values = _common(body)
    values["max_tokens"] = _chat_limit(body)
    values["logprobs"] = _chat_logprobs(body)
    return SamplingParams(**values)


def truncate(token_ids: Sequence[int], params: SamplingParams, max_model_len: int) -> Sequence[int]:
    """Keep the last `truncate_prompt_tokens` of a prompt. Raises ValidationError if that is beyond the
    context.
    """
    keep = params.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep > max_model_len:
        raise ValidationError(
            f"truncate_prompt_tokens is {keep:,}; the context has {max_model_len:,} tokens; use less",
            param="truncate_prompt_tokens",
        )
    return token_ids[-keep:]


def check_stream_options(body: GenerationBody) -> None:
    """Raises ValidationError for what only a streamed, or only a whole, reply can have."""
    if body.stream_options is not None and not body.stream:
        raise ValidationError(
            "stream_options is given without stream; set stream to true or leave it out",
            param="stream_options",
        )
    if body.stream and body.prompt_logprobs is not None:
        raise ValidationError(
            "prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs"
        )


def _common(body: GenerationBody) -> dict[str, Any]:
    values = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    values["stop"] = _stop(body.stop)
    values["logit_bias"] = _logit_bias(body.logit_bias)
    return values


def _chat_limit(body: ChatBody) -> int | None:
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and old is not None and new != old:
        raise ValidationError(
            f"max_completion_tokens is {new} and max_tokens is {old}; send one of them",
            param="max_completion_tokens",
        )
    return old if new is None else new


def _chat_logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs
    if not body.logprobs:
        if top is not None:
            raise ValidationError(
                "top_logprobs is given without logprobs; set logprobs to true or leave it out",
                param="top_logprobs",
            )
        return None
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise ValidationError(
            f"top_logprobs is {top}; it must be from 0 to {MAX_LOGPROBS}", param="top_logprobs"
        )
    return top or 0


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValidationError(
            f"stop is a {type(value).__name__}; it must be a string or a list of strings", param="stop"
        )
    return tuple(value)  # what is in it is checked with the other parameters


def _logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValidationError(
            f"logit_bias is a {type(value).__name__}; it must be an object from token ids to numbers",
            param="logit_bias",
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise ValidationError(
            f"logit_bias has {len(value):,} entries; the limit is {MAX_LOGIT_BIAS:,}", param="logit_bias"
        )
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise ValidationError(
                f"logit_bias has the key {key[:40]!r}; keys are token ids in decimal", param="logit_bias"
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValidationError(
                f"logit_bias[{key}] is a {type(bias).__name__}; it must be a number from -100 to 100",
                param="logit_bias",
            )
        biases[int(key)] = bias
    return biases
