"""From tokens to text: what a face does with the engine's updates of one request.

The engine deals in token ids. Text, stop strings and half-finished characters are looked after here, on the face's side, so
that they never cost a step any time. The offline API and the HTTP server use the same code.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.engine.messages import GenerateRequest, SequenceUpdate
from octavo.outputs import RequestDelta, TokenLogprobs
from octavo.text.detokenizer import Detokenizer
from octavo.text.stop_strings import StopStrings
from octavo.text.tokenizer import Tokenizer


def with_special_stops(request: GenerateRequest, tokenizer: Tokenizer) -> GenerateRequest:
    """Let a stop string that spells a special token stop at that token, whose text is hidden and could never match."""
    special = {tokenizer.special_token_id(text) for text in request.params.stop_strings} - {None}
    if not special:
        return request
    ids = tuple(dict.fromkeys([*request.params.stop_token_ids, *(i for i in special if i is not None)]))
    return replace(request, params=replace(request.params, stop_token_ids=ids))


class RequestStream:
    """Turns the updates of one request into deltas, for all its sequences."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer) -> None:
        self._sequences = [_SequenceText(request, index, tokenizer) for index in range(request.params.n)]
        self._prompt_logprobs_due = request.params.prompt_logprobs is not None

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self._sequences)

    def feed(self, update: SequenceUpdate) -> RequestDelta | None:
        """The delta of one update; None for news of a sequence that has ended already (a stop string came first)."""
        sequence = self._sequences[update.index]
        if sequence.finished:
            return None
        delta = sequence.feed(update)
        if update.prompt_logprobs is not None and self._prompt_logprobs_due:
            self._prompt_logprobs_due = False
            scores: tuple[TokenLogprobs | None, ...] = (None, *update.prompt_logprobs)
            delta = replace(delta, prompt_logprobs=scores)
        return delta


class _SequenceText:
    def __init__(self, request: GenerateRequest, index: int, tokenizer: Tokenizer) -> None:
        params = request.params
        self._params = params
        self._index = index
        self._tokens = 0
        self._special_stops = {
            token_id: text
            for text in params.stop_strings
            if (token_id := tokenizer.special_token_id(text)) is not None
        }
        self._text = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            prompt_token_ids=request.prompt_token_ids,
        )
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self.finished = False

    def feed(self, update: SequenceUpdate) -> RequestDelta:
        pieces: list[str] = []
        matched: str | None = None
        taken = 0
        for position, token in enumerate(update.token_ids):
            taken += 1
            is_end = update.finish_reason == "stop" and position == len(update.token_ids) - 1
            if not is_end or self._shows_end(update):
                matched = self._push(self._text.push(token), pieces)
            self._tokens += 1
            if matched is not None:
                break
        if matched is None and update.finish_reason is not None:
            matched = self._push(self._text.flush(), pieces)
            if matched is None:
                pieces.append(self._stops.flush())
        reason = "stop" if matched is not None else update.finish_reason
        self.finished = reason is not None
        return RequestDelta(
            index=self._index,
            text="".join(pieces),
            token_ids=update.token_ids[:taken],
            logprobs=update.logprobs[:taken] if update.logprobs is not None else None,
            finish_reason=reason,
            stop_reason=matched if matched is not None else self._stop_reason(update),
            num_cached_tokens=update.num_cached_tokens,
        )

    def _push(self, text: str, pieces: list[str]) -> str | None:
        # Text of the first min_tokens tokens cannot stop anything.
        enough = self._tokens + 1 >= self._params.min_tokens
        emitted, matched = self._stops.push(text, matching=enough)
        pieces.append(emitted)
        return matched

    def _shows_end(self, update: SequenceUpdate) -> bool:
        return self._params.include_stop_str_in_output and update.stop_reason is not None

    def _stop_reason(self, update: SequenceUpdate) -> str | int | None:
        reason = update.stop_reason
        return reason if reason is None else self._special_stops.get(reason, reason)
