"""Every policy gives a total order that does not depend on the order of asking; and what each one means."""

from __future__ import annotations

import itertools

import pytest

from octavo.errors import ConfigError
from octavo.memory.block_pool import BlockPool
from octavo.request import Request, Sequence
from octavo.sampling_params import SamplingParams
from octavo.scheduler.policies import POLICIES, FirstComeFirstServed, Policy, Priority


def sequence(order: int, priority: int = 0, arrival_s: float = 0.0) -> Sequence:
    request = Request(f"r{order}", (1,), SamplingParams(), (0,), b"", priority, arrival_s)
    return Sequence(order, request, 0, order, BlockPool(1, 1))


CROWD = [sequence(order, priority) for order, priority in enumerate([3, 0, 2, 0, 3, -1])]


@pytest.mark.parametrize("name", POLICIES.names())
def test_ranks_never_tie_and_outranking_is_a_strict_order_within_the_ranks(name: str) -> None:
    policy: Policy = POLICIES.load(name)()
    assert len({policy.rank(s, 5.0) for s in CROWD}) == len(CROWD)
    for a, b in itertools.product(CROWD, CROWD):
        if policy.outranks(a, b):
            # Otherwise two sequences could push each other out for ever, or the wrong ones would be preempted.
            assert policy.rank(a, 5.0) < policy.rank(b, 5.0) and not policy.outranks(b, a)


def test_first_come_first_served_goes_by_arrival_and_pushes_out_nobody() -> None:
    policy = FirstComeFirstServed()
    assert [s.order for s in sorted(CROWD, key=lambda s: policy.rank(s, 0.0))] == [0, 1, 2, 3, 4, 5]
    assert not any(policy.outranks(a, b) for a in CROWD for b in CROWD)


def test_priority_goes_by_lower_number_and_then_by_arrival() -> None:
    policy = Priority()
    assert [s.order for s in sorted(CROWD, key=lambda s: policy.rank(s, 0.0))] == [5, 1, 3, 2, 0, 4]
    assert policy.outranks(CROWD[1], CROWD[0])
    assert not policy.outranks(CROWD[3], CROWD[1]), "equals do not push each other out"


def test_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="unknown policy 'fifo'; known: fcfs, priority"):
        POLICIES.load("fifo")


def test_own_policy_can_be_named_by_module_and_class() -> None:
    assert POLICIES.load("octavo.scheduler.policies:Priority") is Priority
