"""The runner: the `Executor` of one machine's CPU (or, later, of one device).

plan -> block moves -> forward pass -> for the rows that need them: the greatest logit, or all logits -> sampled tokens
"""

from __future__ import annotations

import time

import torch

from octavo.outputs import TokenLogprobs
from octavo.runner.compute import Compute
from octavo.runner.inputs import sample_rows, scored_targets
from octavo.sampling.sampler import Sampler
from octavo.scheduler.plan import PlanItem, SampledToken, StepPlan, StepResult

# Rows of prompt scores whose logits exist at the same time, so that long prompts need no more memory than short ones.
_SCORED_ROWS = 128


class Runner:
    """Carries out plans for one model. Keeps of a sequence only what sampling needs; its KV lies in blocks."""

    def __init__(self, compute: Compute, sampler: Sampler, block_size: int) -> None:
        self._compute = compute
        self._sampler = sampler
        self._block_size = block_size
        # Prompts of live sequences that want scores; the only use of prompt tokens beyond their item.
        self._scored_prompts: dict[int, tuple[int, ...]] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a plan, in the order that `scheduler/plan.py` lays down."""
        self._note(plan)
        self._compute.move(plan.moves)
        if not plan.items:
            return StepResult({}, {})
        began = time.perf_counter()
        self._compute.forward(plan.items)
        sampled = self._sample(*sample_rows(plan.items))
        scores = self._prompt_scores(plan)
        return StepResult(sampled, scores, time.perf_counter() - began)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a small prompt and one token through the model, so that no request pays for what is set up on first use.

        Writes into block 0, which nobody owns yet. Called once, before the first plan.
        """
        for count in (min(4, self._block_size), 1):
            self._compute.forward([PlanItem(0, 0, (0,) * count, (0,), sample=True)])
            self._compute.best([count - 1])
            self._compute.logits([count - 1])

    def _note(self, plan: StepPlan) -> None:
        for sequence_id in plan.ended:
            self._sampler.end(sequence_id)
            self._scored_prompts.pop(sequence_id, None)
        for start in plan.started:
            self._sampler.start(start)
            if start.params.prompt_logprobs is not None:
                self._scored_prompts[start.sequence_id] = start.prompt_token_ids

    def _sample(self, rows: list[int], sequence_ids: list[int]) -> dict[int, SampledToken]:
        """Greedy sequences need only the greatest logit of their row, which is found without writing down the others."""
        best = [self._sampler.takes_best(sequence_id) for sequence_id in sequence_ids]
        sampled: dict[int, SampledToken] = {}
        for greedy in (True, False):
            ids = [i for i, is_best in zip(sequence_ids, best, strict=True) if is_best is greedy]
            wanted = [row for row, is_best in zip(rows, best, strict=True) if is_best is greedy]
            if not ids:
                continue
            if greedy:
                tokens = self._sampler.take_best(*self._compute.best(wanted), ids)
            else:
                tokens = self._sampler.sample(self._compute.logits(wanted), ids)
            sampled.update(zip(ids, tokens, strict=True))
        return sampled

    def _prompt_scores(self, plan: StepPlan) -> dict[int, tuple[TokenLogprobs, ...]]:
        scores: dict[int, tuple[TokenLogprobs, ...]] = {}
        row = 0
        for item in plan.items:
            if item.prompt_logprobs is not None:
                scores[item.sequence_id] = self._scores_of(item, row)
            row += len(item.token_ids)
        return scores

    def _scores_of(self, item: PlanItem, first_row: int) -> tuple[TokenLogprobs, ...]:
        targets = scored_targets(item, self._scored_prompts[item.sequence_id])
        scores: list[TokenLogprobs] = []
        for begin in range(0, len(targets), _SCORED_ROWS):
            part = targets[begin : begin + _SCORED_ROWS]
            rows = list(range(first_row + begin, first_row + begin + len(part)))
            logits = self._compute.logits(rows)
            scores.extend(self._sampler.prompt_logprobs(logits, part, item.prompt_logprobs or 0))
        return tuple(scores)
