"""What is done to logits before a token is chosen: bias, allowed ids, penalties, tokens banned for now.

Each sequence keeps its edits sparse, as token ids with values, built once when it starts; only the counts
for penalties grow with the output, one entry per distinct token. 64 sequences over 49,152 tokens with 1,000
distinct tokens each hold 1.5 MB, where dense counts would hold 25 MB. A step joins the ids of all its rows
and does each kind of edit in one indexed operation.

Order of edits: logit_bias, allowed_token_ids, repetition penalty, presence and frequency penalty, ban of end
tokens while min_tokens is not reached.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.random_stream import uniform
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import SequenceStart

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
_FIRST_CAPACITY = 64


class TokenCounts:
    """Distinct tokens of a sequence and how often each was generated. Tokens of the prompt may be in with
    count 0."""

    def __init__(self, prompt_token_ids: Iterable[int] = ()) -> None:
        seen = list(dict.fromkeys(prompt_token_ids))
        self._places = {token: place for place, token in enumerate(seen)}
        self._ids: Ids = np.zeros(len(seen) + _FIRST_CAPACITY, np.int64)
        self._ids[: len(seen)] = seen
        self._counts: Floats = np.zeros(len(self._ids), np.float32)

    def add(self, token_id: int) -> None:
        """Count one generated token. Amortised O(1)."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token_id
        self._counts[place] += 1

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Floats:
        """How often each of `ids` was generated."""
        return self._counts[: len(self._places)]


class SequenceState:
    """What sampling keeps of one sequence from its start to its end; `record` is the only writer.

    fault: why no token of this sequence can ever be chosen; None as a rule.
    """

    def __init__(self, start: SequenceStart, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        params = start.params
        self.params: SamplingParams = params
        self.seed = start.seed
        self.num_generated = 0
        self.fault = _fault(start, vocab_size)
        # Ids that are at fault may not even fit the arrays, and are never used.
        biases = {} if self.fault else params.logit_bias
        self.bias_ids: Ids = np.fromiter(biases.keys(), np.int64)
        self.biases: Floats = np.fromiter(biases.values(), np.float32)
        self.allowed_ids: Ids | None = None
        if params.allowed_token_ids is not None and not self.fault:
            self.allowed_ids = np.unique(np.asarray(params.allowed_token_ids, np.int64))
        # A stop token beyond the vocabulary is never generated, so it needs no ban.
        stops = {token for token in (*eos_token_ids, *params.stop_token_ids) if token < vocab_size}
        self._stop_ids: Ids = np.asarray(sorted(stops), np.int64)
        self.counts: TokenCounts | None = None
        if params.has_penalties and not self.fault:
            self.counts = TokenCounts(start.prompt_token_ids if params.repetition_penalty != 1 else ())

    @property
    def banned_ids(self) -> Ids:
        """Tokens that must not be chosen now."""
        return self._stop_ids if self.num_generated < self.params.min_tokens else self._stop_ids[:0]

    @property
    def is_edited(self) -> bool:
        """Whether the next token is chosen from other logits than the model's."""
        return (
            self.counts is not None
            or len(self.bias_ids) > 0
            or self.allowed_ids is not None
            or self.num_generated < self.params.min_tokens
        )

    def uniform(self) -> float:
        """The random number of the next token."""
        return uniform(self.seed, self.num_generated)

    def record(self, token_id: int) -> None:
        """Take `token_id` as the next token of the output."""
        self.num_generated += 1
        if self.counts is not None:
            self.counts.add(token_id)


def edit(rows: Tensor, states: Sequence[SequenceState]) -> None:
    """Change `rows`, float32 [R, V] and contiguous, as the parameters of `states` (one per row) ask."""
    if any(len(state.bias_ids) for state in states):
        _add_biases(rows, states)
    if any(state.allowed_ids is not None for state in states):
        _keep_allowed(rows, states)
    if any(state.counts is not None for state in states):
        _penalise(rows, states)
    banned = _flat_ids(rows, states, lambda state: state.banned_ids)
    if len(banned):
        rows.view(-1)[banned] = -torch.inf


def _add_biases(rows: Tensor, states: Sequence[SequenceState]) -> None:
    at = _flat_ids(rows, states, lambda state: state.bias_ids)
    biases = np.concatenate([state.biases for state in states])
    rows.view(-1)[at] += torch.from_numpy(biases).to(rows.device)


def _keep_allowed(rows: Tensor, states: Sequence[SequenceState]) -> None:
    none = np.zeros(0, np.int64)
    at = _flat_ids(rows, states, lambda state: none if state.allowed_ids is None else state.allowed_ids)
    kept = rows.view(-1)[at]
    rows[[row for row, state in enumerate(states) if state.allowed_ids is not None]] = -torch.inf
    rows.view(-1)[at] = kept


def _penalise(rows: Tensor, states: Sequence[SequenceState]) -> None:
    pairs = [
        (row, state.params, state.counts) for row, state in enumerate(states) if state.counts is not None
    ]
    lengths = [len(counts.ids) for _, _, counts in pairs]
    vocab_size = rows.shape[1]
    at = np.concatenate([counts.ids + row * vocab_size for row, _, counts in pairs])
    generated = np.concatenate([counts.counts for _, _, counts in pairs])
    settings = np.array(
        [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for _, p, _ in pairs], np.float32
    )
    repetition, presence, frequency = np.repeat(settings, lengths, axis=0).T
    offsets = torch.from_numpy(presence * (generated > 0) + frequency * generated).to(rows.device)
    factors = torch.from_numpy(np.ascontiguousarray(repetition)).to(rows.device)
    where = torch.from_numpy(at).to(rows.device)
    old = rows.view(-1)[where]
    rows.view(-1)[where] = torch.where(old > 0, old / factors, old * factors) - offsets


def _flat_ids(rows: Tensor, states: Sequence[SequenceState], ids: Callable[[SequenceState], Ids]) -> Tensor:
    """Where the ids of all states lie in `rows.view(-1)`."""
    vocab_size = rows.shape[1]
    parts = [ids(state) + row * vocab_size for row, state in enumerate(states)]
    return torch.from_numpy(np.concatenate(parts)).to(rows.device)


def _fault(start: SequenceStart, vocab_size: int) -> str | None:
    """A token id in the parameters or the prompt that this vocabulary does not have."""
    named = (
        ("logit_bias", start.params.logit_bias),
        ("allowed_token_ids", start.params.allowed_token_ids or ()),
        ("the prompt", start.prompt_token_ids if start.params.repetition_penalty != 1 else ()),
    )
    for name, ids in named:
        worst = max(ids, default=-1)
        if worst >= vocab_size:
            limit = f"the vocabulary ends at {vocab_size - 1:,}"
            return f"{name} has token id {worst:,}; {limit}; use ids of this model"
    return None
