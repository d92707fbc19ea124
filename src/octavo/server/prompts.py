"""The prompts of one completion call, whichever of the four forms they came in.

A call is refused as a whole: all prompts are encoded and checked before the first one runs, so that one bad
prompt among many cannot leave the others half done, and an error comes before the first byte of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.engine.messages import GenerateRequest
from octavo.errors import ValidationError
from octavo.sampling_params import SamplingParams
from octavo.server.engine_api import EngineAPI
from octavo.server.params import truncate

MAX_PROMPTS = 2048
MAX_CHOICES = 4096


@dataclass(frozen=True)
class Prompt:
    """A prompt ready to run. text: as it was sent, None if it came as token ids or was cut."""

    text: str | None
    request: GenerateRequest

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.request.prompt_token_ids


def split_prompts(value: Any) -> list[str | list[int]]:
    """Tell apart a text, a list of texts, a list of token ids, and a list of such lists.

    Raises ValidationError for anything else, for an empty list, and for too many prompts.

    >>> split_prompts([1, 2]), split_prompts(["a", "b"])
    ([[1, 2]], ['a', 'b'])
    """
    if isinstance(value, str):
        return [_text(value, "prompt")]
    if not isinstance(value, list):
        raise _wrong_form(f"prompt is {'null' if value is None else type(value).__name__}")
    if not value:
        raise ValidationError("prompt is an empty list; send at least one prompt", param="prompt")
    if _is_token_id(value[0]):
        return [_token_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise ValidationError(
            f"prompt has {len(value):,} prompts; the limit is {MAX_PROMPTS:,} in one call", param="prompt"
        )
    if isinstance(value[0], str):
        return [_text(item, f"prompt[{i}]") for i, item in enumerate(value)]
    return [_token_ids(item, f"prompt[{i}]") for i, item in enumerate(value)]


async def prepare(
    api: EngineAPI,
    prompts: Sequence[str | list[int]],
    params: SamplingParams,
    *,
    call_id: str,
    priority: int = 0,
    cache_salt: str = "",
    add_special_tokens: bool = True,
) -> list[Prompt]:
    """Encode, cut and check every prompt of a call.

    Raises ValidationError or a subclass for the first prompt that cannot be served.
    """
    if len(prompts) * params.n > MAX_CHOICES:
        raise ValidationError(
            f"{len(prompts):,} prompts times n={params.n} is more than {MAX_CHOICES:,} choices; "
            "send them in several calls",
            param="n",
        )
    prepared = []
    for i, prompt in enumerate(prompts):
        text = prompt if isinstance(prompt, str) else None
        token_ids: Sequence[int] = (
            await api.encode(prompt, add_special_tokens=add_special_tokens)
            if isinstance(prompt, str)
            else prompt
        )
        request = checked(
            api, token_ids, params, request_id=f"{call_id}-{i}", priority=priority, cache_salt=cache_salt
        )
        cut = len(request.prompt_token_ids) < len(token_ids)
        prepared.append(Prompt(None if cut else text, request))
    return prepared


def checked(
    api: EngineAPI,
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    request_id: str,
    priority: int,
    cache_salt: str,
) -> GenerateRequest:
    """One prompt as a request that the engine will take. Raises ValidationError or a subclass."""
    token_ids = truncate(token_ids, params, api.facts.max_model_len)
    if not token_ids:
        raise ValidationError("the prompt has no tokens; send at least one", param="prompt")
    return api.check(GenerateRequest(request_id, tuple(token_ids), params, priority, cache_salt))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong_form(f"{name} is {_kind(value)} among strings")
    if not value:
        raise ValidationError(f"{name} is an empty string; send at least one token", param="prompt")
    return value


def _token_ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise _wrong_form(f"{name} is {_kind(value)} among lists")
    for i, item in enumerate(value):
        if not _is_token_id(item):
            raise _wrong_form(f"{name}[{i}] is {_kind(item)} among token ids")
        if not 0 <= item < 2**31:
            raise ValidationError(
                f"{name}[{i}] is {str(item)[:40]}, which is not a token id of this model", param="prompt"
            )
    return value


def _is_token_id(value: Any) -> bool:
    return type(value) is int


def _kind(value: Any) -> str:
    words = {
        "NoneType": "null",
        "str": "a string",
        "list": "a list",
        "dict": "an object",
        "int": "an integer",
    }
    return words.get(type(value).__name__, f"a {type(value).__name__}")


def _wrong_form(what: str) -> ValidationError:
    return ValidationError(
        f"{what}; prompt must be a string, a list of strings, a list of token ids or a list of such lists",
        param="prompt",
    )
