"""Sequences of tokens computed by the native decoder step by step, over a small pool of blocks in no order."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from native_machines import ISAS, machine
from octavo.attention.backend import attention_step
from octavo.attention.reference import ReferenceAttention
from octavo.kernels.decoder import NativeDecoder
from octavo.kernels.library import load
from octavo.kernels.machine import Machine
from octavo.kernels.packed import Number
from octavo.models.registry import load_model
from octavo.weights.checkpoint import open_checkpoint

Prompts = list[list[int]]


def native_decoder(
    path: Path,
    number: Number = Number.FLOAT32,
    *,
    isa: str = ISAS[0],
    threads: int = 1,
    **options: Any,
) -> NativeDecoder:
    """The decoder of a model on disk. options: of NativeDecoder."""
    checkpoint = open_checkpoint(path)
    threads_of = Machine(machine(isa, threads), isa, threads)
    return NativeDecoder(checkpoint.spec, checkpoint.source, threads_of, number=number, **options)


class NativeSteps:
    """Prompts over one pool. int8: keys and values are kept as bytes. What nobody wrote is garbage, except in int8 pools."""

    def __init__(
        self,
        decoder: NativeDecoder,
        prompts: Prompts,
        number: Number = Number.FLOAT32,
        *,
        block_size: int = 16,
        int8: bool = False,
        shared_blocks: int = 0,
    ) -> None:
        spec = decoder.spec
        self.decoder, self.prompts = decoder, prompts
        needed = [-(-len(prompt) // block_size) - shared_blocks for prompt in prompts]
        ids = list(range(shared_blocks + sum(needed) + 1))
        random.Random(block_size).shuffle(ids)
        first = [ids.pop() for _ in range(shared_blocks)]
        self.tables = [tuple(first + [ids.pop() for _ in range(n)]) for n in needed]
        num_blocks = shared_blocks + sum(needed) + 1
        vector = spec.head_size + 4 if int8 else spec.head_size * number.num_bytes
        size = num_blocks * spec.num_layers * 2 * block_size * spec.num_kv_heads * vector
        self.memory = np.full(size, 0 if int8 else 0xFF, np.uint8)
        self.pool = load().make_pool(
            self.memory, num_blocks, spec.num_layers, spec.num_kv_heads, spec.head_size, block_size, int(number),
            int8, True,
        )  # fmt: skip
        self.done = [0] * len(prompts)
        self.logits: list[list[torch.Tensor]] = [[] for _ in prompts]

    def step(self, counts: dict[int, int]) -> torch.Tensor:
        """Compute so many more tokens of each sequence named; returns the logits of all of them."""
        items = []
        for i, count in counts.items():
            tokens = tuple(self.prompts[i][self.done[i] : self.done[i] + count])
            items.append((self.done[i], tokens, self.tables[i]))
            self.done[i] += count
        self.decoder.forward(self.pool, items)
        logits = self.decoder.logits(list(range(sum(counts.values()))))
        for i, part in zip(counts, logits.split(list(counts.values())), strict=True):
            self.logits[i].append(part)
        return logits

    def run(self, chunk: int = 10_000) -> list[torch.Tensor]:
        """Everything, in chunks of up to `chunk` tokens; sequence i joins at step i; logits [T, vocab] of each."""
        turn = 0
        while any(done < len(prompt) for done, prompt in zip(self.done, self.prompts, strict=True)):
            left = {i: len(p) - self.done[i] for i, p in enumerate(self.prompts[: turn + 1])}
            self.step({i: min(n, chunk if (turn - i) % 2 == 0 else 1) for i, n in left.items() if n})
            turn += 1
        return [torch.cat(parts) for parts in self.logits]


def torch_logits(path: Path, prompt: list[int]) -> torch.Tensor:
    """Logits [T, vocab] of one prompt by the models of `models/` in float32: what native decoders are measured by."""
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint.spec, checkpoint.source, torch.float32)
    spec, blocks = checkpoint.spec, -(-len(prompt) // 16)
    caches = [torch.zeros(2, blocks, 16, spec.num_kv_heads, spec.head_size) for _ in range(spec.num_layers)]
    step = attention_step([0], [len(prompt)], [list(range(blocks))], 16)
    positions = torch.arange(len(prompt))
    with torch.inference_mode():
        return model.logits(
            model.forward(torch.tensor(prompt), positions, caches, step, ReferenceAttention())
        )


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in the norm over all logits."""
    return float((got - expected).norm() / expected.norm())
