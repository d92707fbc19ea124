"""Known request fields that have no schema here: those refused, and those without effect.

A field of the OpenAI or vLLM API that this version does not offer is refused, unless its value is a neutral
one, that is, one that asks for nothing. A field that by its nature cannot change the answer (who asks, how it
is billed) is accepted and named in the response header `x-octavo-ignored-fields`. Whatever is in neither
table nor in a schema is unknown and refused by name. Offering a field means: take its line out here, put it
into `schemas.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.errors import UnsupportedError, ValidationError

IGNORED_HEADER = "x-octavo-ignored-fields"

_TEXT_FORMAT = {"type": "text"}
_OFF = (False,)
_NOTHING: tuple[Any, ...] = ()
_EMPTY_LIST: tuple[Any, ...] = ([],)
_EMPTY_OBJECT: tuple[Any, ...] = ({},)

# field -> values besides null that ask for nothing
_BOTH: Mapping[str, tuple[Any, ...]] = {
    "response_format": (_TEXT_FORMAT,),
    "structured_outputs": _EMPTY_OBJECT,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_decoding_backend": _NOTHING,
    "guided_whitespace_pattern": _NOTHING,
    "use_beam_search": _OFF,
    "beam_width": (1,),
    "length_penalty": (1,),
    "early_stopping": _OFF,
    "bad_words": _EMPTY_LIST,
    "logits_processors": _EMPTY_LIST,
    "spaces_between_special_tokens": (True,),
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "kv_transfer_params": _NOTHING,
    "mm_processor_kwargs": _EMPTY_OBJECT,
    "vllm_xargs": _EMPTY_OBJECT,
}
_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    **_BOTH,
    "suffix": ("",),
    "prompt_embeds": _NOTHING,
}
_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_BOTH,
    "add_special_tokens": _OFF,
    "audio": _NOTHING,
    "chat_template": _NOTHING,
    "chat_template_kwargs": _EMPTY_OBJECT,
    "documents": _EMPTY_LIST,
    "echo": _OFF,
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "prediction": _NOTHING,
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": _NOTHING,
}
UNSUPPORTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {"completion": _COMPLETION, "chat": _CHAT}

# field -> type of its value; it has no effect
WITHOUT_EFFECT: Mapping[str, type] = {
    "user": str,
    "metadata": dict,
    "service_tier": str,
    "safety_identifier": str,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "parallel_tool_calls": bool,
    "store": bool,
}


def take_known(fields: dict[str, Any], kind: str) -> list[str]:
    """Remove from `fields` all known ones without a schema; return those that were given and have no effect.

    kind: "completion" or "chat". `fields` is changed.
    Raises UnsupportedError for a field that is not offered, ValidationError for a wrong type.
    """
    neutral = UNSUPPORTED[kind]
    for name in [name for name in fields if name in neutral]:
        _require_neutral(name, fields.pop(name), neutral[name])
    _take_best_of(fields)
    ignored = _take_tools(fields) if kind == "chat" else []
    for name in [name for name in fields if name in WITHOUT_EFFECT]:
        value = fields.pop(name)
        if value is not None:
            _require_without_effect(name, value)
            ignored.append(name)
    return ignored


def _require_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    if value is None or any(type(value) is type(other) and value == other for other in neutral):
        return
    if type(value) is float and value in neutral:  # 1.0 where 1 is neutral
        return
    allowed = " or ".join(["null", *(json.dumps(other) for other in neutral)])
    raise UnsupportedError(
        f"{name} is not offered by this version; leave it out, or send {allowed}", param=name
    )


def _require_without_effect(name: str, value: Any) -> None:
    if type(value) is not WITHOUT_EFFECT[name]:
        word = {str: "a string", dict: "an object", bool: "true or false"}[WITHOUT_EFFECT[name]]
        raise ValidationError(f"{name} must be {word}, not {type(value).__name__}", param=name)
    if name == "store" and value:
        raise UnsupportedError("store is true, but replies are not kept here; send false", param=name)


def _take_best_of(fields: dict[str, Any]) -> None:
    best_of = fields.pop("best_of", None)
    n = fields.get("n")
    wanted = 1 if n is None else n
    if best_of is not None and (type(best_of) is not type(wanted) or best_of != wanted):
        raise UnsupportedError(
            f"best_of is not offered by this version unless it equals n, which is {str(wanted)[:40]}; leave it out",
            param="best_of",
        )


def _take_tools(fields: dict[str, Any]) -> list[str]:
    """Tools may be listed if the request also says that none shall be called; they are then not shown to the
    model.
    """
    ignored = []
    for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        listed, chosen = fields.pop(tools, None), fields.pop(choice, None)
        if listed is not None and not isinstance(listed, list):
            raise ValidationError(f"{tools} must be a list, not {type(listed).__name__}", param=tools)
        if chosen not in (None, "none", "auto"):
            raise UnsupportedError(
                f'{choice} is not offered by this version; leave it out, or send "none"', param=choice
            )
        if listed and chosen != "none":
            raise UnsupportedError(
                f'{tools} are not offered by this version; leave them out, or send {choice} "none"',
                param=tools,
            )
        if listed:
            ignored.append(tools)
    return ignored
