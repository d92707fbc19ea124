"""What comes back: the results of the offline API, and the pieces that the loop sends to its faces."""

from __future__ import annotations

from dataclasses import dataclass, field

# Token id -> log probability. The token in question comes first, then the alternatives from likely to unlikely.
TokenLogprobs = dict[int, float]


@dataclass
class CompletionOutput:
    """One sequence of a request.

    finish_reason is "stop" (end token, stop string or stop token), "length", or "abort". stop_reason is the stop string or
    the stop token id that ended it, None otherwise. logprobs has one entry per token of token_ids if asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    """The result of one prompt. `prompt` is None if it was given as token ids.

    num_cached_tokens: prompt tokens whose KV came from the prefix cache, exact to the token.
    prompt_logprobs: one entry per prompt token if asked for; the first is None, having no predecessor.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(frozen=True)
class RequestDelta:
    """What is new in one sequence of a request since the last delta, as a face sees it.

    text: new text, never half a character, and never part of a stop string. token_ids: the new tokens (all of them, also
    those whose text is held back or hidden). logprobs: one entry per new token, or None if not asked for.
    finish_reason: set on the last delta of the sequence. prompt_logprobs: set once, on the first delta of index 0.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True)
class EngineFacts:
    """What was found at start: the limits that faces check requests against, and the lines printed at start-up."""

    model: str
    architecture: str
    dtype: str
    attention_backend: str
    cpu_features: tuple[str, ...]
    num_threads: int
    weight_bytes: int
    block_size: int
    num_blocks: int
    block_bytes: int
    num_host_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    prefix_caching: bool
    preemption: str
    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    load_s: float
    quantization: str = "none"
    kv_cache_dtype: str = ""
    # Instruction set of the native kernels; empty if they do not compute. note: why they do not, if that needs saying.
    isa: str = ""
    batch_invariant: bool = False
    note: str = ""

    @property
    def pool_tokens(self) -> int:
        """Tokens that the whole block pool can hold."""
        return self.num_blocks * self.block_size
