"""Native passes over rows beside the choice itself: the greatest logit, totals, and a sampler on top of them all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("octavo._native")

from octavo.kernels.library import instruction_sets
from octavo.kernels.machine import make_machine
from octavo.kernels.sampling import row_math
from octavo.sampling import ranking
from octavo.sampling.sampler import Sampler
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import SequenceStart

ISAS = instruction_sets()


def _normal(seed: int, count: int, size: int, levels: int = 0) -> torch.Tensor:
    rows = torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) * 3
    return (rows * levels).round() / levels if levels else rows


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", ISAS)
def test_the_greatest_is_that_of_torch(isa: str, threads: int) -> None:
    greatest = row_math(make_machine(threads, isa)).greatest
    for size in (1, 5, 64, 65, 513, 5000):
        rows = _normal(size, 12, size, 1)
        rows[1] = -math.inf
        rows[2, size // 2] = math.inf
        rows[3, size // 3 :: 7] = math.nan
        rows[4, -1] = math.nan
        rows[5, size // 4] = 9.0
        rows[5, size // 2] = math.nan
        rows[6] = -0.0
        rows[6, size // 2] = 0.0
        values, ids = greatest(rows)
        expected, expected_ids = ranking.greatest(rows)
        assert torch.equal(values.nan_to_num(1e9), expected.nan_to_num(1e9))
        assert torch.equal(ids, expected_ids)
    values, ids = greatest(torch.zeros(0, 100))
    assert values.shape == ids.shape == (0,)


@pytest.mark.parametrize("isa", ISAS)
def test_log_totals_are_those_of_float64(isa: str) -> None:
    for threads, count in ((1, 9), (2, 1), (3, 2)):
        rows = _normal(10, count, 3003)
        rows[0, :1000] = -math.inf
        peaks = rows.amax(dim=1)
        found = row_math(make_machine(threads, isa)).log_totals(rows, peaks.unsqueeze(1))
        exact = torch.logsumexp(rows.double(), dim=1) - peaks.double()
        assert np.abs(np.array(found) - exact.numpy()).max() < 1e-6
        rows[-1, 77] = math.nan
        found = row_math(make_machine(threads, isa)).log_totals(rows, rows.amax(dim=1, keepdim=True))
        assert math.isnan(found[-1]) and not any(map(math.isnan, found[:-1]))


def test_a_sampler_chooses_alike_with_native_and_torch_passes() -> None:
    options: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 20, "frequency_penalty": -1.0, "logprobs": 3},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 0},
        {"allowed_token_ids": [1, 4, 9, 16], "temperature": 3.0},
        {"min_tokens": 10, "stop_token_ids": [8, 9], "temperature": 2.0},
    ]
    samplers = [Sampler(1000, (2, 5)), Sampler(1000, (2, 5), row_math(make_machine(2)))]
    for sampler in samplers:
        for i, chosen in enumerate(options):
            sampler.start(SequenceStart(i, SamplingParams(max_tokens=None, **chosen), (1, 2, 3), i))
    for round_ in range(10):
        logits = _normal(round_, len(options), 1000, 4)
        logits[round_ % 5, 7] = math.nan
        torchs, natives = (sampler.sample(logits, range(len(options))) for sampler in samplers)
        assert [t.token_id for t in torchs] == [t.token_id for t in natives]
        assert [t.error for t in torchs] == [t.error for t in natives]
        for one, other in zip(torchs, natives, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            if one.logprobs is not None and other.logprobs is not None:
                assert list(one.logprobs) == list(other.logprobs)
                assert np.allclose(list(one.logprobs.values()), list(other.logprobs.values()), atol=1e-6)
