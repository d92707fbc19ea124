"""From logits to tokens: one token per sequence and step, chosen as the parameters of its request say.

    logits -> bias, allowed ids, penalties, min_tokens -> the greatest                               (greedy)
                                                       -> temperature, top-k, min-p, top-p -> draw  (random)

Greedy takes the greatest edited logit; of equal ones the lowest id. Rows that are greedy and not edited
share one pass over all logits and nothing else. The others are worked on in slices of a few rows, so extra
memory does not grow with the batch.

A token depends on its row of logits, the parameters, the seed and the number of tokens generated before: not
on neighbours, their order, the size of the batch or preemption. `random_stream.py` gives the random number,
`weights.py` tells why sums are exact.

What is wrong with one row ends that sequence alone, as `SampledToken.error`.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.outputs import TokenLogprobs
from octavo.sampling.choice import Draw
from octavo.sampling.edits import SequenceState, edit
from octavo.sampling.logprobs import prompt_logprobs, token_logprobs
from octavo.sampling.row_math import RowMath
from octavo.sampling.weights import take
from octavo.scheduler.plan import SampledToken, SequenceStart

__all__ = ["Sampler", "prompt_logprobs"]

# Rows that are edited or drawn at random are worked on so many logits at a time: 16 MiB for a copy.
_SLICE_ELEMENTS = 2**22
_NO_TOKEN = -1
_NOT_FINITE = (
    "the model's logits are not finite (NaN or infinite); try --dtype float32 and check the model's files"
)
_ALL_FORBIDDEN = (
    "every token is forbidden; allow one that allowed_token_ids, min_tokens and stop_token_ids leave possible"
)


class Sampler:
    """Chooses tokens and keeps, for every living sequence, what the next choice depends on.

    vocab_size: V, the width of logits. eos_token_ids: tokens that end a sequence, banned until min_tokens
    are generated. row_math: what passes over whole rows, in torch or natively.
    """

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], row_math: RowMath = RowMath()
    ) -> None:
        self.vocab_size = vocab_size
        self._row_math = row_math
        self.eos_token_ids = tuple(eos_token_ids)
        self._states: dict[int, SequenceState] = {}

    def start(self, sequence: SequenceStart) -> None:
        """Learn a sequence that has generated nothing yet. Cost: O(prompt) if a repetition penalty is set."""
        self._states[sequence.sequence_id] = SequenceState(sequence, self.vocab_size, self.eos_token_ids)

    def end(self, sequence_id: int) -> None:
        """Forget a sequence; one that is not known is fine."""
        self._states.pop(sequence_id, None)

    def takes_best(self, sequence_id: int) -> bool:
        """Is the next token of a sequence the greatest logit, and nothing more asked about it? Then `take_best` will do."""
        state = self._states[sequence_id]
        params = state.params
        return params.greedy and params.logprobs is None and not state.fault and not state.is_edited

    def take_best(
        self, values: Sequence[float], token_ids: Sequence[int], sequence_ids: Sequence[int]
    ) -> list[SampledToken]:
        """As `sample`, for sequences that `takes_best` is true of, from the greatest logit of each and its lowest id.

        A value that is not finite ends the sequence with an error.
        """
        sampled: list[SampledToken] = []
        for value, token, sequence_id in zip(values, token_ids, sequence_ids, strict=True):
            if not math.isfinite(value):
                sampled.append(SampledToken(_NO_TOKEN, None, _NOT_FINITE))
                continue
            self._states[sequence_id].record(token)
            sampled.append(SampledToken(token))
        return sampled

    def prompt_logprobs(
        self, logits: Tensor, target_ids: Sequence[int], num_alternatives: int
    ) -> tuple[TokenLogprobs, ...]:
        """`logprobs.prompt_logprobs`, with the same passes over rows as the log probabilities of new tokens."""
        return prompt_logprobs(logits, target_ids, num_alternatives, self._row_math)

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequence_ids: Sequence[int]) -> list[SampledToken]:
        """Choose the next token of each sequence and remember it.

        logits: float32 [R, V], not changed. sequence_ids: R distinct ids of started sequences, one per row.
        """
        assert logits.shape == (len(sequence_ids), self.vocab_size), f"logits are {tuple(logits.shape)}"
        assert logits.dtype == torch.float32, f"logits are {logits.dtype}"
        if not sequence_ids:
            return []
        states = [self._states[sequence_id] for sequence_id in sequence_ids]
        peaks, best = self._row_math.greatest(logits)
        tokens: list[int] = best.tolist()
        errors = {
            row: state.fault or _NOT_FINITE
            for row, (state, peak) in enumerate(zip(states, peaks.tolist(), strict=True))
            if state.fault or not math.isfinite(peak)
        }
        busy = [
            row
            for row, state in enumerate(states)
            if row not in errors and (state.is_edited or not state.params.greedy)
        ]
        step = max(1, _SLICE_ELEMENTS // self.vocab_size)
        for start in range(0, len(busy), step):
            self._choose_slice(logits, peaks, states, busy[start : start + step], tokens, errors)
        for row, state in enumerate(states):
            if row not in errors:
                state.record(tokens[row])
        logprobs = self._logprobs(logits, peaks, states, tokens, errors)
        return [
            SampledToken(_NO_TOKEN, None, errors[row])
            if row in errors
            else SampledToken(token, logprobs.get(row))
            for row, token in enumerate(tokens)
        ]

    def _choose_slice(
        self,
        logits: Tensor,
        peaks: Tensor,
        states: Sequence[SequenceState],
        members: list[int],
        tokens: list[int],
        errors: dict[int, str],
    ) -> None:
        """Choose for the rows `members`; write their `tokens` or `errors`."""
        chosen = [states[row] for row in members]
        edited = any(state.is_edited for state in chosen)
        rows = take(logits, members)
        if edited:
            rows = rows.clone(memory_format=torch.contiguous_format)
            edit(rows, chosen)
            edited_peaks, best = self._row_math.greatest(rows)
            for row, token, peak in zip(members, best.tolist(), edited_peaks.tolist(), strict=True):
                tokens[row] = token
                if not math.isfinite(peak):
                    errors[row] = _ALL_FORBIDDEN if peak == -math.inf else _NOT_FINITE
        else:
            edited_peaks = take(peaks, members)
        drawn = [i for i, row in enumerate(members) if row not in errors and not chosen[i].params.greedy]
        if not drawn:
            return
        if len(drawn) < len(members):
            rows, edited_peaks = take(rows, drawn), take(edited_peaks, drawn)
        draws = [Draw(chosen[i].params, chosen[i].uniform()) for i in drawn]
        for i, token in zip(drawn, self._row_math.choose(rows, edited_peaks, draws), strict=True):
            tokens[members[i]] = token

    def _logprobs(
        self,
        logits: Tensor,
        peaks: Tensor,
        states: Sequence[SequenceState],
        tokens: list[int],
        errors: dict[int, str],
    ) -> dict[int, TokenLogprobs]:
        """The log probabilities of the rows that asked for them, by row."""
        counts = {
            row: state.params.logprobs
            for row, state in enumerate(states)
            if row not in errors and state.params.logprobs is not None
        }
        if not counts:
            return {}
        members = list(counts)
        chosen = [tokens[row] for row in members]
        found = token_logprobs(
            take(logits, members), chosen, list(counts.values()), take(peaks, members), self._row_math
        )
        return dict(zip(members, found, strict=True))
