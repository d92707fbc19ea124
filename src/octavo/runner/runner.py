"""The runner: the `Executor` of one machine's CPU (or, later, of one device).

plan -> block moves -> inputs -> model forward -> logits of the rows that need them -> sampled tokens
"""

from __future__ import annotations

import torch

from octavo.attention.backend import AttentionBackend
from octavo.models.registry import Model
from octavo.outputs import TokenLogprobs
from octavo.runner.inputs import scored_targets, step_inputs
from octavo.runner.kv_storage import KVStorage
from octavo.sampling.logprobs import prompt_logprobs
from octavo.sampling.sampler import Sampler
from octavo.scheduler.plan import PlanItem, StepPlan, StepResult

# Rows of prompt scores whose logits exist at the same time, so that long prompts need no more memory than short ones.
_SCORED_ROWS = 128


class Runner:
    """Carries out plans for one model. Keeps of a sequence only what sampling needs; its KV lies in blocks."""

    def __init__(
        self, model: Model, backend: AttentionBackend, storage: KVStorage, sampler: Sampler, block_size: int
    ) -> None:
        self._model = model
        self._backend = backend
        self._storage = storage
        self._sampler = sampler
        self._block_size = block_size
        # Prompts of live sequences that want scores; the only use of prompt tokens beyond their item.
        self._scored_prompts: dict[int, tuple[int, ...]] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a plan, in the order that `scheduler/plan.py` lays down."""
        self._note(plan)
        self._storage.make(plan.moves)
        if not plan.items:
            return StepResult({}, {})
        inputs = step_inputs(plan, self._block_size)
        hidden = self._model.forward(
            inputs.token_ids, inputs.positions, self._storage.layers, inputs.attention, self._backend
        )
        sampled = {}
        if inputs.sample_ids:
            logits = self._model.logits(hidden[inputs.sample_rows])
            tokens = self._sampler.sample(logits, inputs.sample_ids)
            sampled = dict(zip(inputs.sample_ids, tokens, strict=True))
        return StepResult(sampled, self._prompt_scores(plan, hidden))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a small prompt and one token through the model, so that no request pays for what is set up on first use.

        Writes into block 0, which nobody owns yet. Called once, before the first plan.
        """
        for count in (min(4, self._block_size), 1):
            plan = StepPlan(0, (PlanItem(0, 0, (0,) * count, (0,), sample=True),))
            inputs = step_inputs(plan, self._block_size)
            hidden = self._model.forward(
                inputs.token_ids, inputs.positions, self._storage.layers, inputs.attention, self._backend
            )
            self._model.logits(hidden[inputs.sample_rows])

    def _note(self, plan: StepPlan) -> None:
        for sequence_id in plan.ended:
            self._sampler.end(sequence_id)
            self._scored_prompts.pop(sequence_id, None)
        for start in plan.started:
            self._sampler.start(start)
            if start.params.prompt_logprobs is not None:
                self._scored_prompts[start.sequence_id] = start.prompt_token_ids

    def _prompt_scores(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        scores: dict[int, tuple[TokenLogprobs, ...]] = {}
        row = 0
        for item in plan.items:
            if item.prompt_logprobs is not None:
                scores[item.sequence_id] = self._scores_of(item, hidden[row : row + len(item.token_ids)])
            row += len(item.token_ids)
        return scores

    def _scores_of(self, item: PlanItem, hidden: torch.Tensor) -> tuple[TokenLogprobs, ...]:
        targets = scored_targets(item, self._scored_prompts[item.sequence_id])
        scores: list[TokenLogprobs] = []
        for begin in range(0, len(targets), _SCORED_ROWS):
            part = targets[begin : begin + _SCORED_ROWS]
            logits = self._model.logits(hidden[begin : begin + len(part)])
            scores.extend(prompt_logprobs(logits, part, item.prompt_logprobs or 0))
        return tuple(scores)
