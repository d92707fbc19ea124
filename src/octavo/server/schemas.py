"""The request bodies, field by field. Types are strict: "5", 5.0 and true are not the integer 5.

Only types and the shape are checked here. Ranges belong to `SamplingParams`, which the offline API shares;
limits of the model to the engine. Fields whose type would need a union (`prompt`, `stop`, `logit_bias`) are taken as
they come and read by `prompts.py` and `params.py`, which give one clear message instead of one for each
branch. Long lists stop at their first fault.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

# What the engine's messages can carry.
Integer = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenIds = Annotated[list[Integer], Field(fail_fast=True)]
Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1)]


class Body(BaseModel):
    """Settings of all bodies."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(Body):
    """Options of a streamed reply."""

    include_usage: bool | None = None


class GenerationBody(Body):
    """What completions and chat completions have in common. None means the default."""

    model: str
    n: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    seed: Integer | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Any = None
    allowed_token_ids: TokenIds | None = None
    stop: Any = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Integer | None = None
    truncate_prompt_tokens: Integer | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Integer | None = None
    cache_salt: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any
    echo: bool | None = None
    logprobs: Integer | None = None
    add_special_tokens: bool | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize: a text (`prompt`, also called `content`), or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: TokenIds
    model: str | None = None
