"""Which chunk lies in which slot, and who goes first when room is needed.

The index holds each of its slots by a lease of its own. A slot that somebody else holds as well
(a load, a write to disk) is never evicted: it would not become free.
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
        self._leases: dict[K, Lease] = {}
        self.owner = owner
        self.evictions = 0
        """How many chunks were evicted so far."""

    def __contains__(self, key: object) -> bool:
        return key in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[K]:
        return iter(self._leases)

    def prefix(self, keys: Sequence[K]) -> int:
        """How many leading `keys` are here."""
        leases = self._leases
        for count, key in enumerate(keys):
            if key not in leases:
                return count
        return len(keys)

    def slots(self, keys: Sequence[K]) -> list[int]:
        """The slots of `keys`, all of which are here (`KeyError` otherwise)."""
        leases = self._leases
        return [leases[key].slots[0] for key in keys]

    def touch(self, keys: Sequence[K]) -> None:
        """A hit on `keys`, a run of one prefix: its beginning becomes worth more than its end."""
        for key in reversed(keys):
            self._policy.touch(key)

    def insert(self, key: K, lease: Lease) -> bool:
        """Keep the chunk in `lease`'s one slot; the index owns the lease from here on.

        False, with the lease released, where the key is here already: both slots hold the same.
        """
        if key in self._leases:
            lease.release()
            return False
        if len(lease.slots) != 1:
            raise PoolError(f"a chunk has one slot, not {len(lease.slots)}")
        self._leases[key] = lease
        self._policy.insert(key)
        return True

    def remove(self, key: K) -> bool:
        """Forget the chunk; its slot is free once nobody else holds it. False if not here."""
        lease = self._leases.pop(key, None)
        if lease is None:
            return False
        self._policy.remove(key)
        lease.release()
        return True

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
        if count > 0:
            for key in self._policy.victims(keep):
                if self._pool.num_holds(self._leases[key].slots[0]) == 1:
                    chosen.append(key)
                    if len(chosen) == count:
                        break
        for key in chosen:
            self.remove(key)
        self.evictions += len(chosen)

    def clear(self) -> int:
        """Forget everything; how many chunks that were."""
        keys = list(self._leases)
        for key in keys:
            self.remove(key)
        return len(keys)

    def check_integrity(self) -> None:
        """The policy orders exactly the keys that are here, one slot each, all held by us."""
        if len(self._policy) != len(self._leases):
            raise PoolError("the policy orders another number of keys than the index holds")
        slots: set[int] = set()
        for key, lease in self._leases.items():
            if key not in self._policy:
                raise PoolError(f"the policy does not know {key!r}")
            if not lease.held:
                raise PoolError(f"the index lost its lease on {key!r}")
            slots.add(lease.slots[0])
        if len(slots) != len(self._leases):
            raise PoolError("two keys share a slot")
