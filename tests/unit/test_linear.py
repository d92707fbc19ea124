"""Packed linear layers: right, and bitwise independent of what else is in the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octavo.models.linear import Linear, can_pack

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


@pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no packed float32 multiplication")
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(out_size, in_size):
    generator = torch.Generator().manual_seed(2)
    layer = Linear(torch.randn(out_size, in_size, generator=generator))
    x = torch.randn(300, in_size, generator=generator)
    alone = torch.cat([layer(row) for row in x[:40].split(1)])
    for rows in (2, 3, 5, 8, 16, 31, 32, 33, 64, 100, 300):
        assert torch.equal(layer(x[:rows])[:40], alone[:rows]), rows
