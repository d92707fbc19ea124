"""Requests and sequences: what the scheduler moves about, and the one table of legal states.

A *request* is what a client asked; a *sequence* is one continuation of it (n=3: three). A sequence has no phase: it knows
`num_tokens` tokens and has computed the KV of `num_computed` of them, and a step closes that gap. Prefill, decode, a chunk,
a prefix hit and resuming after preemption are values of these two numbers.

    WAITING --admit--> RUNNING --last token--> FINISHED(reason)
       ^                 |  ^
       |    recompute    |  | swapped in
       +-----------------+  |
                         +-----> SWAPPED            any state --abort--> FINISHED("abort")
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from octavo.memory.block_pool import BlockPool
from octavo.memory.block_table import BlockTable
from octavo.memory.prefix_cache import BlockKey, block_key
from octavo.outputs import TokenLogprobs
from octavo.sampling_params import SamplingParams


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    RECEIVING = "receiving"
    FINISHED = "finished"


_S = SequenceState
LEGAL_MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    _S.WAITING: frozenset({_S.RUNNING, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.WAITING, _S.SWAPPED, _S.FINISHED}),
    _S.SWAPPED: frozenset({_S.RUNNING, _S.FINISHED}),
    _S.RECEIVING: frozenset({_S.RUNNING, _S.FINISHED}),
    _S.FINISHED: frozenset(),
}


@dataclass
class Request:
    """What a client asked, as the scheduler sees it. The scheduler writes `sequences` and `prompt_computed`.

    priority: lower goes first. root: the key that the chain of its blocks begins with. seeds: one per sequence.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seeds: tuple[int, ...]
    root: BlockKey = b""
    priority: int = 0
    arrival_s: float = 0.0
    sequences: list[Sequence] = field(default_factory=list)
    # Set when any of the sequences has computed the whole prompt; its siblings wait for that to share it.
    prompt_computed: bool = False

    @property
    def finished(self) -> bool:
        return all(sequence.state is SequenceState.FINISHED for sequence in self.sequences)


class Sequence:
    """One continuation of a request. Written by the scheduler only.

    token_ids: prompt, then generated tokens. num_computed: tokens whose KV lies in the block table (or, while SWAPPED, in
    the host blocks). order: arrival number, unique, so that ranks never tie.
    """

    def __init__(self, sequence_id: int, request: Request, index: int, order: int, pool: BlockPool) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.index = index
        self.seed = request.seeds[index]
        self.order = order
        self.state = SequenceState.WAITING
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.num_computed = 0
        self.table = BlockTable(pool)
        self.host_block_ids: list[int] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.num_cached: int | None = None
        self.num_preemptions = 0
        # Tokens whose KV existed when the sequence was last preempted: computing them again is waste, and is counted.
        self.lost_tokens = 0
        self.num_published = 0
        self._block_size = pool.block_size
        self._keys: list[BlockKey] = []

    def __repr__(self) -> str:
        return f"<{self.request.request_id}/{self.index} {self.state.value} {self.num_computed}/{self.num_tokens}>"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def gap(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Prompt scores are asked for and not complete: every prompt position must then be computed, not found."""
        asked = self.request.params.prompt_logprobs is not None and self.index == 0
        return asked and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def keys(self) -> list[BlockKey]:
        """Keys of the full blocks of token_ids, extended as tokens come. O(new full blocks)."""
        size = self._block_size
        for i in range(len(self._keys), len(self.token_ids) // size):
            self._keys.append(block_key(self.parent_key(i), self.block_tokens(i)))
        return self._keys

    def parent_key(self, index: int) -> BlockKey:
        """The key of the block before logical block `index`."""
        return self._keys[index - 1] if index else self.request.root

    def block_tokens(self, index: int) -> list[int]:
        """The tokens of full logical block `index`."""
        return self.token_ids[index * self._block_size : (index + 1) * self._block_size]

    def move_to(self, state: SequenceState) -> None:
        """Change state. An illegal move is a bug of ours and raises at once."""
        if state not in LEGAL_MOVES[self.state]:
            raise RuntimeError(f"{self!r} cannot become {state.value}")
        self.state = state


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """What a step (or an abort) brought for one sequence: news for whoever asked.

    finish_reason: "stop", "length", "abort" or "error" (with `error`), None while it goes on. stop_reason: the stop token.
    prompt_logprobs: complete, on the first event of index 0, if asked for.
    """

    sequence: Sequence
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
