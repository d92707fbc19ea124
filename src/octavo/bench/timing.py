"""The times of one request, defined once.

    due        sent     first              last      done
     |----------|---------|----|--|----|-----|---------|
     |<----- TTFT ------->|<-- (tokens - 1) * TPOT ->|
     |<------------------- latency ------------------->|

TTFT: from when the request was due to its first token. TPOT: (last - first) / (tokens - 1), the mean over the sequences of
the request. ITL: the gap between two deliveries of a sequence; if a delivery carries k tokens, gap / k, k times. If the
server does not say how many tokens each delivery carries, the reported total is spread over them as evenly as whole
numbers allow. Latency: from due to the end of the reply.
"""

from __future__ import annotations

from itertools import pairwise

from octavo.bench.outcome import Delivery, Outcome


def ttft_s(outcome: Outcome) -> float | None:
    """Seconds to the first token; None if the request failed or was not streamed."""
    if outcome.error is not None or not any(outcome.deliveries.values()):
        return None
    return min(pieces[0].at_s for pieces in outcome.deliveries.values() if pieces) - outcome.due_s


def latency_s(outcome: Outcome) -> float | None:
    """Seconds to the end of the reply; None if the request failed."""
    return None if outcome.error is not None else outcome.done_s - outcome.due_s


def tpot_s(outcome: Outcome) -> float | None:
    """Mean seconds between tokens of a sequence; None if it failed, was not streamed or has fewer than two tokens."""
    num_tokens = outcome.num_output_tokens / outcome.num_sequences
    if outcome.error is not None or num_tokens < 2:
        return None
    each = [
        (pieces[-1].at_s - pieces[0].at_s) / (num_tokens - 1)
        for pieces in _token_deliveries(outcome)
        if pieces
    ]
    return sum(each) / len(each) if each else None


def itl_s(outcome: Outcome) -> list[float]:
    """The gaps before all tokens but the first delivery's, of all sequences. Empty if the request failed."""
    if outcome.error is not None:
        return []
    gaps: list[float] = []
    num_tokens = outcome.num_output_tokens // outcome.num_sequences
    for pieces in _token_deliveries(outcome):
        counts = _token_counts(pieces, num_tokens)
        for i in range(1, len(pieces)):
            if counts[i]:
                gaps += [(pieces[i].at_s - pieces[i - 1].at_s) / counts[i]] * counts[i]
    return gaps


def _token_deliveries(outcome: Outcome) -> list[list[Delivery]]:
    """The deliveries of each sequence that stand for tokens.

    A bare end is a token without text if fewer pieces came than there are tokens; else it only closes the reply.
    """
    num_tokens = outcome.num_output_tokens // outcome.num_sequences
    return [
        pieces[:-1] if pieces and pieces[-1].is_bare_end and len(pieces) > num_tokens else pieces
        for pieces in outcome.deliveries.values()
    ]


def _token_counts(pieces: list[Delivery], num_tokens: int) -> list[int]:
    """Tokens of each delivery: as told, else `num_tokens` spread evenly, else one each."""
    told = [piece.num_tokens for piece in pieces if piece.num_tokens is not None]
    if len(told) == len(pieces):
        return told
    if num_tokens < len(pieces):
        return [1] * len(pieces)
    edges = [i * num_tokens // len(pieces) for i in range(len(pieces) + 1)]
    return [after - before for before, after in pairwise(edges)]
