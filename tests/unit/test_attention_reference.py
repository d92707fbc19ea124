"""The reference backend against a dense oracle in float64 that knows nothing of blocks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention.backend import BACKENDS, AttentionStep, attention_step
from octavo.attention.reference import ReferenceAttention

BACKEND = ReferenceAttention()


@dataclass
class Case:
    """Sequences with all their keys and values, and a cache that holds what precedes the step."""

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    cache: torch.Tensor
    step: AttentionStep
    starts: list[int]


def make_case(
    lengths: list[tuple[int, int]],
    block_size: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """lengths: (tokens before the step, tokens of the step) of each sequence; unused slots of the cache are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    totals = [start + count for start, count in lengths]
    needed = [-(-total // block_size) for total in totals]
    ids = list(range(sum(needed) + 2))
    random.Random(seed).shuffle(ids)
    tables = [[ids.pop() for _ in range(n)] for n in needed]
    cache = torch.full((2, sum(needed) + 2, block_size, kv_heads, head_size), math.nan, dtype=dtype)
    case = Case(
        queries=[noise(count, heads, head_size) for _, count in lengths],
        keys=[noise(total, kv_heads, head_size) for total in totals],
        values=[noise(total, kv_heads, head_size) for total in totals],
        cache=cache,
        step=attention_step([s for s, _ in lengths], [c for _, c in lengths], tables, block_size),
        starts=[s for s, _ in lengths],
    )
    before = attention_step([0] * len(lengths), case.starts, tables, block_size)
    write(case, before, [slice(0, s) for s in case.starts])
    write(case, case.step, [slice(s, None) for s in case.starts])
    return case


def write(case: Case, step: AttentionStep, parts: list[slice]) -> None:
    keys = torch.cat([k[part] for k, part in zip(case.keys, parts, strict=True)])
    values = torch.cat([v[part] for v, part in zip(case.values, parts, strict=True)])
    BACKEND.write_kv(keys, values, case.cache, step.slot_mapping)


def attend(case: Case, window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
    query = torch.cat(case.queries)
    return BACKEND.attend(query, case.cache, case.step, scale=0.3, window=window, soft_cap=soft_cap)


def oracle(case: Case, window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
    """Token by token and head by head, straight from the definition, in float64."""
    rows = []
    for query, keys, values, start in zip(case.queries, case.keys, case.values, case.starts, strict=True):
        group = query.shape[1] // keys.shape[1]
        for i, token in enumerate(query.double()):
            position = start + i
            first = 0 if window is None else max(0, position - window + 1)
            seen = slice(first, position + 1)
            heads = []
            for h, q in enumerate(token):
                scores = keys[seen, h // group].double() @ q * 0.3
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                heads.append(torch.softmax(scores, 0) @ values[seen, h // group].double())
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 2, 4, 16]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3]),
    window=st.none() | st.integers(1, 20),
    soft_cap=st.none() | st.sampled_from([0.5, 5.0]),
    seed=st.integers(0, 100),
)
def test_mixed_steps_match_the_dense_oracle(
    lengths: list[tuple[int, int]],
    block_size: int,
    kv_heads: int,
    group: int,
    window: int | None,
    soft_cap: float | None,
    seed: int,
) -> None:
    case = make_case(lengths, block_size, heads=kv_heads * group, kv_heads=kv_heads, seed=seed)
    got = attend(case, window, soft_cap)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), oracle(case, window, soft_cap), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_result_does_not_depend_on_the_neighbours_in_the_step(block_size: int) -> None:
    together = make_case([(17, 1), (0, 9), (5, 4)], block_size)
    whole = attend(together)
    begin = 0
    for i, query in enumerate(together.queries):
        step = attention_step(
            [together.starts[i]], [query.shape[0]], [together.step.block_tables[i].tolist()], block_size
        )
        alone = BACKEND.attend(query, together.cache, step, scale=0.3, window=None, soft_cap=None)
        assert torch.equal(alone, whole[begin : begin + query.shape[0]])
        begin += query.shape[0]


def test_a_window_of_one_returns_the_token_s_own_value() -> None:
    case = make_case([(9, 3)], 4, heads=2, kv_heads=2)
    torch.testing.assert_close(attend(case, window=1), case.values[0][9:])


def test_strided_inputs_are_taken_as_they_are() -> None:
    case = make_case([(3, 5), (8, 1)], 4)
    packed = torch.cat([torch.cat(case.queries), torch.randn(6, 3, 8)], dim=1)
    got = BACKEND.attend(packed[:, :4], case.cache, case.step, scale=0.3, window=None, soft_cap=None)
    assert torch.equal(got, attend(case))


def test_writing_changes_only_the_slots_of_the_step() -> None:
    cache = torch.zeros(2, 5, 4, 2, 8)
    step = attention_step([3], [3], [[4, 1]], 4)
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    BACKEND.write_kv(key, value, cache, step.slot_mapping)
    assert torch.equal(cache[0, 4, 3], key[0]) and torch.equal(cache[0, 1, :2], key[1:])
    assert torch.equal(cache[1, 4, 3], value[0]) and torch.equal(cache[1, 1, :2], value[1:])
    assert int((cache != 0).any(-1).any(-1).sum()) == 2 * 3


def test_bfloat16_is_weighed_in_float32() -> None:
    case = make_case([(300, 1), (0, 20)], 16, dtype=torch.bfloat16)
    got = attend(case)
    assert got.dtype == torch.bfloat16
    # One rounding at the end is all that is lost.
    torch.testing.assert_close(got.double(), oracle(case), atol=1e-6, rtol=2**-8)


def test_a_sequence_without_new_tokens_takes_no_rows() -> None:
    case = make_case([(4, 2), (6, 0), (0, 3)], 4)
    torch.testing.assert_close(attend(case).double(), oracle(case), atol=2e-6, rtol=1e-5)


def test_step_metadata_follows_the_block_tables() -> None:
    step = attention_step([3, 0, 8], [2, 5, 1], [[7, 9], [2, 0, 5], [1, 3, 6, 8]], 4)
    assert step.query_starts.tolist() == [0, 2, 7, 8]
    assert step.kv_lengths.tolist() == list(step.kv_lens) == [5, 5, 9]
    assert step.query_lens == (2, 5, 1)
    assert step.slot_mapping.tolist() == [31, 36, 8, 9, 10, 11, 0, 24]
    # Entries that no token needs are left out; short rows are padded.
    assert step.block_tables.tolist() == [[7, 9, 0], [2, 0, 0], [1, 3, 6]]
    assert (step.query_starts.dtype, step.slot_mapping.dtype) == (torch.int32, torch.int64)
    assert step.num_tokens == 8


def test_the_registry_finds_the_backend() -> None:
    assert BACKENDS.load("reference") is ReferenceAttention


@pytest.mark.parametrize("window", [None, 1, 40, 129, 500])
@pytest.mark.parametrize("count", [127, 128, 129, 300])
def test_chunks_longer_than_the_rows_computed_at_once_match_the_dense_oracle(
    count: int, window: int | None
) -> None:
    case = make_case([(37, count), (0, 3)], 16)
    torch.testing.assert_close(attend(case, window).double(), oracle(case, window), atol=2e-6, rtol=1e-5)
