"""Stand-ins whose faults and delays are switched by hand: a tier, a clock, an engine's pages.

`kvkeep.tiers.wrappers` fails at random; here a test says exactly which call fails, or waits.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from kvkeep.cache import Fetch, KVCache, Reservation
from kvkeep.device.copier import CopyRun, Ended
from kvkeep.errors import TierError
from kvkeep.hierarchy import ChunkShape, Hierarchy, TierLink
from kvkeep.keys import Namespace
from kvkeep.memory.pool import HEADER_BYTES, SlotPool
from kvkeep.policies import make_policy
from kvkeep.policies.base import Policy
from kvkeep.tiers.base import Tier
from kvkeep.tiers.wrappers import Operation
from kvkeep.transfer import Breaker, TransferQueue
from kvkeep.types import ChunkKey, Digest

PATIENCE_S = 5.0
"""How long a test waits for what must come soon, before it takes it for lost."""


def eventually(holds: Callable[[], bool]) -> None:
    """Return once `holds()` is true; fail where that does not come about."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "did not come about"
        time.sleep(0.001)


class FakeClock:
    """A monotonic clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now_s += seconds


class FakeTier:
    """A dict behind the `Tier` interface.

    `error` is raised by every operation in `failing`. Within `held(operation)` calls of that
    operation wait, each saying so through `wait_for_call`.
    """

    def __init__(self, name: str = "fake", *, answers_at_once: bool = True) -> None:
        self.name = name
        self.answers_at_once = answers_at_once
        self.values: dict[ChunkKey, bytes] = {}
        self.calls: list[tuple[Operation, tuple[ChunkKey, ...]]] = []
        """Every call in the order they began."""
        self.failing: set[Operation] = set()
        self.error: BaseException = TierError("made to fail")
        self.is_open = False
        self._gates: dict[Operation, threading.Event] = {}
        self._lock = threading.Lock()
        self._began = threading.Condition(self._lock)

    def count(self, operation: Operation) -> int:
        """How many calls of `operation` have begun."""
        with self._lock:
            return sum(called == operation for called, _ in self.calls)

    def wait_for_call(self, operation: Operation, count: int = 1) -> None:
        """Return once `count` calls of `operation` have begun."""
        with self._began:
            began = self._began.wait_for(
                lambda: sum(called == operation for called, _ in self.calls) >= count, PATIENCE_S
            )
        assert began, f"{self.name}: {count} calls of {operation} did not begin"

    @contextmanager
    def held(self, operation: Operation) -> Generator[None, None, None]:
        """Let calls of `operation` wait until the end of the block."""
        gate = self._gates[operation] = threading.Event()
        try:
            yield
        finally:
            del self._gates[operation]
            gate.set()

    def flip(self, key: ChunkKey, at: int, mask: int = 1) -> None:
        """Spoil a kept value: flip the bits of `mask` in byte `at`."""
        value = bytearray(self.values[key])
        value[at] ^= mask
        self.values[key] = bytes(value)

    def open(self) -> None:
        """Fails where "contains" does: a tier that can't be asked can't be opened."""
        if "contains" in self.failing:
            raise self.error
        self.is_open = True

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._begin("contains", keys)
        return [key in self.values for key in keys]

    def load(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | None]:
        self._begin("load", keys)
        return [self._load(key, buffer) for key, buffer in zip(keys, into, strict=True)]

    def _load(self, key: ChunkKey, buffer: memoryview) -> int | None:
        value = self.values.get(key)
        if value is None or len(value) > len(buffer):
            return None
        buffer[: len(value)] = value
        return len(value)

    def store(self, keys: Sequence[ChunkKey], values: Sequence[memoryview]) -> None:
        self._begin("store", keys)
        for key, value in zip(keys, values, strict=True):
            self.values[key] = bytes(value)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._begin("delete", keys)
        for key in keys:
            self.values.pop(key, None)

    def close(self) -> None:
        self.is_open = False

    def _begin(self, operation: Operation, keys: Sequence[ChunkKey]) -> None:
        with self._began:
            self.calls.append((operation, tuple(keys)))
            gate = self._gates.get(operation)
            self._began.notify_all()
        if gate is not None:
            assert gate.wait(PATIENCE_S), f"{self.name}: {operation} was held for too long"
        if operation in self.failing:
            raise self.error


class FakePages:
    """One rank's paged KV cache of an engine, in plain bytes: a `PageCopier` without a device."""

    def __init__(
        self,
        pool: SlotPool,
        *,
        num_blocks: int,
        block_nbytes: int,
        blocks_per_chunk: int,
        rank: int = 0,
    ) -> None:
        self._pool = pool
        self._rank = rank
        self._blocks_per_chunk = blocks_per_chunk
        self._blocks = [bytes(block_nbytes)] * num_blocks
        self.written: list[int] = []
        """Blocks that `scatter` wrote, in order."""
        self.error: Exception | None = None
        """What both copies raise, as long as it is set."""

    def __getitem__(self, block: int) -> bytes:
        return self._blocks[block]

    def __setitem__(self, block: int, content: bytes) -> None:
        assert len(content) == len(self._blocks[block])
        self._blocks[block] = content

    def gather(self, runs: Sequence[CopyRun]) -> Ended:
        """As `PageCopier.gather`."""
        for part, block in self._pairs(runs):
            part[:] = self._blocks[block]
        return Ended()

    def scatter(self, runs: Sequence[CopyRun]) -> Ended:
        """As `PageCopier.scatter`."""
        for part, block in self._pairs(runs):
            self._blocks[block] = bytes(part)
            self.written.append(block)
        return Ended()

    def _pairs(self, runs: Sequence[CopyRun]) -> list[tuple[memoryview, int]]:
        """Each block's part of its slot, and its number."""
        if self.error is not None:
            raise self.error
        nbytes = len(self._blocks[0])
        pairs: list[tuple[memoryview, int]] = []
        for run in runs:
            for slot, first, block_ids in run.chunks(self._blocks_per_chunk):
                payload = self._pool.view(slot, self._rank)[HEADER_BYTES:]
                for at, block in enumerate(block_ids, first):
                    pairs.append((payload[at * nbytes : (at + 1) * nbytes], block))
        return pairs


def fake_namespace(**fields: str) -> Namespace:
    """A namespace of a model that does not exist."""
    return Namespace.of("fake/model", {"model": "fake", **fields})


def fake_cache(
    *tiers: Tier,
    num_slots: int = 8,
    payload_nbytes: Sequence[int] = (256,),
    chunk_tokens: int = 4,
    num_threads: int = 2,
    max_store_bytes: int = 1 << 20,
    keeps_memory: bool = True,
    clock: FakeClock | None = None,
) -> KVCache:
    """A small LRU cache over `tiers`, opened. Its breakers follow `clock`, where one is given."""
    shape = ChunkShape(chunk_tokens, tuple(payload_nbytes))
    pool = SlotPool.create(num_slots * sum(shape.slot_bytes), shape.slot_bytes)
    links: list[TierLink] = []
    for tier in tiers:
        breaker = Breaker(tier.name, clock=clock) if clock is not None else Breaker(tier.name)
        queue = TransferQueue(
            tier.name, breaker, num_threads=num_threads, max_store_bytes=max_store_bytes
        )
        links.append(TierLink(tier, queue, breaker))
    hierarchy = Hierarchy(links, pool, fake_namespace(), shape)
    policy: Policy[Digest] = make_policy("lru", num_slots)
    cache = KVCache(pool, policy, hierarchy, shape, keeps_memory=keeps_memory)
    cache.open()
    return cache


class FakeEngine:
    """What an engine does with a cache, on one rank, at once and without a device.

    A chunk's bytes follow from its digest, so that whoever is given some can tell whether they
    are right.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def payload(self, slot: int) -> memoryview:
        """The slot's bytes that hold KV."""
        nbytes = self.cache.shape.payload_nbytes[0]
        return self.cache.pool.view(slot)[HEADER_BYTES : HEADER_BYTES + nbytes]

    def content(self, digest: Digest) -> bytes:
        """The bytes that belong to `digest`."""
        return hashlib.shake_128(digest).digest(self.cache.shape.payload_nbytes[0])

    def write(self, reservation: Reservation) -> None:
        """Compute the reserved chunks into their slots."""
        for digest, slot in zip(reservation.digests, reservation.lease.slots, strict=True):
            self.payload(slot)[:] = self.content(digest)

    def put(self, digests: Sequence[Digest]) -> tuple[Digest, ...]:
        """Keep `digests`, and wait for the slow tiers; which of them were new and had room."""
        reservation = self.cache.reserve(digests, "request")
        if reservation is None:
            return ()
        self.write(reservation)
        self.cache.publish(reservation)
        self.settle()
        return reservation.digests

    def get(self, digests: Sequence[Digest]) -> list[tuple[str, int]]:
        """Match, fetch, check, release; the (tier, chunks) runs that came."""
        fetch = self.cache.fetch(self.cache.match(digests), "request")
        eventually(lambda: fetch.done)
        self.check(fetch, digests[: len(fetch.slots)])
        self.cache.release(fetch)
        return fetch.source_runs()

    def check(self, fetch: Fetch, digests: Sequence[Digest]) -> None:
        """`fetch` holds exactly `digests`, and their bytes are theirs."""
        assert len(fetch.slots) == len(digests)
        for digest, slot in zip(digests, fetch.slots, strict=True):
            assert self.payload(slot) == self.content(digest), f"slot {slot} is another chunk's"

    def settle(self) -> None:
        """Wait until nothing is under way between memory and slow tiers."""
        assert self.cache.hierarchy.flush(PATIENCE_S)
        eventually(lambda: "write" not in self.cache.pool.owners())
