"""Packed matrices of every format with what they mean, worked out in numpy: the other side of csrc/pack.cpp.

Every step that rounds is written in float32, in the order of the kernels, so codes and scales are the same to the bit.

Axes: N outputs, K inputs, M rows, G groups of 32 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch

from native_machines import ROUND
from octavo.kernels.library import load
from octavo.kernels.packed import GROUP, Format, Kept, MatrixArrays, MatrixPlan, Rows, matrix, pack

F32 = np.float32
# Name -> format, minima, what codes stand above their values.
GROUPED = {
    "q4_0": (Format.GROUP4, False, 8),
    "q4_1": (Format.GROUP4, True, 0),
    "q8_0": (Format.GROUP8, False, 128),
    "group4": (Format.GROUP4, True, 0),
    "group8": (Format.GROUP8, True, 0),
    "even8": (Format.GROUP8, False, 128),
}
PLAIN = {"float32": Format.FLOAT32, "bfloat16": Format.BFLOAT16}
NAMES = (*PLAIN, "int8", *GROUPED)


@dataclass(frozen=True)
class Packed:
    """A matrix as a checkpoint keeps it, and what its packed form stands for.

    values: float64 [N, K], or (int8) the codes. scales: float32 [N] of int8. codes, group_scales, minima: [N, K] and
    [N, G] of grouped formats; codes are what the bytes say less what they stand above their values.
    """

    name: str
    plan: MatrixPlan
    rows: Rows
    values: np.ndarray
    scales: np.ndarray | None = None
    codes: np.ndarray | None = None
    group_scales: np.ndarray | None = None
    minima: np.ndarray | None = None


def packed(name: str, weights: np.ndarray, *, interleaved: bool = False) -> Packed:
    """`weights`, float32 [N, K], in the format `name`, one of NAMES."""
    outputs, inputs = weights.shape
    raw = np.ascontiguousarray(weights).view(np.uint8)
    rows = Rows(Kept.FLOAT32, raw, inputs)
    if name in PLAIN:
        values = weights if name == "float32" else bfloat16(weights)
        plan = MatrixPlan(outputs, inputs, PLAIN[name], interleaved=interleaved)
        return Packed(name, plan, rows, values.astype(np.float64))
    if name == "int8":
        codes, scales = quantised(weights, inputs)
        plan = MatrixPlan(outputs, inputs, Format.INT8, interleaved=interleaved)
        return Packed(name, plan, rows, codes * scales.astype(np.float64), scales[:, 0], codes)
    form, minimum, offset = GROUPED[name]
    plan = MatrixPlan(outputs, inputs, form, minimum, offset, interleaved)
    if name in ("group4", "group8"):
        codes, scales, minima = quantised_groups(weights, 15 if name == "group4" else 255)
    elif name == "even8":
        codes, scales, minima = quantised_around_zero(weights)
    else:
        kind = gguf.GGMLQuantizationType[name.upper()]
        rows = Rows(Kept[name.upper()], np.ascontiguousarray(gguf.quants.quantize(weights, kind)), inputs)
        codes, scales, minima = blocks(name, rows.raw)
    return Packed(
        name,
        plan,
        rows,
        group_values(codes, scales, minima),
        None,
        codes,
        scales.astype(F32),
        minima.astype(F32),
    )


def native(machine: Any, what: Packed, bias: np.ndarray | None = None) -> Any:
    """The matrix, packed by `machine` into memory that holds something else before."""
    plan = what.plan
    into = MatrixArrays(
        np.full(plan.data_bytes, 0xA5, np.uint8),
        np.full(plan.num_scales, np.nan, F32),
        np.full(plan.num_scales, -7, np.int32),
    )
    pack(machine, plan, what.rows, into)
    return matrix(plan, into, bias)


def multiply(machine: Any, m: Any, x: np.ndarray, outputs: int) -> np.ndarray:
    """x [M, K] times the matrix: float32 [M, outputs]."""
    out = np.full((len(x), outputs), np.nan, F32)
    load().multiply_rows(machine, m, np.ascontiguousarray(x, F32), out)
    return out


def expected(what: Packed, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 product of x with what the matrix holds, after the rounding that rows get, and how far off each number may be.

    With random signs, partial sums grow as the root of K, so the error of a float32 sum is about one rounding of the sum of
    magnitudes; eight of them leave room for the worst of all outputs, and cover every order for K up to 7. Grouped
    formats add few numbers, so their bound is the one for the worst case.
    """
    if what.name in PLAIN:
        rows = (x if what.name == "float32" else bfloat16(x)).astype(np.float64)
        return rows @ what.values.T, 8 * ROUND * (np.abs(rows) @ np.abs(what.values).T) + 1e-37
    if what.name == "int8":
        codes, scales = quantised(x, x.shape[1])
        exact = (codes.astype(np.int64) @ what.codes.astype(np.int64).T).astype(F32)
        return exact * (scales * what.scales), np.zeros(exact.shape)
    return _grouped_product(what, x)


def _grouped_product(what: Packed, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = what.group_scales.shape[1]
    row_codes, row_scales = quantised(x, GROUP)
    by_group = row_codes.reshape(len(x), groups, GROUP)
    codes = what.codes.reshape(-1, groups, GROUP).astype(np.float64)
    dots = np.einsum("mgi,ngi->mng", by_group.astype(np.float64), codes)
    products = dots * row_scales[:, None, :].astype(np.float64) * what.group_scales
    # The factor of minima is rounded before it is multiplied.
    totals = (row_scales * by_group.sum(-1).astype(F32)).astype(np.float64)
    lowest = totals[:, None, :] * what.minima
    magnitudes = (np.abs(products) + np.abs(lowest)).sum(-1)
    return (products + lowest).sum(-1), (2 * groups + 2) * 2 * ROUND * magnitudes + 1e-37


def quantised(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of float32 [M, K], and their scales, float32 [M, K / group]."""
    pieces = np.ascontiguousarray(x, F32).reshape(len(x), -1, group)
    most = np.abs(pieces).max(-1)
    with np.errstate(divide="ignore"):
        inverse = np.where(most > 0, F32(127) / most, F32(0))
    return np.rint(pieces * inverse[..., None]).astype(np.int32).reshape(x.shape), most / F32(127)


def quantised_groups(weights: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and minima of float32 [N, K]: the range of each group, or what is left of it after up to 5 cuts."""
    x = weights.reshape(len(weights), -1, GROUP)
    low, high = x.min(-1), x.max(-1)
    middle = (low + high) / F32(2)
    scales, minima = np.zeros_like(low), _half(middle)
    best = np.full(low.shape, np.inf, F32)
    open_still = np.full(low.shape, True)
    for cut in range(6 if most == 15 else 1):
        keep = F32(1) - F32(0.03) * F32(cut)
        m, s = _half(middle + (low - middle) * keep), _half((high - low) * keep / F32(most))
        open_still &= s != 0
        error = _squared_error(x, s, m, most)
        better = open_still & (error < best)
        best[better], scales[better], minima[better] = error[better], s[better], m[better]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.clip(np.rint((x - minima[..., None]) / scales[..., None]), 0, most)
    codes = np.where(scales[..., None] > 0, codes, 0)
    return codes.astype(np.int32).reshape(weights.shape), scales, minima


def quantised_around_zero(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes from -128 to 127, scales and minima, all of them 0, of float32 [N, K]."""
    x = weights.reshape(len(weights), -1, GROUP)
    scales = _half(np.abs(x).max(-1) / F32(127))
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.clip(np.rint(x / scales[..., None]), -128, 127)
    codes = np.where(scales[..., None] > 0, codes, 0)
    return codes.astype(np.int32).reshape(weights.shape), scales, np.zeros_like(scales)


def _squared_error(x: np.ndarray, scale: np.ndarray, minimum: np.ndarray, most: int) -> np.ndarray:
    total = np.zeros(scale.shape, F32)
    with np.errstate(divide="ignore", invalid="ignore"):
        for i in range(GROUP):
            code = np.clip(np.rint((x[..., i] - minimum) / scale), F32(0), F32(most))
            d = x[..., i] - (code * scale + minimum)
            total += d * d
    return total


def _half(x: np.ndarray) -> np.ndarray:
    """Rounded to half precision, but not to infinity."""
    return np.clip(x, F32(-65504), F32(65504)).astype(np.float16).astype(F32)


def blocks(name: str, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and minima of GGUF blocks, uint8 [N, bytes]: read field by field, not by the gguf package."""
    size = {"q4_0": 18, "q4_1": 20, "q8_0": 34}[name]
    each = np.ascontiguousarray(raw.reshape(len(raw), -1, size))
    scales = np.ascontiguousarray(each[..., :2]).view(np.float16)[..., 0].astype(F32)
    minima = np.zeros_like(scales)
    if name == "q4_1":
        minima = np.ascontiguousarray(each[..., 2:4]).view(np.float16)[..., 0].astype(F32)
    if name == "q8_0":
        codes = np.ascontiguousarray(each[..., 2:]).view(np.int8).astype(np.int32)
    else:
        nibbles = each[..., size - 16 :]
        codes = np.concatenate([nibbles & 15, nibbles >> 4], -1).astype(np.int32) - (
            8 if name == "q4_0" else 0
        )
    return codes.reshape(len(raw), -1), scales, minima


def group_values(codes: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """float64 [N, K], exact."""
    pieces = codes.reshape(*scales.shape, GROUP).astype(np.float64)
    return (pieces * scales[..., None].astype(np.float64) + minima[..., None]).reshape(codes.shape)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as float32."""
    return torch.from_numpy(np.ascontiguousarray(x, F32)).bfloat16().float().numpy()
