"""Weights as the native kernels read them: how each matrix is kept, and the arrays that it becomes.

A plan of all arrays is made first, from shapes alone, so that they can lie in one file or one piece of memory
(`weights/packed_cache.py`); filling them and putting matrices together are separate steps.

    none     weights in the numbers of the activations (float32 or bfloat16)
    int8     8-bit codes with a scale per 32 inputs, which become bytes with a scale per 32 as they come; the projection out
             of attention keeps signed bytes with one scale per output, and its inputs have one scale per row
    int4     4-bit codes with a scale and a minimum per 32 inputs; the head keeps 8 bits
    native   what a GGUF file holds, for Q4_0, Q4_1 and Q8_0; other types are kept as with `none`
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.kernels.library import load

QUANTIZATIONS = ("none", "int8", "int4", "native")
GROUP = 32


class Number(IntEnum):
    """Numbers of activations, keys and values (csrc/types.h)."""

    FLOAT32 = 0
    BFLOAT16 = 1

    @property
    def num_bytes(self) -> int:
        return 2 if self is Number.BFLOAT16 else 4


class Format(IntEnum):
    """How a packed matrix keeps its weights (csrc/types.h)."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    GROUP8 = 3
    GROUP4 = 4


class Kept(IntEnum):
    """How rows lie in a checkpoint (csrc/pack.h)."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q8_0 = 5


# Formats of a GGUF type that is used as it is: format, whether it has minima, what codes stand above their values.
_NATIVE = {
    "Q4_0": (Format.GROUP4, False, 8),
    "Q4_1": (Format.GROUP4, True, 0),
    "Q8_0": (Format.GROUP8, False, 128),
}


@dataclass(frozen=True)
class MatrixPlan:
    """One matrix to be packed. interleaved: rows are gates, then ups, for the kernel that joins them."""

    outputs: int
    inputs: int
    format: Format
    has_minimum: bool = False
    offset: int = 0
    interleaved: bool = False

    @property
    def data_bytes(self) -> int:
        return int(self._sizes()[0])

    @property
    def num_scales(self) -> int:
        return int(self._sizes()[1])

    def _sizes(self) -> tuple[int, int]:
        sizes: tuple[int, int] = load().packed_sizes(
            int(self.format), self.has_minimum, self.interleaved, self.outputs, self.inputs
        )
        return sizes


def plan_matrix(
    quantization: str,
    number: Number,
    outputs: int,
    inputs: int,
    *,
    kinds: set[str],
    role: str = "",
    interleaved: bool = False,
) -> MatrixPlan:
    """How to keep a matrix. kinds: the GGUF types of the tensors it is stacked from (empty for other checkpoints).

    role: "qkv", "output", "gate_up", "down" or "head". What was measured for each: docs/quantization.md.
    """
    plain = Format.BFLOAT16 if number is Number.BFLOAT16 else Format.FLOAT32
    chosen: tuple[Format, bool, int] = (plain, False, 0)
    if quantization == "int8":
        grouped = role != "output" and inputs % GROUP == 0
        chosen = (Format.GROUP8, False, 128) if grouped else (Format.INT8, False, 0)
    elif quantization == "int4" and inputs % GROUP == 0:
        chosen = (Format.GROUP8 if role == "head" else Format.GROUP4, True, 0)
    elif quantization == "native" and len(kinds) == 1:
        chosen = _NATIVE.get(next(iter(kinds)), chosen)
    return MatrixPlan(outputs, inputs, *chosen, interleaved=interleaved)


@dataclass(frozen=True)
class Rows:
    """Rows of weights as a checkpoint keeps them. raw: uint8 [outputs, bytes of a row]."""

    kept: Kept
    raw: npt.NDArray[np.uint8]
    inputs: int


@dataclass(frozen=True)
class MatrixArrays:
    """The memory of one packed matrix. scales and sums are empty but for INT8."""

    data: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    sums: npt.NDArray[np.int32]


def pack(machine: Any, plan: MatrixPlan, rows: Rows, into: MatrixArrays) -> None:
    """Pack `rows` into the arrays `into`, on all threads of `machine`."""
    load().pack(
        machine,
        int(rows.kept),
        rows.raw,
        rows.inputs,
        int(plan.format),
        plan.has_minimum,
        plan.interleaved,
        into.data,
        into.scales,
        into.sums,
    )


def matrix(plan: MatrixPlan, arrays: MatrixArrays, bias: npt.NDArray[np.float32] | None = None) -> Any:
    """A matrix the kernels can multiply with; it keeps its arrays alive. bias: [outputs], in the order of `plan`'s rows."""
    if bias is not None and plan.interleaved:
        bias = _interleaved(bias)
    return load().make_matrix(
        int(plan.format),
        plan.has_minimum,
        plan.interleaved,
        plan.outputs,
        plan.inputs,
        plan.offset,
        arrays.data,
        arrays.scales,
        arrays.sums,
        bias,
    )


def _interleaved(bias: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Biases of gates and ups in the order of panels: 16 gates, their 16 ups, and so on, padded with zeros."""
    half = load().PANEL // 2
    gates = len(bias) // 2
    panels = -(-gates // half)
    padded = np.zeros((2, panels * half), np.float32)
    padded[:, :gates] = bias.reshape(2, gates)
    return np.ascontiguousarray(padded.reshape(2, panels, half).swapaxes(0, 1).reshape(-1))
