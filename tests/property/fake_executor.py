"""An executor without a model that keeps KV memory honest: it stores, for every slot, which prefix was computed into it.

The "KV" of position p is a number that stands for the root and all tokens 0..p, so two slots hold the same number exactly
when their prefixes are the same. Before an item is computed, every earlier position of its block table must hold the number
of the item's own prefix: that is what a real model would attend to, so a plan that passes cannot change an answer. The next
token is a plain function of all tokens so far and the seed; `expected_output` computes it without blocks, batches or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from octavo.outputs import TokenLogprobs
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import MoveKind, PlanItem, SampledToken, SequenceStart, StepPlan, StepResult

FAILURE = "no token can be chosen"


def next_token(token_ids: Sequence[int], seed: int, vocab_size: int) -> int:
    """The token after `token_ids`; -1 stands for a failure to choose one (a few seeds and lengths fail)."""
    number = crc32(bytes(token_ids), seed)
    if seed % 16 == 13 and number % 8 == 0:
        return -1
    return (number >> 7) % vocab_size


def score_of(token_ids: Sequence[int]) -> TokenLogprobs:
    """The "log probability" of the last token, given those before it."""
    return {token_ids[-1]: -float(crc32(bytes(token_ids)) % 1000)}


def expected_output(
    prompt: Sequence[int], params: SamplingParams, seed: int, vocab_size: int, eos: frozenset[int]
) -> tuple[tuple[int, ...], str, int | None]:
    """New tokens, finish reason and stop token of a sequence that runs alone, by the rules of the API alone."""
    assert params.max_tokens is not None
    new: list[int] = []
    while len(new) < params.max_tokens:
        token = next_token((*prompt, *new), seed, vocab_size)
        if token < 0:
            return tuple(new), "error", None
        new.append(token)
        if len(new) < params.min_tokens:
            continue
        if token in params.stop_token_ids:
            return tuple(new), "stop", token
        if token in eos and not params.ignore_eos:
            return tuple(new), "stop", None
    return tuple(new), "length", None


class PrefixNumbers:
    """Numbers for prefixes: equal prefixes (with equal roots), and only these, have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int | bytes, int], int] = {}

    def root(self, root: bytes) -> int:
        return self._number((root, -1))

    def after(self, prefix: int, token: int) -> int:
        return self._number((prefix, token))

    def _number(self, name: tuple[int | bytes, int]) -> int:
        return self._numbers.setdefault(name, len(self._numbers))


@dataclass
class Known:
    """What the executor remembers of a sequence, and writes. chain[p]: number of the prefix that ends with position p.

    num_computed: the most tokens it ever had computed, counted without what it found or shared.
    """

    params: SamplingParams
    num_prompt: int
    seed: int
    root: int
    token_ids: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    num_computed: int = 0


class FakeExecutor:
    """Carries out plans on blocks of prefix numbers, and refuses every plan that a model could not be given.

    roots: seed -> root key of the sequence with this seed (a plan does not carry it); the caller writes it.
    first_start: sequence id -> where its first item began. recomputed: tokens computed more than once by one sequence.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int, vocab_size: int) -> None:
        self.pool: list[list[int]] = [[-1] * block_size for _ in range(num_blocks)]
        self.host: list[list[int]] = [[-1] * block_size for _ in range(num_host_blocks)]
        self.numbers = PrefixNumbers()
        self.roots: dict[int, bytes] = {}
        self.known: dict[int, Known] = {}
        self.first_start: dict[int, int] = {}
        self.recomputed = 0
        self._size = block_size
        self._vocab_size = vocab_size

    def execute(self, plan: StepPlan) -> StepResult:
        for sequence_id in plan.ended:
            del self.known[sequence_id]
        for start in plan.started:
            self._learn(start)
        for move in plan.moves:
            source = self.host if move.kind is MoveKind.SWAP_IN else self.pool
            target = self.host if move.kind is MoveKind.SWAP_OUT else self.pool
            target[move.target] = list(source[move.source])
        slots: set[tuple[int, int]] = set()
        # Checked before anything is written: an item must not need what another one of the same step computes ...
        for item in plan.items:
            self._verify(item)
            self._verify_context(item, item.start)
        for item in plan.items:
            self._write(item, slots)
        # ... and after: nor may another one overwrite what it needs.
        for item in plan.items:
            self._verify_context(item, item.start + len(item.token_ids))
            self._count(item)
        sampled = {item.sequence_id: self._sample(item) for item in plan.items if item.sample}
        scores = {
            item.sequence_id: self._scores(item) for item in plan.items if item.prompt_logprobs is not None
        }
        return StepResult(sampled, scores)

    def chain_numbers(self, root: bytes, token_ids: Sequence[int]) -> list[int]:
        """What the slots of these tokens must hold."""
        numbers, prefix = [], self.numbers.root(root)
        for token in token_ids:
            prefix = self.numbers.after(prefix, token)
            numbers.append(prefix)
        return numbers

    def _learn(self, start: SequenceStart) -> None:
        assert start.sequence_id not in self.known, "a sequence started twice"
        known = Known(
            start.params,
            len(start.prompt_token_ids),
            start.seed,
            self.numbers.root(self.roots[start.seed]),
        )
        self.known[start.sequence_id] = known
        for token in start.prompt_token_ids:
            self._append(known, token)

    def _append(self, known: Known, token: int) -> None:
        before = known.chain[-1] if known.chain else known.root
        known.token_ids.append(token)
        known.chain.append(self.numbers.after(before, token))

    def _verify(self, item: PlanItem) -> None:
        known = self.known[item.sequence_id]
        end = item.start + len(item.token_ids)
        assert item.token_ids and tuple(known.token_ids[item.start : end]) == item.token_ids
        assert len(item.block_ids) * self._size >= end, "the block table is too short"
        assert item.sample == (end == len(known.token_ids) and known.params.max_tokens != 0)

    def _verify_context(self, item: PlanItem, end: int) -> None:
        chain = self.known[item.sequence_id].chain
        for position in range(end):
            held = self.pool[item.block_ids[position // self._size]][position % self._size]
            assert held == chain[position], f"{item}: position {position} holds the KV of another prefix"

    def _count(self, item: PlanItem) -> None:
        known, end = self.known[item.sequence_id], item.start + len(item.token_ids)
        self.first_start.setdefault(item.sequence_id, item.start)
        self.recomputed += max(0, min(end, known.num_computed) - item.start)
        known.num_computed = max(known.num_computed, end)

    def _write(self, item: PlanItem, slots: set[tuple[int, int]]) -> None:
        chain = self.known[item.sequence_id].chain
        for position in range(item.start, item.start + len(item.token_ids)):
            slot = item.block_ids[position // self._size], position % self._size
            assert slot not in slots, f"two items write slot {slot}"
            slots.add(slot)
            self.pool[slot[0]][slot[1]] = chain[position]

    def _sample(self, item: PlanItem) -> SampledToken:
        known = self.known[item.sequence_id]
        token = next_token(known.token_ids, known.seed, self._vocab_size)
        if token < 0:
            return SampledToken(-1, error=FAILURE)
        self._append(known, token)
        wanted = known.params.logprobs is not None
        return SampledToken(token, score_of(known.token_ids) if wanted else None)

    def _scores(self, item: PlanItem) -> tuple[TokenLogprobs, ...]:
        known = self.known[item.sequence_id]
        end = min(item.start + len(item.token_ids), known.num_prompt - 1)
        return tuple(score_of(known.token_ids[: p + 2]) for p in range(item.start, end))
