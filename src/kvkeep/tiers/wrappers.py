"""Tiers around a tier: to measure it, to slow it down, to make it fail.

Each passes on what it does not change, satisfies `Tier` itself, and can be put around another.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvkeep.errors import TierError
from kvkeep.tiers.base import BoundedTier, Occupancy, Tier
from kvkeep.types import ChunkKey

Operation = Literal["contains", "load", "store", "delete"]


class Wrapper:
    """Passes everything on; the base of the others."""

    def __init__(self, tier: Tier) -> None:
        self.name = tier.name
        self.answers_at_once = tier.answers_at_once
        self.inner = tier

    def open(self) -> None:
        """As `Tier.open`."""
        self.inner.open()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """As `Tier.contains`."""
        return self.inner.contains(keys)

    def load(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | None]:
        """As `Tier.load`."""
        return self.inner.load(keys, into)

    def store(self, keys: Sequence[ChunkKey], values: Sequence[memoryview]) -> None:
        """As `Tier.store`."""
        self.inner.store(keys, values)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """As `Tier.delete`."""
        self.inner.delete(keys)

    def close(self) -> None:
        """As `Tier.close`."""
        self.inner.close()

    def occupancy(self) -> Occupancy:
        """As `BoundedTier.occupancy`; a cap of 0 where the tier within has none of its own."""
        return self.inner.occupancy() if isinstance(self.inner, BoundedTier) else Occupancy(0, 0)


@dataclass(frozen=True, slots=True)
class TierEvent:
    """One call to a tier that has ended."""

    tier: str
    operation: Operation
    keys: int
    hits: int
    """Keys that `contains` or `load` found; 0 for the others."""
    nbytes: int
    """Bytes loaded, or given to be stored; 0 where the call failed."""
    seconds: float
    error: BaseException | None


class Measured(Wrapper):
    """Tells `on_event` of each call, in the caller's thread, also of one that raises."""

    def __init__(self, tier: Tier, on_event: Callable[[TierEvent], None]) -> None:
        super().__init__(tier)
        self._on_event = on_event

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """As `Tier.contains`."""
        began_s = time.perf_counter()
        try:
            answers = self.inner.contains(keys)
        except BaseException as error:
            self._tell("contains", keys, began_s, error=error)
            raise
        self._tell("contains", keys, began_s, hits=sum(answers))
        return answers

    def load(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | None]:
        """As `Tier.load`."""
        began_s = time.perf_counter()
        try:
            counts = self.inner.load(keys, into)
        except BaseException as error:
            self._tell("load", keys, began_s, error=error)
            raise
        hits = [count for count in counts if count is not None]
        self._tell("load", keys, began_s, hits=len(hits), nbytes=sum(hits))
        return counts

    def store(self, keys: Sequence[ChunkKey], values: Sequence[memoryview]) -> None:
        """As `Tier.store`."""
        began_s = time.perf_counter()
        try:
            self.inner.store(keys, values)
        except BaseException as error:
            self._tell("store", keys, began_s, error=error)
            raise
        self._tell("store", keys, began_s, nbytes=sum(value.nbytes for value in values))

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """As `Tier.delete`."""
        began_s = time.perf_counter()
        try:
            self.inner.delete(keys)
        except BaseException as error:
            self._tell("delete", keys, began_s, error=error)
            raise
        self._tell("delete", keys, began_s)

    def _tell(
        self,
        operation: Operation,
        keys: Sequence[ChunkKey],
        began_s: float,
        *,
        hits: int = 0,
        nbytes: int = 0,
        error: BaseException | None = None,
    ) -> None:
        seconds = time.perf_counter() - began_s
        self._on_event(TierEvent(self.name, operation, len(keys), hits, nbytes, seconds, error))


class Delayed(Wrapper):
    """Takes `seconds_per_call` more for each call, and for each byte that is loaded or stored its
    share of a second at `bytes_per_s`. Calls do not wait for each other.
    """

    def __init__(
        self, tier: Tier, seconds_per_call: float = 0.0, bytes_per_s: float = float("inf")
    ) -> None:
        super().__init__(tier)
        self._seconds_per_call = seconds_per_call
        self._bytes_per_s = bytes_per_s

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """As `Tier.contains`."""
        self._wait(0)
        return self.inner.contains(keys)

    def load(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | None]:
        """As `Tier.load`."""
        counts = self.inner.load(keys, into)
        self._wait(sum(count for count in counts if count is not None))
        return counts

    def store(self, keys: Sequence[ChunkKey], values: Sequence[memoryview]) -> None:
        """As `Tier.store`."""
        self._wait(sum(value.nbytes for value in values))
        self.inner.store(keys, values)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """As `Tier.delete`."""
        self._wait(0)
        self.inner.delete(keys)

    def _wait(self, nbytes: int) -> None:
        seconds = self._seconds_per_call + nbytes / self._bytes_per_s
        if seconds > 0:
            time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probabilities, 0 to 1. `error` is for each call, the others for each key of a call."""

    error: float = 0.0
    """The call raises `TierError` and does nothing."""
    miss: float = 0.0
    """`contains` and `load` do not find what is there."""
    corrupt: float = 0.0
    """A loaded value has one byte wrong."""
    truncate: float = 0.0
    """A loaded value ends early, as a tier that breaks its contract would have it."""
    drop: float = 0.0
    """A stored value is not kept, and nothing says so."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be from 0 to 1, not {getattr(self, name)}")


class Faulty(Wrapper):
    """Fails at `rates`, the same way for the same `seed` and order of calls, or when told to."""

    def __init__(self, tier: Tier, rates: FaultRates | None = None, seed: int = 0) -> None:
        super().__init__(tier)
        self.rates = rates or FaultRates()
        """May be replaced at any time."""
        self._random = random.Random(seed)
        self._failures_left = 0
        self._lock = threading.Lock()

    def fail_next(self, calls: int) -> None:
        """The next `calls` calls raise `TierError` and do nothing; 0 ends that."""
        with self._lock:
            self._failures_left = calls

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """As `Tier.contains`, at times."""
        self._maybe_fail("contains")
        return [kept and not self._happens(self.rates.miss) for kept in self.inner.contains(keys)]

    def load(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | None]:
        """As `Tier.load`, at times."""
        self._maybe_fail("load")
        counts = self.inner.load(keys, into)
        return [self._spoil(count, view) for count, view in zip(counts, into, strict=True)]

    def store(self, keys: Sequence[ChunkKey], values: Sequence[memoryview]) -> None:
        """As `Tier.store`, at times."""
        self._maybe_fail("store")
        kept = [place for place in range(len(keys)) if not self._happens(self.rates.drop)]
        self.inner.store([keys[place] for place in kept], [values[place] for place in kept])

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """As `Tier.delete`, at times."""
        self._maybe_fail("delete")
        self.inner.delete(keys)

    def _maybe_fail(self, operation: Operation) -> None:
        with self._lock:
            told = self._failures_left > 0
            self._failures_left -= told
        if told or self._happens(self.rates.error):
            raise TierError(f"{self.name}: made to fail in {operation}")

    def _spoil(self, count: int | None, view: memoryview) -> int | None:
        if count is None or self._happens(self.rates.miss):
            return None
        if count and self._happens(self.rates.corrupt):
            view[self._below(count)] ^= 0xFF
        if count and self._happens(self.rates.truncate):
            return self._below(count)
        return count

    def _happens(self, rate: float) -> bool:
        with self._lock:
            return self._random.random() < rate

    def _below(self, stop: int) -> int:
        with self._lock:
            return self._random.randrange(stop)
