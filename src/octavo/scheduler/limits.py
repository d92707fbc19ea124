"""What can be served at all, and when a sequence has had enough. Pure functions over integers."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from octavo.errors import ContextLengthError, ValidationError
from octavo.request import Sequence
from octavo.sampling_params import SamplingParams


@dataclass(frozen=True)
class Limits:
    """Bounds that every request must keep. max_model_len and pool_tokens are in tokens."""

    max_model_len: int
    pool_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    @property
    def max_tokens(self) -> int:
        """Most tokens, prompt and new ones, that one sequence can ever have."""
        return min(self.max_model_len, self.pool_tokens)


def check_request(prompt: SequenceOf[int], params: SamplingParams, limits: Limits) -> SamplingParams:
    """Refuse what can never be served; return the params with max_tokens resolved.

    Raises ValidationError for ids outside the vocabulary or an empty prompt, ContextLengthError for what does not fit the
    context or the block pool even alone. O(prompt).
    """
    _check_ids("prompt", prompt, limits.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    _check_ids("logit_bias", tuple(params.logit_bias), limits.vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), limits.vocab_size)
    if not prompt:
        raise ValidationError("the prompt has no tokens; give at least one", param="prompt")
    new_tokens = params.max_tokens
    if new_tokens is None:
        new_tokens = max(limits.max_tokens - len(prompt), 1)
    _check_fits(len(prompt), new_tokens, limits)
    if params.min_tokens > new_tokens:
        raise ValidationError(
            f"min_tokens is {params.min_tokens}, but only {new_tokens} new tokens fit; lower it",
            param="min_tokens",
        )
    _check_choice(params, limits)
    return replace(params, max_tokens=new_tokens)


def finish_reason(sequence: Sequence, eos_token_ids: frozenset[int]) -> tuple[str, int | None] | None:
    """Why the sequence ends after its newest token, as (reason, stop token or None), or None if it goes on.

    Nothing but max_tokens ends a sequence before min_tokens.
    """
    params = sequence.request.params
    if sequence.num_generated and sequence.num_generated >= params.min_tokens:
        token = sequence.token_ids[-1]
        if token in params.stop_token_ids:
            return "stop", token
        if token in eos_token_ids and not params.ignore_eos:
            return "stop", None
    assert params.max_tokens is not None, "check_request() resolves max_tokens"
    if sequence.num_generated >= params.max_tokens:
        return "length", None
    return None


def _check_ids(name: str, ids: SequenceOf[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise ValidationError(f"{name} has token id {bad}; ids go from 0 to {vocab_size - 1:,}", param=name)


def _check_choice(params: SamplingParams, limits: Limits) -> None:
    """Some token must be possible while min_tokens forbids all that would end the sequence."""
    if not params.min_tokens:
        return
    ends = limits.eos_token_ids.union(params.stop_token_ids)
    allowed = params.allowed_token_ids
    if len(ends) >= limits.vocab_size or (allowed is not None and ends.issuperset(allowed)):
        raise ValidationError(
            f"min_tokens is {params.min_tokens}, but every allowed token ends the sequence; allow others or set it to 0",
            param="min_tokens",
        )


def _check_fits(prompt_tokens: int, new_tokens: int, limits: Limits) -> None:
    total = prompt_tokens + new_tokens
    asked = (
        f"the prompt has {prompt_tokens:,} tokens and {new_tokens:,} new ones are asked for, {total:,} in all"
    )
    if total > limits.max_model_len:
        raise ContextLengthError(
            f"{asked}; the context holds {limits.max_model_len:,}; shorten the prompt, lower max_tokens or raise"
            " --max-model-len",
            param="prompt",
        )
    if total > limits.pool_tokens:
        raise ContextLengthError(
            f"{asked}; the whole block pool holds {limits.pool_tokens:,}; shorten the prompt, lower max_tokens or give the"
            " server more memory with --kv-cache-gb",
            param="prompt",
        )
