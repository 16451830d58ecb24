"""A tier beside a dict, driven through the same steps by Hypothesis: it may forget, never lie."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,  # pyright: ignore[reportUnknownVariableType]
)

from kvkeep.tiers.base import Tier
from kvkeep.types import ChunkKey, Digest

MODEL_SETTINGS = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

_KEYS = [
    ChunkKey(namespace, rank, Digest(hashlib.sha256(b"%d" % number).digest()))
    for namespace, rank, number in [("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 0, 0), ("b", 0, 2)]
]
_LONGEST = 12_288

_batches = st.lists(st.sampled_from(_KEYS), max_size=4, unique=True)
_lengths = st.sampled_from([1, 4095, 4096, 8192, 10_000, _LONGEST])


class TierMachine(RuleBasedStateMachine):
    """The model is, for each key, the values that may be there: one stored over another may be
    either, and one that was seen to be gone must not come back.
    """

    def __init__(self, make: Callable[[], Tier], *, forgets: bool) -> None:
        super().__init__()
        self.tier = make()
        self.tier.open()
        self.forgets = forgets
        self.possible: dict[ChunkKey, set[bytes]] = {key: set() for key in _KEYS}
        self.versions = 0

    @rule(keys=_batches, lengths=st.lists(_lengths, min_size=4, max_size=4))
    def store(self, keys: list[ChunkKey], lengths: list[int]) -> None:
        values: list[bytes] = []
        for _, nbytes in zip(keys, lengths, strict=False):
            self.versions += 1
            values.append(hashlib.shake_128(b"%d" % self.versions).digest(nbytes))
        self.tier.store(keys, [memoryview(value) for value in values])
        for key, value in zip(keys, values, strict=True):
            self.possible[key].add(value)

    @rule(keys=_batches, room=_lengths)
    def load(self, keys: list[ChunkKey], room: int) -> None:
        buffers = [memoryview(bytearray(room)) for _ in keys]
        for key, buffer, count in zip(keys, buffers, self.tier.load(keys, buffers), strict=True):
            possible = self.possible[key]
            if count is not None:
                assert bytes(buffer[:count]) in possible
                self.possible[key] = {bytes(buffer[:count])}
                continue
            short = {value for value in possible if len(value) > room}
            assert self.forgets or short or not possible
            self.possible[key] = short

    @rule(keys=_batches)
    def contains(self, keys: list[ChunkKey]) -> None:
        for key, kept in zip(keys, self.tier.contains(keys), strict=True):
            if kept:
                assert self.possible[key]
            else:
                assert self.forgets or not self.possible[key]
                self.possible[key] = set()

    @rule(keys=_batches)
    def delete(self, keys: list[ChunkKey]) -> None:
        self.tier.delete(keys)
        for key in keys:
            self.possible[key] = set()

    @invariant()
    def is_sound(self) -> None:
        check = getattr(self.tier, "check_integrity", None)
        if check is not None:
            check()

    def teardown(self) -> None:
        self.tier.close()


def check_against_model(make: Callable[[], Tier], *, forgets: bool) -> None:
    """Compare a tier with a dict; `make` gives a new, empty, unopened one for each example.

    `forgets`: whether it may lose what it holds, as one with less room than 160 KB does.
    """

    class Machine(TierMachine):
        def __init__(self) -> None:
            super().__init__(make, forgets=forgets)

    run_state_machine_as_test(Machine, settings=MODEL_SETTINGS)
