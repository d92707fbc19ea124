"""What happened to one request: when its tokens came, what the server said it counted, and how it failed.

The client writes an outcome while its request runs; after that it is only read. All times are seconds since the start of
the run, from one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Delivery(NamedTuple):
    """Tokens of one sequence that came in one piece at `at_s`.

    num_tokens: how many, None if the server did not say. is_bare_end: it had no text, only the reason why the sequence
    ended; then it may or may not stand for a token.
    """

    at_s: float
    num_tokens: int | None = None
    is_bare_end: bool = False


@dataclass(kw_only=True)
class Outcome:
    """The result of one request.

    due_s: when it was to be sent; latencies count from here, so that a client that lags hides nothing. sent_s: when it was
    sent. deliveries: per sequence; empty if nothing was streamed. num_expected_tokens: new tokens of all sequences, None
    if the model may stop by itself. num_sent_tokens: prompt tokens, None if text was sent. The other counts are the
    server's own, None if it gave none.
    """

    request_id: str
    num_sequences: int = 1
    num_expected_tokens: int | None = None
    num_sent_tokens: int | None = None
    due_s: float
    sent_s: float
    done_s: float = 0.0
    deliveries: dict[int, list[Delivery]] = field(default_factory=dict)
    num_prompt_tokens: int | None = None
    num_reported_tokens: int | None = None
    num_cached_tokens: int | None = None
    text_digest: str = ""
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        """New tokens of all sequences: as the server counted them, else one for each delivery."""
        if self.num_reported_tokens is not None:
            return self.num_reported_tokens
        return sum(not piece.is_bare_end for pieces in self.deliveries.values() for piece in pieces)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt: as the server counted them, else as sent; 0 if neither is known."""
        return self.num_prompt_tokens or self.num_sent_tokens or 0

    def doubt(self) -> str | None:
        """Why a request that succeeded may not be what was meant to be measured, or None."""
        if self.error is not None:
            return None
        if self.num_reported_tokens is None:
            return "the server reports no usage; each delivery was counted as one token"
        if self.num_expected_tokens not in (None, self.num_reported_tokens):
            return f"{self.num_expected_tokens} new tokens were asked for, {self.num_reported_tokens} came"
        sent, seen = self.num_sent_tokens, self.num_prompt_tokens
        if sent is not None and seen is not None and sent != seen:
            return f"{sent} prompt tokens were sent, the server counted {seen}"
        num_pieces = sum(not piece.is_bare_end for pieces in self.deliveries.values() for piece in pieces)
        if num_pieces > self.num_reported_tokens:
            return (
                f"{num_pieces} pieces of text came, but only {self.num_reported_tokens} tokens were counted"
            )
        return None
