"""The plan of one step and what came of it: all that passes between deciding and computing.

    Scheduler.schedule(now) -> StepPlan -> Executor.execute -> StepResult -> Scheduler.commit

A plan is frozen and made of integers, so a CPU, a GPU, several machines, a simulator or a test can carry it out. An executor
does, in this order: forget `ended`, learn `started`, make every move of `moves` strictly in list order, then run one forward
pass over `items`. Moves run before any KV of the step is written, so a block that changes hands within one plan keeps its
old content until the moves that read it are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from octavo.outputs import TokenLogprobs
from octavo.sampling_params import SamplingParams


class MoveKind(Enum):
    """Where a block's content goes: within the pool, from pool to host store, from host store to pool."""

    COPY = "copy"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Copy the whole content of block `source` to block `target`; ids are of the store that `kind` implies."""

    kind: MoveKind
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A sequence that an executor meets for the first time; it keeps what sampling needs until the sequence ends.

    seed: the derived seed of this sequence; with the position of a token it fixes the random number of that token.
    """

    sequence_id: int
    params: SamplingParams
    prompt_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class PlanItem:
    """Compute tokens [start, start + len(token_ids)) of a sequence, whose KV goes where `block_ids` says.

    block_ids: the block table, long enough for every position up to start + len(token_ids).
    sample: the item reaches the last known token, so a new token is chosen after it.
    prompt_logprobs: if not None, report for each computed prompt position that has a successor in the prompt the log
        probability of that successor (with so many alternatives).
    """

    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    sample: bool
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does. An empty plan (`not plan.items and not plan.moves`) may still end sequences."""

    step: int
    items: tuple[PlanItem, ...]
    moves: tuple[BlockMove, ...] = ()
    started: tuple[SequenceStart, ...] = ()
    ended: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)

    @property
    def has_work(self) -> bool:
        return bool(self.items or self.moves or self.ended)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token. logprobs: the token first, then the alternatives; None if the request did not ask.

    error: why no token could be chosen (every token forbidden, logits not finite); token_id is then -1 and only this
    sequence ends.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, by sequence id.

    prompt_logprobs[id][i] belongs to the prompt token at position item.start + 1 + i. compute_s: seconds that the forward
    pass and the choice of tokens took, as far as the executor knows; what a step takes beyond is the host's.
    """

    sampled: dict[int, SampledToken]
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]]
    compute_s: float = 0.0


class Executor(Protocol):
    """Carries out plans. One of the few seams: CPU, GPU, distributed, simulated and fake executors are alike here."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Do all of `plan`; return a token for each item with `sample`."""
        ...
