"""From a plan to the inputs of one forward pass.

items of the plan     seq 7: tokens 5..7, sample     seq 3: token 12, sample     seq 9: tokens 0..3
token_ids, positions  [ 5  6  7 | 12 | 0  1  2  3 ]  all new tokens of the step in one axis
rows to sample        [       2,   3              ]  the last row of each item that reaches its last known token
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.attention.backend import AttentionStep, attention_step
from octavo.scheduler.plan import PlanItem, StepPlan


@dataclass(frozen=True)
class StepInputs:
    """T is the number of tokens of the step. sample_rows and sample_ids belong together, one per item that samples."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    attention: AttentionStep
    sample_rows: torch.Tensor  # int64 [R]
    sample_ids: tuple[int, ...]


def step_inputs(plan: StepPlan, block_size: int) -> StepInputs:
    """Flatten a plan's items. O(tokens + blocks of the sequences in the step)."""
    token_ids: list[int] = []
    positions: list[int] = []
    sample_rows: list[int] = []
    for item in plan.items:
        token_ids.extend(item.token_ids)
        positions.extend(range(item.start, item.start + len(item.token_ids)))
        if item.sample:
            sample_rows.append(len(token_ids) - 1)
    return StepInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        attention=attention_step(
            [item.start for item in plan.items],
            [len(item.token_ids) for item in plan.items],
            [item.block_ids for item in plan.items],
            block_size,
        ),
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
        sample_ids=tuple(item.sequence_id for item in plan.items if item.sample),
    )


def scored_targets(item: PlanItem, prompt: tuple[int, ...]) -> list[int]:
    """The prompt tokens that the item's rows are to score: row i scores the token after position item.start + i."""
    return list(prompt[item.start + 1 : item.start + 1 + len(item.token_ids)])
