"""What quantisation costs in accuracy stays near what docs/quantization.md says: the packaged model on a little of its text.

So few tokens cannot judge a format (the whole text does that: benchmarks/perplexity.py). They show when a kernel or a format
got worse: int8 with one scale for a whole row, for one, changed the perplexity of these very tokens by 9 %.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octavo.kernels import library
from octavo.weights.locate import DEFAULT_MODEL

pytestmark = pytest.mark.skipif(library.missing() is not None, reason="the native kernels are not built")

NUM_TOKENS = 256
# Way: greatest change of the perplexity and least agreement, in percent, against native float32.
BOUNDS = {
    "float32, KV int8": (0.5, 95),
    "bfloat16": (0.5, 95),
    "bfloat16, KV int8": (0.5, 93),
    "int8": (1.2, 90),
    "int8, KV int8": (1.2, 90),
    "int4": (1.2, 90),
    "int4, KV int8": (1.2, 90),
    "native": (1.2, 90),
    "native, KV int8": (1.2, 90),
}


def _perplexity() -> ModuleType:
    """benchmarks/perplexity.py, which is no package."""
    file = Path(__file__).parents[2] / "benchmarks" / "perplexity.py"
    spec = importlib.util.spec_from_file_location("perplexity", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["perplexity"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


perplexity = _perplexity()
WAYS = {way.name: way for way in perplexity.WAYS}


def score(way: Any) -> Any:
    return perplexity.score(way, DEFAULT_MODEL, perplexity.TEXT.read_text(), most_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def plain() -> Any:
    return score(WAYS["float32"])


def test_every_way_has_a_bound() -> None:
    assert set(BOUNDS) | {"float32"} == set(WAYS)


def test_native_float32_is_the_reference(plain: Any) -> None:
    reference = score(perplexity.REFERENCE)
    assert len(plain.losses) == NUM_TOKENS - 1
    assert plain.losses == pytest.approx(reference.losses, abs=1e-3)
    assert plain.likeliest == reference.likeliest


@pytest.mark.parametrize("name", BOUNDS)
def test_change_stays_within_its_bound(plain: Any, name: str) -> None:
    most, least = BOUNDS[name]
    scores = score(WAYS[name])
    ratio, _ = perplexity.change(scores, plain)
    assert abs(100 * ratio) <= most
    assert 100 * perplexity.agreement(scores, plain) >= least
