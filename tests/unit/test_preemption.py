"""Who gives way when blocks, seats or tokens run out, and what that costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.request import Sequence, SequenceState
from octavo.scheduler.plan import MoveKind, StepPlan
from octavo.scheduler.residency import Residency
from scheduler_bench import Bench, spans, tokens

# -- giving way


def test_last_in_rank_gives_way_and_comes_back_through_the_cache() -> None:
    bench = Bench(num_blocks=4)
    (first,) = bench.add(tokens(10, 7), max_tokens=4)
    (second,) = bench.add(tokens(20, 4), max_tokens=8)
    bench.steps(3)
    assert second.state is SequenceState.WAITING and len(second.table) == 0
    assert first.state is SequenceState.RUNNING and first.num_tokens == 10
    counters = bench.scheduler.counters
    assert (counters.preemptions_recompute, counters.preemptions_swap) == (1, 0)
    bench.drain()
    assert counters.finished == {"length": 2} and counters.generation_tokens == 12
    # Its full block stayed findable; only the token behind it was computed twice.
    assert counters.recomputed_tokens == 1


def preempted_by_swap() -> tuple[Bench, Sequence, StepPlan]:
    bench = Bench(num_blocks=4, host=4, caching=False)
    bench.add(tokens(10, 7), max_tokens=4)
    (second,) = bench.add(tokens(20, 4), max_tokens=8)
    plan = bench.steps(3)[-1]
    assert second.state is SequenceState.SWAPPED
    return bench, second, plan


def test_swap_moves_the_blocks_out_and_in_and_computes_nothing_twice() -> None:
    bench, second, plan = preempted_by_swap()
    assert [(m.kind, m.target) for m in plan.moves] == [(MoveKind.SWAP_OUT, 0), (MoveKind.SWAP_OUT, 1)]
    assert second.num_computed == 5 and len(second.host_block_ids) == 2 and bench.scheduler.num_swapped == 1
    plans = bench.steps(3)
    moves = [(m.kind, m.source) for plan in plans for m in plan.moves]
    assert moves == [(MoveKind.SWAP_IN, 0), (MoveKind.SWAP_IN, 1)]
    assert bench.host.num_used == 0
    bench.drain()
    assert bench.scheduler.counters.recomputed_tokens == 0


def test_swapped_blocks_that_the_pool_still_has_are_not_moved_back() -> None:
    bench = Bench(num_blocks=4, host=4)
    bench.add(tokens(10, 7), max_tokens=4)
    bench.add(tokens(20, 4), max_tokens=8)
    moves = [move for plan in bench.steps(6) for move in plan.moves]
    assert [move.kind for move in moves] == [MoveKind.SWAP_OUT] * 2 + [MoveKind.SWAP_IN]
    bench.drain()


def test_full_host_store_falls_back_to_recompute() -> None:
    bench = Bench(num_blocks=4, host=1, caching=False)
    bench.add(tokens(10, 7), max_tokens=4)
    bench.add(tokens(20, 4), max_tokens=8)
    bench.drain()
    counters = bench.scheduler.counters
    assert (counters.preemptions_recompute, counters.preemptions_swap) == (1, 0)
    assert counters.finished == {"length": 2}


def test_swapped_sequence_needs_room_for_its_own_blocks_not_its_siblings() -> None:
    bench = Bench(num_blocks=5, host=8, caching=False)
    first, second = bench.add(tokens(10, 12), n=2)
    bench.step()
    bench.step()
    # As if the second one had been swapped out in the middle of the prompt: it comes back with blocks of its own.
    bench.scheduler.finish("r0", 1, "abort")
    second.state, second.num_computed, second.host_block_ids = SequenceState.SWAPPED, 11, [0, 1, 2]
    del second.token_ids[12:]
    residency = Residency(bench.pool, bench.host, bench.scheduler.counters, prefix_caching=False, swap=True)
    assert first.state is SequenceState.RUNNING and bench.pool.num_free == 1
    assert not residency.fits(second, reserved=0)


def test_newcomer_waits_while_a_running_prompt_still_needs_the_blocks() -> None:
    bench = Bench(num_blocks=10, budget=8)
    bench.add(tokens(10, 30))
    bench.step()
    bench.add(tokens(100, 12))
    # Eight blocks are free, six are for the rest of the first prompt, and the second one would need three.
    plans = bench.steps(3)
    assert [list(spans(plan)) for plan in plans] == [[0], [0], [0]]
    bench.drain()
    assert bench.scheduler.counters.preemptions_recompute == 0


def test_lone_sequence_may_fill_the_whole_pool() -> None:
    bench = Bench(num_blocks=4)
    bench.add(tokens(10, 6), max_tokens=10)
    bench.drain()
    assert bench.scheduler.counters.preemptions_recompute == 0


def test_end_of_a_swapped_sequence_frees_the_host_store() -> None:
    bench, second, _ = preempted_by_swap()
    bench.scheduler.finish(second.request.request_id, None, "abort")
    assert bench.host.num_used == 0
    bench.drain()


# -- urgency


def waits_for_seat(bench: Bench) -> None:
    bench.add([10], priority=5)
    bench.add([20], priority=5)


def waits_for_blocks(bench: Bench) -> None:
    bench.add(tokens(10, 20), priority=5)
    bench.add(tokens(50, 20), priority=5)


def waits_for_tokens(bench: Bench) -> None:
    for start in (10, 20, 30, 40):
        bench.add([start], priority=5)


def waits_behind_a_long_prompt(bench: Bench) -> None:
    bench.add(tokens(10, 36), priority=5)


def waits_for_blocks_that_siblings_share(bench: Bench) -> None:
    bench.add(tokens(10, 32), priority=5, n=2)


@pytest.mark.parametrize(
    ("busy", "seats", "budget"),
    [
        (waits_for_seat, 2, 64),
        (waits_for_blocks, 8, 64),
        (waits_for_tokens, 8, 4),
        (waits_behind_a_long_prompt, 8, 4),
        (waits_for_blocks_that_siblings_share, 8, 64),
    ],
)
@pytest.mark.parametrize("host", [0, 40])
def test_more_urgent_arrival_starts_in_the_next_step(
    busy: Callable[[Bench], None], seats: int, budget: int, host: int
) -> None:
    bench = Bench(num_blocks=12, seats=seats, budget=budget, policy="priority", host=host)
    busy(bench)
    bench.steps(2)
    (urgent,) = bench.add(tokens(200, 24), priority=1)
    assert urgent.sequence_id in spans(bench.step())
    bench.drain()
    assert bench.scheduler.counters.finished.keys() == {"length"}


def test_urgent_arrival_pushes_out_no_more_than_it_needs() -> None:
    bench = Bench(seats=3, policy="priority")
    lows = [bench.add([10 * i], priority=p)[0] for i, p in enumerate((5, 7, 6), start=1)]
    bench.step()
    bench.add([200], priority=1)
    bench.step()
    assert [s.state for s in lows] == [SequenceState.RUNNING, SequenceState.WAITING, SequenceState.RUNNING]


def test_nobody_is_pushed_out_for_an_arrival_that_would_not_fit_anyway() -> None:
    bench = Bench(num_blocks=12, policy="priority")
    bench.add(tokens(10, 30), priority=1)
    (low,) = bench.add([50], priority=5)
    bench.step()
    bench.add(tokens(200, 20), priority=3)
    bench.step()
    assert low.state is SequenceState.RUNNING
    bench.drain()


def test_first_come_first_served_pushes_out_nobody_for_a_newcomer() -> None:
    bench = Bench(seats=1)
    bench.add([10], priority=5)
    bench.step()
    bench.add([20], priority=1)
    bench.drain()
    assert bench.scheduler.counters.preemptions_recompute == 0
