"""How the tokens of one request are chosen and when it ends. Plain data, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ValidationError

MAX_LOGPROBS = 20
MAX_SEQUENCES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
_TOP_K_LIMIT = 2**31
_SEED_LIMIT = 2**63
# Logits divided by much less are infinite in float32.
_LEAST_REPETITION_PENALTY = 0.01


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request; names and meanings follow the OpenAI API and vLLM.

    n: sequences to generate, each with its own derived seed.
    temperature: 0 is greedy. top_k: 0 and -1 mean off. top_p, min_p: 1 and 0 mean off.
    seed: same seed, same prompt, same parameters give the same tokens, whatever runs beside them.
    presence_penalty, frequency_penalty: over generated tokens. repetition_penalty: over prompt and generated tokens.
    logit_bias: token id to a number from -100 to 100, added before the choice.
    stop: strings that end the text; stop_token_ids: tokens that do. Neither is part of the text unless
        include_stop_str_in_output. Nothing stops a sequence before min_tokens.
    max_tokens: most new tokens; None means as many as the context and the block pool allow; 0 only scores the prompt.
    logprobs: alternatives to report per new token (0: only the chosen one), as raw log-softmax of the model's logits,
        before penalties and temperature. prompt_logprobs: the same for prompt tokens.
    truncate_prompt_tokens: keep only the last so many prompt tokens; None and -1 keep all.

    Raises ValidationError for a value that can never be served.

    >>> SamplingParams(temperature=0, max_tokens=8).greedy
    True
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_numbers()
        self._check_lengths()
        self._check_lists()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValidationError(
                    f"{name} is {getattr(self, name)!r}; it must be True or False", param=name
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever it was given as."""
        return tuple(self.stop)

    def _normalise(self) -> None:
        set_ = object.__setattr__
        set_(self, "stop", (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop))
        set_(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids))
        set_(self, "logit_bias", {} if self.logit_bias is None else self.logit_bias)
        set_(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        set_(
            self,
            "truncate_prompt_tokens",
            None if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens,
        )
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", _listed("allowed_token_ids", self.allowed_token_ids))

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, 0, 100)
        _number("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ValidationError("top_p is 0; use a value above 0 and up to 1", param="top_p")
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, _LEAST_REPETITION_PENALTY, 100)
        _integer("top_k", self.top_k, 0, _TOP_K_LIMIT)
        _integer("n", self.n, 1, MAX_SEQUENCES)
        if self.seed is not None:
            _integer("seed", self.seed, -_SEED_LIMIT, _SEED_LIMIT - 1)

    def _check_lengths(self) -> None:
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0)
            if self.min_tokens > self.max_tokens:
                raise ValidationError(
                    f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower it",
                    param="min_tokens",
                )
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValidationError(
                f"stop has {len(self.stop)} strings; the limit is {MAX_STOP_STRINGS}", param="stop"
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValidationError(
                    f"stop contains {text!r}; each must be a string that is not empty", param="stop"
                )
            if len(text) > MAX_STOP_CHARACTERS:
                raise ValidationError(
                    f"stop has a string of {len(text):,} characters; the limit is {MAX_STOP_CHARACTERS:,}",
                    param="stop",
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValidationError(
                f"stop_token_ids has {len(self.stop_token_ids):,} ids; the limit is {MAX_STOP_TOKEN_IDS}",
                param="stop_token_ids",
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                _integer(name, token, 0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValidationError(
                "allowed_token_ids is empty; name at least one id", param="allowed_token_ids"
            )
        self._check_logit_bias()

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise ValidationError(
                f"logit_bias is a {type(self.logit_bias).__name__}; map token ids to numbers",
                param="logit_bias",
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValidationError(
                f"logit_bias has {len(self.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}",
                param="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0)
            _number("logit_bias", bias, -100, 100)


def _listed(name: str, value: object) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | Set):
        raise ValidationError(f"{name} is a {type(value).__name__}; it must be a list", param=name)
    return tuple(value)


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise ValidationError(f"{name} is {value!r}; it must be a finite number", param=name)
    if not low <= value <= high:
        raise ValidationError(f"{name} is {str(value)[:40]}; it must be from {low:g} to {high:g}", param=name)


def _is_finite(value: int | float) -> bool:
    # An integer may be too large to become a float.
    return isinstance(value, int) or math.isfinite(value)


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValidationError(f"{name} is {value!r}; it must be an integer", param=name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low:,}" if high is None else f"from {low:,} to {high:,}"
        raise ValidationError(f"{name} is {value:,}; it must be {limit}", param=name)
