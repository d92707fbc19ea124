"""What the HTTP server needs of an engine, and nothing more.

The routes are written against `EngineAPI`; the real client talks to the engine process, the tests bring a
fake one. The small protocols beside it say what the server needs of the text layer, so that this package
never imports a tokenizer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any, Protocol

from octavo.engine.messages import EngineStats, GenerateRequest
from octavo.engine.metrics import Metrics
from octavo.outputs import EngineFacts, RequestDelta


class TokenizerAPI(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; every valid id is below it."""
        ...

    @property
    def eos_token_ids(self) -> Collection[int]:
        """Ids that end a text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`."""
        ...

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token on its own, as text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """One token on its own, as bytes; several tokens may share the bytes of one character."""
        ...

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token spelled `text`, None if there is none."""
        ...


class ChatPromptAPI(Protocol):
    """A rendered conversation."""

    @property
    def text(self) -> str:
        """What the template made of it."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The same as token ids."""
        ...


class EngineAPI(Protocol):
    """The engine as the server sees it. All methods are called on the event loop of the server."""

    @property
    def facts(self) -> EngineFacts:
        """What was found at start."""
        ...

    @property
    def tokenizer(self) -> TokenizerAPI:
        """The model's tokenizer; safe to use from several threads."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The latest numbers of the engine."""
        ...

    @property
    def metrics(self) -> Metrics:
        """The page behind `/metrics`."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestDelta, None]:
        """Run a checked request; yields the news of all its sequences until each has a finish_reason.

        Closing the generator early aborts the request in the engine.
        Raises OctavoError subclasses at the first step (nothing ran) or later (the engine died).
        """
        ...

    def check(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with max_tokens resolved.

        Raises ValidationError or a subclass if it can never be served.
        """
        ...

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`tokenizer.encode` in a worker thread, so that a long text does not stall the event loop."""
        ...

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ChatPromptAPI:
        """Apply the chat template in a worker thread. Raises ValidationError for messages it cannot render."""
        ...

    def health(self) -> str | None:
        """None if the engine is well, else the reason in one line."""
        ...
