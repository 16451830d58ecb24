"""The pool: slots of one size cut from one shared allocation, held by leases.

Who holds a slot is always known by name. A slot is free exactly when no lease holds it; nothing
counts references by hand, and nothing but `Lease.release` gives a slot back.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from typing_extensions import Self

from kvkeep.errors import PoolError
from kvkeep.memory.shared import SharedMemory

ALIGNMENT = 4096
HEADER_BYTES = 4096
"""A slot holds a whole frame: this much for its header, then the payload."""


class Lease:
    """A hold of one owner on one or more slots, given back exactly once.

    Leases on the same slot are independent: the slot is free when the last one is released.
    """

    __slots__ = ("slots", "owner", "_pool", "_held")

    def __init__(self, pool: SlotPool, slots: tuple[int, ...], owner: str) -> None:
        self.slots = slots
        self.owner = owner
        self._pool = pool
        self._held = True

    @property
    def held(self) -> bool:
        """False once released, or moved into a holding."""
        return self._held

    def release(self) -> None:
        """Give the slots back. Raises `PoolError` the second time."""
        self._pool._release(self)  # pyright: ignore[reportPrivateUsage]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._held:
            self.release()

    def __repr__(self) -> str:
        return f"Lease({self.owner!r}, {len(self.slots)} slots, held={self._held})"


class Holding:
    """One owner's lasting hold on many slots, one of each, which come and go.

    A lease's hold can be moved into it; there is no way to hold a slot twice by one holding.
    """

    __slots__ = ("slots", "owner", "_pool")

    def __init__(self, pool: SlotPool, owner: str) -> None:
        self.slots: set[int] = set()
        self.owner = owner
        self._pool = pool

    def take(self, lease: Lease) -> None:
        """End `lease` and hold its slots instead. Raises `PoolError` for one held already."""
        self._pool._take(self, lease)  # pyright: ignore[reportPrivateUsage]

    def drop(self, slots: Sequence[int]) -> None:
        """Give `slots` back. Raises `PoolError` for one that is not held."""
        self._pool._drop(self, slots)  # pyright: ignore[reportPrivateUsage]


class SlotPool:
    """`num_slots` slots, each with `slot_bytes[r]` bytes for every engine rank r. Thread-safe.

    Slot i of rank r lies at `offset(i, r)`; each rank's slots are one contiguous region, so that
    a rank's worker needs only its own.
    """

    def __init__(self, memory: SharedMemory, num_slots: int, slot_bytes: Sequence[int]) -> None:
        if num_slots < 1:
            raise PoolError("a pool needs at least one slot")
        for nbytes in slot_bytes:
            if nbytes <= 0 or nbytes % ALIGNMENT:
                raise PoolError(f"slot size {nbytes} is not a positive multiple of {ALIGNMENT}")
        if memory.nbytes < num_slots * sum(slot_bytes):
            raise PoolError(f"{num_slots} slots do not fit into {memory.nbytes} bytes")
        self.memory = memory
        self.num_slots = num_slots
        self.slot_bytes = tuple(slot_bytes)
        self._bases: list[int] = []
        base = 0
        for nbytes in self.slot_bytes:
            self._bases.append(base)
            base += num_slots * nbytes
        self._lock = threading.Lock()
        self._holds = [0] * num_slots
        # Taken from the end: the lowest slot first, which is populated first.
        self._free = list(range(num_slots - 1, -1, -1))
        self._leases: set[Lease] = set()
        self._holdings: list[Holding] = []

    @classmethod
    def create(cls, size_bytes: int, slot_bytes: Sequence[int]) -> SlotPool:
        """As many slots as fit into `size_bytes`, in new shared memory.

        Raises `PoolError` where not even one fits, `OSError` where there is no memory.
        """
        if not slot_bytes or min(slot_bytes) <= 0:
            raise PoolError(f"slot sizes {list(slot_bytes)} are not all positive")
        num_slots = size_bytes // sum(slot_bytes)
        if num_slots < 1:
            raise PoolError(
                f"{size_bytes} bytes hold no chunk: one needs {sum(slot_bytes)} bytes over "
                f"{len(slot_bytes)} rank(s)"
            )
        return cls(SharedMemory.create(num_slots * sum(slot_bytes)), num_slots, slot_bytes)

    @property
    def num_ranks(self) -> int:
        return len(self.slot_bytes)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def offset(self, slot: int, rank: int = 0) -> int:
        """Where the slot starts in the memory, in bytes; a multiple of `ALIGNMENT`."""
        return self._bases[rank] + slot * self.slot_bytes[rank]

    def view(self, slot: int, rank: int = 0) -> memoryview:
        """The slot's bytes: writable, format "B". Valid while the caller holds a lease on it."""
        start = self.offset(slot, rank)
        return self.memory.view[start : start + self.slot_bytes[rank]]

    def lease(self, count: int, owner: str) -> Lease | None:
        """Hold `count` free slots, or None where there are fewer. Never blocks, never evicts."""
        if count < 0:
            raise PoolError(f"{count} slots can't be leased")
        with self._lock:
            if count > len(self._free):
                return None
            at = len(self._free) - count
            slots = tuple(reversed(self._free[at:]))
            del self._free[at:]
            return self._hold(slots, owner)

    def share(self, slots: Sequence[int], owner: str) -> Lease:
        """A further hold on slots that somebody holds now. Raises `PoolError` for a free one."""
        with self._lock:
            holds, end = self._holds, self.num_slots
            if any(not 0 <= slot < end or holds[slot] == 0 for slot in slots):
                raise PoolError("only a held slot can be shared")
            return self._hold(tuple(slots), owner)

    def holding(self, owner: str) -> Holding:
        """An empty holding for `owner`, for as long as the pool lives."""
        holding = Holding(self, owner)
        with self._lock:
            self._holdings.append(holding)
        return holding

    def num_holds(self, slot: int) -> int:
        """How many leases and holdings hold the slot."""
        return self._holds[slot]

    def _hold(self, slots: tuple[int, ...], owner: str) -> Lease:
        holds = self._holds
        for slot in slots:
            holds[slot] += 1
        lease = Lease(self, slots, owner)
        self._leases.add(lease)
        return lease

    def _end(self, lease: Lease) -> None:
        if not lease._held:  # pyright: ignore[reportPrivateUsage]
            raise PoolError(f"{lease!r} was given back before")
        lease._held = False  # pyright: ignore[reportPrivateUsage]
        self._leases.remove(lease)

    def _release(self, lease: Lease) -> None:
        with self._lock:
            self._end(lease)
            self._give_back(lease.slots)

    def _give_back(self, slots: Sequence[int]) -> None:
        holds, free = self._holds, self._free
        for slot in reversed(slots):
            holds[slot] -= 1
            if holds[slot] == 0:
                free.append(slot)

    def _take(self, holding: Holding, lease: Lease) -> None:
        with self._lock:
            slots = set(lease.slots)
            if len(slots) != len(lease.slots) or not holding.slots.isdisjoint(slots):
                raise PoolError(f"{holding.owner!r} would hold a slot of {lease!r} twice")
            self._end(lease)
            holding.slots |= slots

    def _drop(self, holding: Holding, slots: Sequence[int]) -> None:
        with self._lock:
            if len(set(slots)) != len(slots) or not holding.slots.issuperset(slots):
                raise PoolError(f"{holding.owner!r} does not hold each of these slots")
            holding.slots.difference_update(slots)
            self._give_back(slots)

    def owners(self) -> dict[str, int]:
        """Owner -> how many slots it holds now."""
        with self._lock:
            held: Counter[str] = Counter()
            for holder in (*self._leases, *self._holdings):
                held[holder.owner] += len(holder.slots)
            return {owner: count for owner, count in held.items() if count}

    def check_integrity(self) -> None:
        """Every slot is either free once or held by the leases that say so. Raises `PoolError`."""
        with self._lock:
            counted = [0] * self.num_slots
            for holder in (*self._leases, *self._holdings):
                for slot in holder.slots:
                    counted[slot] += 1
            if counted != self._holds:
                raise PoolError("the count of holds differs from the leases and holdings")
            free = set(self._free)
            if len(free) != len(self._free):
                raise PoolError("a slot is free twice")
            if free != {slot for slot, holds in enumerate(counted) if holds == 0}:
                raise PoolError("the free slots are not exactly those that nobody holds")

    def close(self) -> None:
        """Unmap the memory; leases that are still held keep only their names."""
        self.memory.close()
