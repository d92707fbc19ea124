"""The parts of a reply that both endpoints share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.outputs import RequestDelta, TokenLogprobs
from octavo.server.fields import IGNORED_HEADER
from octavo.server.schemas import GenerationBody


@dataclass(frozen=True)
class Frame:
    """What stands around the choices, the same in every chunk of a reply. object: "chat.completion" and so
    on.
    """

    object: str
    model: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A reply, or one chunk of it."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


class Usage:
    """Counts the tokens of a call: each prompt once, however many sequences it has, and every generated
    token.

    prompt_lengths: tokens of each prompt.
    """

    def __init__(self, prompt_lengths: Sequence[int]) -> None:
        self._prompt_tokens = sum(prompt_lengths)
        self._cached_tokens = [0] * len(prompt_lengths)
        self._completion_tokens = 0

    def add(self, prompt_index: int, delta: RequestDelta) -> None:
        """Count what is new."""
        self._completion_tokens += len(delta.token_ids)
        cached = self._cached_tokens
        cached[prompt_index] = max(cached[prompt_index], delta.num_cached_tokens)

    def body(self) -> dict[str, Any]:
        """The usage so far, in the form of the API."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
        }


class ScoreGate:
    """Holds the news of a prompt's sequences back until the scores of the prompt are known.

    They come with the first delta of sequence 0, but a sibling's delta may come before it, and its text has
    to begin with the prompt. Without scores to wait for, everything passes.
    """

    def __init__(self, *, wait: bool) -> None:
        self.scores: tuple[TokenLogprobs | None, ...] | None = None
        self._wait = wait
        self._held: list[RequestDelta] = []

    def pass_on(self, delta: RequestDelta) -> list[RequestDelta]:
        """`delta`, with all that was held before it; nothing if it has to wait itself."""
        if delta.prompt_logprobs is not None:
            self.scores = delta.prompt_logprobs
        self._held.append(delta)
        return [] if self._wait and self.scores is None else self.flush()

    def flush(self) -> list[RequestDelta]:
        """All that is held, also without scores: nothing more will come."""
        released, self._held = self._held, []
        return released


def new_id(prefix: str) -> str:
    """An id for a reply, such as cmpl-0123..."""
    return f"{prefix}-{uuid.uuid4().hex}"


def ignored_header(body: GenerationBody, ignored: Sequence[str], policy: str) -> dict[str, str]:
    """The header that names fields without effect, empty if there are none. policy: the scheduler's."""
    names = list(ignored)
    if body.priority is not None and policy != "priority":
        names.append("priority")
    return {IGNORED_HEADER: ", ".join(names)} if names else {}
