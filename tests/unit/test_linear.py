"""Packed linear layers are right for every number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.models.linear import Linear

SHAPES = [(960, 576), (576, 1536), (160, 64), (7, 5), (2048, 576)]


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)]
)
def test_equals_a_float64_product(out_size, in_size, biased, dtype, tolerance):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out_size, in_size, generator=generator).to(dtype)
    bias = torch.randn(out_size, generator=generator).to(dtype) if biased else None
    layer = Linear(weight.clone(), bias)
    for rows in (1, 3, 40):
        x = torch.randn(rows, in_size, generator=generator).to(dtype)
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        scale = F.linear(x.double().abs(), weight.double().abs()).max()
        assert ((layer(x).double() - exact).abs() <= tolerance * scale).all()
