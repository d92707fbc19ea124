"""From a plan to the inputs of one forward pass.

items of the plan     seq 7: tokens 5..7, sample     seq 3: token 12, sample     seq 9: tokens 0..3
token_ids, positions  [ 5  6  7 | 12 | 0  1  2  3 ]  all new tokens of the step in one axis
rows to sample        [       2,   3              ]  the last row of each item that reaches its last known token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.attention.backend import AttentionStep, attention_step
from octavo.scheduler.plan import PlanItem


@dataclass(frozen=True)
class StepInputs:
    """T is the number of tokens of the step."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    attention: AttentionStep


def step_inputs(items: Sequence[PlanItem], block_size: int) -> StepInputs:
    """Flatten a plan's items. O(tokens + blocks of the sequences in the step)."""
    token_ids: list[int] = []
    positions: list[int] = []
    for item in items:
        token_ids.extend(item.token_ids)
        positions.extend(range(item.start, item.start + len(item.token_ids)))
    return StepInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        attention=attention_step(
            [item.start for item in items],
            [len(item.token_ids) for item in items],
            [item.block_ids for item in items],
            block_size,
        ),
    )


def sample_rows(items: Sequence[PlanItem]) -> tuple[list[int], list[int]]:
    """The rows to sample from and the sequences they belong to, one of each per item that samples."""
    rows: list[int] = []
    sequence_ids: list[int] = []
    end = 0
    for item in items:
        end += len(item.token_ids)
        if item.sample:
            rows.append(end - 1)
            sequence_ids.append(item.sequence_id)
    return rows, sequence_ids


def scored_targets(item: PlanItem, prompt: tuple[int, ...]) -> list[int]:
    """The prompt tokens that the item's rows are to score: row i scores the token after position item.start + i."""
    return list(prompt[item.start + 1 : item.start + 1 + len(item.token_ids)])
