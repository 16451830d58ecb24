"""The conformance suite for a `Policy`: subclass `PolicyTests`, say how to make one, done.

    class TestMine(PolicyTests):
        def make(self, capacity: int) -> Policy[int]:
            return Mine(capacity)

It holds for any order of eviction, so it does not test the order: write a readable trace for that.
Needs pytest and Hypothesis, which kvkeep itself does not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,  # pyright: ignore[reportUnknownVariableType]
)

from kvkeep.policies.base import Policy

UNIVERSE = range(12)
"""Few keys, so that they come back often, and more than the largest capacity of the model test."""

_keys = st.sampled_from(UNIVERSE)
_keeps = st.frozensets(_keys)


class PolicyTests:
    """What every policy promises, whatever its order."""

    def make(self, capacity: int) -> Policy[int]:
        """An empty policy for an owner that can hold `capacity` keys. Override this."""
        raise NotImplementedError

    def test_starts_empty(self) -> None:
        policy = self.make(4)
        assert len(policy) == 0
        assert 1 not in policy
        assert list(policy.victims()) == []

    def test_holds_what_was_inserted_until_it_is_removed(self) -> None:
        policy = self.make(4)
        policy.insert(1)
        policy.insert(2)
        assert len(policy) == 2
        assert 1 in policy
        policy.remove(1)
        assert 1 not in policy
        assert list(policy.victims()) == [2]

    def test_membership_takes_any_hashable(self) -> None:
        policy = self.make(4)
        policy.insert(1)
        assert "1" not in policy
        assert None not in policy

    def test_insert_of_a_held_key_raises_and_changes_nothing(self) -> None:
        policy = self.make(10)
        for key in (1, 2, 3):
            policy.insert(key)
        policy.touch(2)
        before = _order(policy)
        for key in (1, 2, 3):
            with pytest.raises(KeyError):
                policy.insert(key)
        assert _order(policy) == before

    def test_touch_and_remove_of_a_strange_key_raise_and_change_nothing(self) -> None:
        policy = self.make(4)
        policy.insert(1)
        with pytest.raises(KeyError):
            policy.touch(2)
        with pytest.raises(KeyError):
            policy.remove(2)
        assert _order(policy) == [1]

    def test_a_removed_key_is_strange(self) -> None:
        policy = self.make(4)
        policy.insert(1)
        policy.remove(1)
        with pytest.raises(KeyError):
            policy.remove(1)
        with pytest.raises(KeyError):
            policy.touch(1)
        assert len(policy) == 0

    def test_holds_more_than_its_capacity(self) -> None:
        policy = self.make(1)
        for key in range(50):
            policy.insert(key)
        assert len(policy) == 50
        assert sorted(policy.victims()) == list(range(50))

    def test_keeping_everything_ends_without_a_victim(self) -> None:
        policy = self.make(10)
        for key in range(10):
            policy.insert(key)
            for _ in range(key):
                policy.touch(key)
        assert list(policy.victims(keep=range(10))) == []
        assert len(policy) == 10
        assert sorted(policy.victims()) == list(range(10))

    def test_an_iteration_left_early_evicts_nothing(self) -> None:
        policy = self.make(10)
        for key in range(10):
            policy.insert(key)
        first = next(iter(policy.victims()))
        assert first in policy
        assert len(policy) == 10
        assert sorted(policy.victims()) == list(range(10))

    def test_victims_may_be_removed_while_the_iterator_is_still_held(self) -> None:
        policy = self.make(10)
        for key in range(10):
            policy.insert(key)
        iterator = policy.victims(keep={0, 9})
        taken = list(islice(iterator, 5))
        for key in taken:
            policy.remove(key)
        del iterator
        assert sorted(policy.victims()) == sorted(set(range(10)) - set(taken))

    def test_follows_a_model(self) -> None:
        make = self.make

        class Machine(_PolicyMachine):
            def __init__(self) -> None:
                super().__init__(make)

        run_state_machine_as_test(  # pyright: ignore[reportUnknownMemberType]
            Machine,
            settings=settings(max_examples=100, stateful_step_count=40, deadline=None),
        )


class _PolicyMachine(RuleBasedStateMachine):
    """Any sequence of calls, right and wrong ones, beside a plain set of the keys held."""

    def __init__(self, make: Callable[[int], Policy[int]]) -> None:
        super().__init__()
        self.make = make

    @initialize(capacity=st.integers(1, 8))
    def start(self, capacity: int) -> None:
        self.policy = self.make(capacity)
        self.held: set[int] = set()

    @rule(key=_keys)
    def insert(self, key: int) -> None:
        if key in self.held:
            self.raises(self.policy.insert, key)
        else:
            self.policy.insert(key)
            self.held.add(key)

    @rule(key=_keys, times=st.integers(1, 20))
    def touch(self, key: int, times: int) -> None:
        if key in self.held:
            for _ in range(times):
                self.policy.touch(key)
        else:
            self.raises(self.policy.touch, key)

    @rule(key=_keys)
    def remove(self, key: int) -> None:
        if key in self.held:
            self.policy.remove(key)
            self.held.remove(key)
        else:
            self.raises(self.policy.remove, key)

    @rule(keep=_keeps)
    def offer_all(self, keep: frozenset[int]) -> None:
        assert sorted(self.policy.victims(keep)) == sorted(self.held - keep)

    @rule(keep=_keeps, count=st.integers(0, 12), evict=st.booleans())
    def offer_some(self, keep: frozenset[int], count: int, evict: bool) -> None:
        iterator = self.policy.victims(keep)
        offered: list[int] = []
        for key in islice(iterator, count):
            offered.append(key)
            self.holds_the_same_keys()  # also between two offers
        assert len(set(offered)) == len(offered) == min(count, len(self.held - keep))
        assert set(offered) <= self.held - keep
        if evict:
            for key in offered:
                self.policy.remove(key)
            self.held -= set(offered)
        del iterator  # held until here: it may stand still while keys are removed

    @invariant()
    def holds_the_same_keys(self) -> None:
        assert len(self.policy) == len(self.held)
        assert {key for key in UNIVERSE if key in self.policy} == self.held

    def raises(self, call: Callable[[int], None], key: int) -> None:
        before = _order(self.policy)
        with pytest.raises(KeyError):
            call(key)
        assert _order(self.policy) == before


def _order(policy: Policy[int]) -> list[int]:
    """All victims, asked of a copy, since a policy may tidy itself while it is asked."""
    return list(copy.deepcopy(policy).victims())
