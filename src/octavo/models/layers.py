"""The few operations that decoders of the llama family are made of, as plain functions over tensors.

Axes: T tokens, H heads of any kind, D head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from octavo.model_spec import ModelSpec, RopeScaling


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x scaled to a root mean square of 1 along its last axis, then by `weight`; computed in float32.

    weight: shape of one row of x, or of its trailing axes (one weight per head, [H, D]). Returns the dtype of x.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, for gate and up side by side in the last axis.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rope_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians per position of each rotary pair, float32 [D / 2], with the model's stretching applied.

    Source: Su et al., "RoFormer", 2021; the llama 3 stretching is that of Meta's reference code.
    """
    pairs = torch.arange(0, spec.head_size, 2, dtype=torch.float32)
    frequencies = 1.0 / (spec.rope_theta ** (pairs / spec.head_size))
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.frequency_divisors is not None:
        return frequencies / torch.tensor(scaling.frequency_divisors, dtype=torch.float32)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    assert scaling.kind == "llama3", f"a loader let rope scaling {scaling.kind!r} pass"
    return _llama3_frequencies(frequencies, scaling)


def rope_angles(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines for `rotate`, [T, 1, D] each, in `dtype`; computed in float32.

    positions: int64 [T]. The first half of the sines is negated, so that a rotation needs no negated copy of its input.
    Taken once per step for all layers: as cheap as looking them up in a table, and no table to grow with the context.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    cosines, sines = angles.cos(), angles.sin()
    both = torch.stack((torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1)))
    both = both.to(dtype).unsqueeze(2)
    return both[0], both[1]


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions for x [T, H, D], whose pairs are (i, i + D / 2); cosines and sines as from `rope_angles`."""
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, dims=-1), sines)


def _llama3_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow pairs are stretched by the whole factor, fast ones not at all, those between by a blend of both."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
