"""A linear layer whose weights are packed once, at load.

torch multiplies small batches of float32 through a BLAS that unpacks the weights in every call. Its oneDNN kernels take
weights that were packed beforehand, which is faster. Measurements: docs/decisions/0006-packed-linear-weights.md.

A row's last bits may depend on how many rows there are (on some CPUs they do); the native kernels promise that they do
not.

Where oneDNN does not offer this (another dtype, another build of torch), the plain torch call is used.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

# The batch size that weights are packed for.
_PACKED_FOR_ROWS = 32


class Linear:
    """y = x W^T + b for rows x. weight: [out, in], given up to the layer (packing copies it). nbytes: memory it takes."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._bias = bias
        self._packed = can_pack(weight.dtype)
        self._weight = _pack(weight) if self._packed else weight

    def shares(self, tensor: torch.Tensor) -> bool:
        """Is the weight `tensor` itself, in the same memory?"""
        return self._weight is tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, out] for x [T, in], which must be contiguous in its last dimension."""
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Does this torch, on this CPU, multiply packed weights of `dtype`, and rightly? Tried out once on a small matrix."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    x = torch.randn(5, 64, generator=generator).to(dtype)
    try:
        if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        y = torch.ops.mkldnn._linear_pointwise(x, _pack(weight), None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(y.float(), F.linear(x.float(), weight.float()), rtol=2e-2, atol=2e-2)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed
