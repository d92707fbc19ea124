"""An engine without a model: it says what a test tells it to, and remembers what happened to it.

Its tokenizer has one token per byte, so that every character beyond ASCII is spread over several tokens, and three special
tokens after them. All of it lives on the event loop of the server under test; the events are for the test's own thread.
"""

from __future__ import annotations

import asyncio
import codecs
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.engine.messages import EngineStats, GenerateRequest
from octavo.engine.metrics import Metrics
from octavo.errors import ContextLengthError, EngineDeadError, ValidationError
from octavo.outputs import EngineFacts, RequestDelta, TokenLogprobs

SPECIAL = {"<|end|>": 256, "<|user|>": 257, "<|assistant|>": 258}
SPELLING = {token_id: text.encode() for text, token_id in SPECIAL.items()}
VOCAB_SIZE = 259
FACTS = EngineFacts(
    model="org/fake-model",
    architecture="fake",
    dtype="float32",
    attention_backend="none",
    cpu_features=(),
    num_threads=1,
    weight_bytes=0,
    block_size=16,
    num_blocks=64,
    block_bytes=1,
    num_host_blocks=0,
    max_model_len=512,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(256,),
    prefix_caching=True,
    preemption="recompute",
    policy="fcfs",
    max_num_seqs=8,
    max_num_batched_tokens=64,
    load_s=0.0,
)


class ByteTokenizer:
    """One token per byte, and three special ones."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (256,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.replace("\x04", "").encode())  # U+0004 has no token, as in some real vocabularies

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raw = b"".join(self.token_bytes(i) for i in ids if i < 256 or not skip_special_tokens)
        return raw.decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else SPELLING[token_id]

    def special_token_id(self, text: str) -> int | None:
        return SPECIAL.get(text)


@dataclass(frozen=True)
class Rendered:
    text: str
    token_ids: tuple[int, ...]


@dataclass
class FakeEngine:
    """An `EngineAPI`. What it does is set by the first fields.

    says: the text that every sequence generates; {index} stands for the sequence. Ends with "stop", or "length" if cut.
    pause_after: tokens of a sequence after which it waits for ever (0: it never begins). fail_after: likewise,
    but the engine dies. cached: prompt tokens that the prefix cache is said to have had.
    """

    says: str = "Hello, world"
    pause_after: int | None = None
    fail_after: int | None = None
    error: Exception = field(
        default_factory=lambda: EngineDeadError("the engine process ended: out of memory")
    )
    cached: int = 0
    reason_unwell: str | None = None
    facts: EngineFacts = FACTS
    # Written while it runs:
    stats: EngineStats = field(default_factory=EngineStats)
    metrics: Metrics = field(default_factory=Metrics)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    requests: list[GenerateRequest] = field(default_factory=list)
    num_active: int = 0
    num_closed_early: int = 0
    paused: threading.Event = field(default_factory=threading.Event)
    idle: threading.Event = field(default_factory=threading.Event)
    chat_options: dict[str, Any] = field(default_factory=dict)

    def health(self) -> str | None:
        return self.reason_unwell

    def check(self, request: GenerateRequest) -> GenerateRequest:
        params, facts = request.params, self.facts
        named = (
            *request.prompt_token_ids,
            *params.stop_token_ids,
            *params.logit_bias,
            *(params.allowed_token_ids or ()),
        )
        for token_id in named:
            if not 0 <= token_id < facts.vocab_size:
                raise ValidationError(f"token id {token_id} is not in the vocabulary", param="prompt")
        room = facts.max_model_len - len(request.prompt_token_ids)
        wanted = room if params.max_tokens is None else params.max_tokens
        if room < max(wanted, 1):
            raise ContextLengthError(
                f"prompt has {len(request.prompt_token_ids)} tokens, {wanted} are wanted; the limit is 512",
                param="prompt",
            )
        return replace(request, params=replace(params, max_tokens=wanted))

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Rendered:
        self.chat_options = options
        for i, message in enumerate(messages):
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise ValidationError(f"messages[{i}] has no role or content", param=f"messages[{i}]")
        if options["add_generation_prompt"] and options["continue_final_message"]:
            raise ValidationError(
                "continue_final_message excludes add_generation_prompt", param="continue_final_message"
            )
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return Rendered(text, (SPECIAL["<|user|>"], *text.encode(), SPECIAL["<|assistant|>"]))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestDelta, None]:
        self.requests.append(request)
        self.num_active += 1
        self.idle.clear()
        done = False
        try:
            # Step by step: one token of each sequence, the last sequence first, which is the least convenient order.
            sequences = [self._sequence(request, index) for index in reversed(range(request.params.n))]
            while sequences:
                for sequence in list(sequences):
                    delta = await anext(sequence)
                    yield delta
                    if delta.finish_reason:
                        sequences.remove(sequence)
            done = True
        finally:
            self.num_closed_early += not done
            self.num_active -= 1
            if not self.num_active:
                self.idle.set()

    async def _sequence(self, request: GenerateRequest, index: int) -> AsyncGenerator[RequestDelta, None]:
        params = request.params
        limit = params.max_tokens
        assert limit is not None
        wanted = self.says.replace("{index}", str(index)).encode()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        first = RequestDelta(index, "", num_cached_tokens=self.cached)
        if params.prompt_logprobs is not None and index == 0:
            scores = [self._entry(i, params.prompt_logprobs) for i in request.prompt_token_ids]
            first = replace(first, prompt_logprobs=(None, *scores[1:]))
        if limit == 0:
            yield replace(first, finish_reason="length")
            return
        for i, token_id in enumerate([*wanted, 256]):
            await self._trouble(i)
            stopped = token_id == 256
            reason = "stop" if stopped else "length" if i + 1 == limit else None
            text = "" if stopped else decoder.decode(bytes([token_id]), final=reason is not None)
            logprobs = None if params.logprobs is None else (self._entry(token_id, params.logprobs),)
            delta = replace(first, text=text, token_ids=(token_id,), logprobs=logprobs, finish_reason=reason)
            first = RequestDelta(index, "", num_cached_tokens=self.cached)
            yield delta
            if reason:
                return

    async def _trouble(self, num_tokens: int) -> None:
        if self.fail_after is not None and num_tokens >= self.fail_after:
            raise self.error
        if self.pause_after is not None and num_tokens >= self.pause_after:
            self.paused.set()
            await asyncio.Event().wait()

    @staticmethod
    def _entry(token_id: int, top: int) -> TokenLogprobs:
        others = {(token_id + 1 + i) % 256: -1.0 - i for i in range(top)}
        if top > 1:
            others[list(others)[-1]] = float("-inf")
        return {token_id: -0.5, **others}
