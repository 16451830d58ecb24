"""Which chunk lies in which slot, and who goes first when room is needed.

The index holds its slots by one holding of its own. A slot that somebody else holds as well (a
load, a write to disk) is never evicted: it would not become free.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from kvkeep.errors import PoolError
from kvkeep.memory.pool import Lease, SlotPool
from kvkeep.policies.base import Policy

K = TypeVar("K", bound=Hashable)


class ChunkIndex(Generic[K]):
    """Key -> slot, in eviction order. Not thread-safe: its owner serialises all calls."""

    def __init__(self, pool: SlotPool, policy: Policy[K], owner: str = "memory") -> None:
        self._pool = pool
        self._policy = policy
        self._holding = pool.holding(owner)
        self._slots: dict[K, int] = {}
        self.evictions = 0
        """How many chunks were evicted so far."""

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[K]:
        return iter(self._slots)

    def prefix(self, keys: Sequence[K]) -> int:
        """How many leading `keys` are here."""
        slots = self._slots
        for count, key in enumerate(keys):
            if key not in slots:
                return count
        return len(keys)

    def slots(self, keys: Sequence[K]) -> list[int]:
        """The slots of `keys`, all of which are here (`KeyError` otherwise)."""
        slots = self._slots
        return [slots[key] for key in keys]

    def touch(self, keys: Sequence[K]) -> None:
        """A hit on `keys`, a run of one prefix: its beginning becomes worth more than its end."""
        touch = self._policy.touch
        for key in reversed(keys):
            touch(key)

    def insert(self, keys: Sequence[K], lease: Lease) -> list[K]:
        """Keep chunk i in slot i of `lease`, which ends; those that were not here before.

        `keys` are in prefix order: the first become the most recent, since a chunk is worth
        nothing without those before it. Where a key is here already its new slot is freed: both
        hold the same.
        """
        if len(keys) != len(lease.slots):
            raise PoolError(f"{len(keys)} chunks do not fit {len(lease.slots)} slots")
        self._holding.take(lease)
        slots, insert = self._slots, self._policy.insert
        new: list[K] = []
        again: list[int] = []
        for key, slot in zip(reversed(keys), reversed(lease.slots), strict=True):
            if key in slots:
                again.append(slot)
            else:
                slots[key] = slot
                insert(key)
                new.append(key)
        if again:
            self._holding.drop(again)
        new.reverse()
        return new

    def remove(self, keys: Sequence[K]) -> int:
        """Forget those of `keys` that are here; a slot is free once nobody else holds it."""
        freed: list[int] = []
        for key in keys:
            slot = self._slots.pop(key, None)
            if slot is not None:
                self._policy.remove(key)
                freed.append(slot)
        self._holding.drop(freed)
        return len(freed)

    def reserve(self, count: int, owner: str, keep: Container[K] = ()) -> Lease | None:
        """Lease up to `count` slots for `owner`, evicting where needed but never from `keep`.

        Fewer than `count` where no more can be freed; None for none at all. Never waits.
        """
        missing = count - self._pool.free_slots
        if missing > 0:
            self._evict(missing, keep)
        count = min(count, self._pool.free_slots)
        return self._pool.lease(count, owner) if count > 0 else None

    def _evict(self, count: int, keep: Container[K]) -> None:
        chosen: list[K] = []
        slots, num_holds = self._slots, self._pool.num_holds
        for key in self._policy.victims(keep):
            if num_holds(slots[key]) == 1:
                chosen.append(key)
                if len(chosen) == count:
                    break
        self.evictions += self.remove(chosen)

    def clear(self) -> int:
        """Forget everything; how many chunks that were."""
        return self.remove(list(self._slots))

    def check_integrity(self) -> None:
        """The policy orders exactly the keys that are here, one slot each, all held by us."""
        if len(self._policy) != len(self._slots):
            raise PoolError("the policy orders another number of keys than the index holds")
        for key in self._slots:
            if key not in self._policy:
                raise PoolError(f"the policy does not know {key!r}")
        if sorted(self._slots.values()) != sorted(self._holding.slots):
            raise PoolError("the index holds other slots than its keys say")
