"""Policies: who goes first, and who may push whom out.

A policy is one small class. `rank` orders sequences (lower goes first; it must end in `sequence.order`, so that no two tie);
`outranks` says whether a waiting sequence may take the place of a running one. To add one, write the class and add its line
to POLICIES, or pass `--policy package.module:Class`.
"""

from __future__ import annotations

from typing import Protocol

from octavo.registry import Registry
from octavo.request import Sequence

Rank = tuple[float, ...]


class Policy(Protocol):
    """The order of service. May be called for every live sequence in every step: keep it O(1).

    ages: ranks change while sequences wait (they depend on `now`, or on anything else that changes), so the queues are
    sorted again in every step. A policy whose ranks never change spares that cost.
    """

    ages: bool

    def rank(self, sequence: Sequence, now: float) -> Rank:
        """Where a sequence stands; lower is served first, higher is preempted first."""
        ...

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """May `waiting` push `running` out when there is no room for both?"""
        ...


class FirstComeFirstServed:
    """By arrival; nobody is pushed out for a newcomer."""

    ages = False

    def rank(self, sequence: Sequence, now: float) -> Rank:
        return (sequence.order,)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return False


class Priority:
    """By the request's priority (lower first), then by arrival; a more urgent arrival pushes out a less urgent sequence."""

    ages = False

    def rank(self, sequence: Sequence, now: float) -> Rank:
        return (sequence.request.priority, sequence.order)

    def outranks(self, waiting: Sequence, running: Sequence) -> bool:
        return waiting.request.priority < running.request.priority


POLICIES = Registry(
    "policy",
    {
        "fcfs": "octavo.scheduler.policies:FirstComeFirstServed",
        "priority": "octavo.scheduler.policies:Priority",
    },
)
