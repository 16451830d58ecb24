"""The memory tier on its own: bytes by key in the slots of a pool.

An engine's connector works on the pool directly (`kvkeep.cache`), without copies. This tier is
the same pool and index behind the `Tier` interface, for a server and for tests.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvkeep.memory.index import ChunkIndex
from kvkeep.memory.pool import SlotPool
from kvkeep.policies.base import Policy
from kvkeep.types import ChunkKey


class MemoryTier:
    """Keeps values of up to `pool.slot_bytes[0]` bytes; longer ones are not kept."""

    name = "memory"
    answers_at_once = True

    def __init__(self, pool: SlotPool, policy: Policy[ChunkKey]) -> None:
        self._pool = pool
        self._index: ChunkIndex[ChunkKey] = ChunkIndex(pool, policy)
        self._nbytes: dict[int, int] = {}
        self._lock = threading.Lock()

    def open(self) -> None:
        """Nothing to start."""

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with self._lock:
            return [key in self._index for key in keys]

    def load(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | None]:
        return [self._load(key, buffer) for key, buffer in zip(keys, into, strict=True)]

    def _load(self, key: ChunkKey, buffer: memoryview) -> int | None:
        with self._lock:
            if key not in self._index:
                return None
            (slot,) = self._index.slots([key])
            nbytes = self._nbytes[slot]
            if nbytes > len(buffer):
                return None
            self._index.touch([key])
            lease = self._pool.share([slot], "load")
        with lease:
            buffer[:nbytes] = self._pool.view(slot)[:nbytes]
        return nbytes

    def store(self, keys: Sequence[ChunkKey], values: Sequence[memoryview]) -> None:
        for key, value in zip(keys, values, strict=True):
            if len(value) <= self._pool.slot_bytes[0]:
                self._store(key, value)

    def _store(self, key: ChunkKey, value: memoryview) -> None:
        with self._lock:
            lease = self._index.reserve(1, "store", keep=(key,))
        if lease is None:
            return
        (slot,) = lease.slots
        self._pool.view(slot)[: len(value)] = value
        with self._lock:
            self._nbytes[slot] = len(value)
            self._index.remove([key])
            self._index.insert([key], lease)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        with self._lock:
            self._index.remove(keys)

    def check_integrity(self) -> None:
        """Index, policy and pool agree. Raises `PoolError`."""
        with self._lock:
            self._index.check_integrity()
            self._pool.check_integrity()

    def close(self) -> None:
        with self._lock:
            self._index.clear()
