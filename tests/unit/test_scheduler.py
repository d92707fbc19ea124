"""The scheduler, behaviour by behaviour; what holds always is in tests/property/test_scheduler_machine.py."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from unittest import mock

import pytest

from octavo import request as request_module
from octavo.memory import prefix_cache
from octavo.memory.block_pool import BlockPool
from octavo.memory.prefix_cache import BlockKey, root_key
from octavo.request import LEGAL_MOVES, Request, SequenceState
from octavo.request import Sequence as Sequence_
from octavo.sampling_params import SamplingParams
from octavo.scheduler.plan import MoveKind
from scheduler_bench import ROOT, Bench, spans, tokens

# -- what a step holds


def test_prompt_is_computed_in_chunks_and_only_the_last_one_samples() -> None:
    bench = Bench(budget=4)
    bench.add(tokens(10, 10))
    plans = bench.steps(4)
    assert [spans(plan)[0] for plan in plans] == [(0, 4), (4, 8), (8, 10), (10, 11)]
    assert [plan.items[0].sample for plan in plans] == [False, False, True, True]


def test_decodes_go_before_chunks() -> None:
    bench = Bench(budget=4)
    bench.add(tokens(10, 3))
    bench.step()
    bench.add(tokens(100, 20))
    assert [spans(plan) for plan in bench.steps(3)] == [
        {0: (3, 4), 1: (0, 3)},
        {0: (4, 5), 1: (3, 6)},
        {0: (5, 6), 1: (6, 9)},
    ]


def test_requests_begin_in_order_of_arrival_as_far_as_seats_go() -> None:
    bench = Bench(seats=2)
    for start in (10, 20, 30):
        bench.add([start], max_tokens=2)
    assert [list(spans(plan)) for plan in bench.steps(3)] == [[0, 1], [0, 1], [2]]


def test_executor_learns_of_each_sequence_once_and_of_each_end() -> None:
    bench = Bench()
    bench.add([10], max_tokens=2)
    plans = bench.steps(3)
    assert [[s.sequence_id for s in plan.started] for plan in plans] == [[0], [], []]
    assert [plan.ended for plan in plans] == [(), (), (0,)]
    assert not bench.scheduler.has_work


def test_scoring_a_prompt_samples_nothing() -> None:
    bench = Bench()
    (sequence,) = bench.add([10, 11], max_tokens=0, prompt_logprobs=0)
    assert not bench.step().items[0].sample
    (event,) = bench.events
    assert (event.finish_reason, event.token_ids, event.prompt_logprobs) == ("length", (), ({5: -1.0},))
    assert sequence.state is SequenceState.FINISHED


def test_failure_to_sample_ends_only_that_sequence() -> None:
    bench = Bench()
    bench.add([10])
    bench.add([20])
    bench.failing.add(0)
    bench.step()
    assert [(e.finish_reason, e.error, e.token_ids) for e in bench.events] == [
        ("error", "no", ()),
        (None, None, (1,)),
    ]
    bench.drain()
    assert bench.scheduler.counters.finished == {"error": 1, "length": 1}


# -- sharing


def test_sequences_of_one_request_compute_the_prompt_once() -> None:
    bench = Bench(caching=False)
    sequences = bench.add(tokens(10, 10), n=3)
    first, second = bench.steps(2)
    assert spans(first) == {0: (0, 10)}
    assert spans(second) == {0: (10, 11), 1: (9, 10), 2: (9, 10)}
    assert [len({s.table.block_ids[i] for s in sequences}) for i in range(3)] == [1, 1, 3]
    assert [(move.kind, move.source) for move in second.moves] == [(MoveKind.COPY, 2)] * 2
    bench.drain()


def test_prefix_hit_is_exact_to_the_token() -> None:
    bench = Bench()
    bench.add(tokens(10, 12))
    bench.drain()
    (sequence,) = bench.add([*tokens(10, 7), 99, 98])
    plan = bench.step()
    assert sequence.num_cached == 7 and spans(plan) == {1: (7, 9)}
    assert [move.kind for move in plan.moves] == [MoveKind.COPY]
    counters = bench.scheduler.counters
    assert (counters.prefix_query_tokens, counters.prefix_hit_tokens) == (21, 7)


@pytest.mark.parametrize("length", range(1, 10))
def test_repeated_prompt_computes_one_token_at_least(length: int) -> None:
    bench = Bench()
    bench.add(tokens(10, length), max_tokens=8)
    bench.drain()
    (sequence,) = bench.add(tokens(10, length))
    (item,) = bench.step().items
    # Generated tokens fill the last block of the first run, so that all of the prompt is known, to the token.
    assert (item.start, len(item.token_ids), sequence.num_cached) == (length - 1, 1, length - 1)


def test_other_roots_share_nothing() -> None:
    bench = Bench()
    bench.add(tokens(10, 12))
    bench.drain()
    (sequence,) = bench.add(tokens(10, 12), root=root_key("weights", "tenant"))
    bench.step()
    assert sequence.num_cached == 0


def test_prompt_scores_are_computed_although_the_prompt_is_cached() -> None:
    bench = Bench()
    bench.add(tokens(10, 2))
    bench.drain()
    (sequence,) = bench.add(tokens(10, 2), prompt_logprobs=0)
    assert spans(bench.step()) == {1: (0, 2)} and sequence.num_cached == 0


def test_requests_that_share_a_running_prefix_fit_together() -> None:
    bench = Bench(num_blocks=10)
    prefix = tokens(10, 24)
    bench.add([*prefix, 1])
    bench.step()
    bench.add([*prefix, 2])
    bench.add([*prefix, 3])
    # Six blocks are shared: three sequences need 6 + 3, where three alone would need 21.
    assert len(bench.step().items) == 2
    bench.drain()


def test_prompt_counts_once_even_if_its_first_sequence_never_began() -> None:
    bench = Bench()
    sequences = bench.add(tokens(10, 8), n=3)
    bench.scheduler.finish("r0", 0, "abort")
    bench.drain()
    counters = bench.scheduler.counters
    assert counters.prompt_tokens == counters.prefix_query_tokens == 8
    assert counters.prefix_hit_tokens == sequences[1].num_cached == 0


def test_nothing_is_published_behind_a_colliding_block() -> None:
    def poor(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
        return b"key" + bytes([token_ids[0]])

    bench = Bench()
    # Both requests begin with token 10, so their first blocks collide, and both go on with the same second block.
    with (
        mock.patch.object(prefix_cache, "block_key", poor),
        mock.patch.object(request_module, "block_key", poor),
    ):
        bench.add([10, 1, 1, 1], max_tokens=1)
        bench.drain()
        bench.add([10, 2, 2, 2, 20, 21, 22, 23], max_tokens=1)
        bench.drain()
        (sequence,) = bench.add([10, 1, 1, 1, 20, 21, 22, 23], max_tokens=1)
        bench.step()
        assert sequence.num_cached == 4, "the second block belongs to another first block"


# -- ending from outside


def test_end_frees_the_blocks_of_a_running_sequence_at_once() -> None:
    bench = Bench()
    bench.add(tokens(10, 9), n=2)
    bench.steps(2)
    (event,) = bench.scheduler.finish("r0", 1, "stop")
    assert (event.sequence.index, event.finish_reason) == (1, "stop")
    assert bench.pool.num_used == 3
    (event,) = bench.scheduler.finish("r0", None, "abort")
    assert event.sequence.index == 0 and bench.pool.num_used == 0
    assert bench.step().ended == (1, 0)
    assert bench.scheduler.counters.finished == {"stop": 1, "abort": 1}


def test_waiting_sequence_that_ends_was_never_known_to_the_executor() -> None:
    bench = Bench()
    bench.add([10])
    assert len(bench.scheduler.finish("r0", None, "abort")) == 1
    assert not bench.scheduler.has_work


def test_end_of_something_unknown_or_over_is_ignored() -> None:
    bench = Bench()
    bench.add([10], n=2)
    assert len(bench.scheduler.finish("r0", 0, "abort")) == 1
    assert bench.scheduler.finish("r0", 0, "abort") == []
    assert bench.scheduler.finish("nobody", None, "abort") == []
    bench.drain()
    assert bench.scheduler.finish("r0", None, "abort") == []


# -- states


@pytest.mark.parametrize(("old", "new"), list(itertools.product(SequenceState, repeat=2)))
def test_only_moves_of_the_table_are_possible(old: SequenceState, new: SequenceState) -> None:
    request = Request("r", (10,), SamplingParams(), (0,), ROOT)
    sequence = Sequence_(0, request, 0, 0, BlockPool(1, 4))
    sequence.state = old
    if new in LEGAL_MOVES[old]:
        sequence.move_to(new)
        assert sequence.state is new
    else:
        with pytest.raises(RuntimeError, match=f"cannot become {new.value}"):
            sequence.move_to(new)
        assert sequence.state is old
