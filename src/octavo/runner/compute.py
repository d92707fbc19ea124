"""What a runner needs done with tensors, so that it need not know by which kernels: one small seam, two implementations.

TorchCompute    any model in plain torch, attention by a backend: the specification, and what runs without a compiler
NativeCompute   decoders of the llama family in the native kernels, one call per step
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from octavo.attention.backend import AttentionBackend
from octavo.models.registry import Model
from octavo.runner.inputs import StepInputs, step_inputs
from octavo.runner.kv_storage import KVStorage
from octavo.sampling.ranking import greatest
from octavo.scheduler.plan import BlockMove, PlanItem


class Compute(Protocol):
    """Block moves, forward passes, logits. Rows are those of the last forward pass: the tokens of its items, in order."""

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Copy whole blocks, strictly in order."""
        ...

    def forward(self, items: Sequence[PlanItem]) -> None:
        """Compute the tokens of all items; their keys and values go where the block tables say."""
        ...

    def logits(self, rows: list[int]) -> torch.Tensor:
        """float32 [n, vocab]."""
        ...

    def best(self, rows: list[int]) -> tuple[list[float], list[int]]:
        """The greatest logit of each row (NaN if one is not a number), and the lowest id that has it."""
        ...


class TorchCompute:
    """A model of `models/` over an attention backend."""

    def __init__(self, model: Model, backend: AttentionBackend, storage: KVStorage, block_size: int) -> None:
        self._model = model
        self._backend = backend
        self._storage = storage
        self._block_size = block_size
        self._hidden = torch.empty(0)

    def move(self, moves: Sequence[BlockMove]) -> None:
        """See Compute."""
        self._storage.make(moves)

    def forward(self, items: Sequence[PlanItem]) -> None:
        """See Compute."""
        inputs: StepInputs = step_inputs(items, self._block_size)
        self._hidden = self._model.forward(
            inputs.token_ids, inputs.positions, self._storage.layers, inputs.attention, self._backend
        )

    def logits(self, rows: list[int]) -> torch.Tensor:
        """See Compute."""
        return self._model.logits(self._hidden[rows])

    def best(self, rows: list[int]) -> tuple[list[float], list[int]]:
        """See Compute."""
        values, ids = greatest(self.logits(rows))
        return values.tolist(), ids.tolist()
