"""The slow tiers in their order: which holds a chunk, bring it into slots, write it through.

Bytes go straight between a tier and the pool's slots; a frame is sealed before it leaves memory
and opened (checked) when it comes back. Whatever does not fit is a miss, is counted and deleted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvkeep.codecs.frame import frame_nbytes, open_frame, seal
from kvkeep.errors import FrameError, TierError
from kvkeep.keys import Namespace
from kvkeep.memory.pool import SlotPool
from kvkeep.metrics import TierCounters, TierUsage
from kvkeep.tiers.base import BoundedTier, Tier
from kvkeep.transfer import Breaker, TransferQueue
from kvkeep.types import ChunkKey, Digest

logger = logging.getLogger(__name__)

_BATCH_BYTES = 16 << 20
"""A job's size: small enough to spread a hit over all threads of a tier, large enough that
queueing (tens of microseconds) is nothing beside reading (milliseconds)."""


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """What one chunk is, in bytes, for each rank of the engine."""

    num_tokens: int
    payload_nbytes: tuple[int, ...]
    """One entry a rank."""

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """A rank's slot: its whole frame."""
        return tuple(frame_nbytes(nbytes) for nbytes in self.payload_nbytes)

    @property
    def total_nbytes(self) -> int:
        """KV bytes of one chunk over all ranks."""
        return sum(self.payload_nbytes)


@dataclass(slots=True)
class TierLink:
    """A slow tier with its threads, its breaker and its counters."""

    tier: Tier
    queue: TransferQueue
    breaker: Breaker
    counters: TierCounters = field(default_factory=TierCounters)

    @classmethod
    def to(cls, tier: Tier, *, num_threads: int, max_store_bytes: int) -> TierLink:
        """Link `tier` with defaults for everything else."""
        breaker = Breaker(tier.name)
        queue = TransferQueue(
            tier.name, breaker, num_threads=num_threads, max_store_bytes=max_store_bytes
        )
        return cls(tier, queue, breaker)

    @property
    def name(self) -> str:
        return self.tier.name

    def usage(self) -> TierUsage:
        """How full the tier is; 0 of 0 bytes for one that another process bounds."""
        used, cap = self.tier.occupancy() if isinstance(self.tier, BoundedTier) else (0, 0)
        return TierUsage(used, cap, self.breaker.is_open)


class Hierarchy:
    """Ordered slow tiers under one pool. Thread-safe; nothing here waits for a tier."""

    def __init__(
        self, links: Sequence[TierLink], pool: SlotPool, namespace: Namespace, shape: ChunkShape
    ) -> None:
        self.links = tuple(links)
        self._pool = pool
        self._namespace = namespace
        self._shape = shape

    def open(self) -> None:
        """Start every tier. One that can't start is left out with one warning."""
        working: list[TierLink] = []
        for link in self.links:
            try:
                link.tier.open()
            except TierError as error:
                logger.warning("%s tier is left out: %s", link.name, error)
                continue
            link.queue.open()
            working.append(link)
        self.links = tuple(working)

    def keys(self, digest: Digest) -> list[ChunkKey]:
        """The names one chunk is kept under: one a rank."""
        name = self._namespace.name
        return [ChunkKey(name, rank, digest) for rank in range(self._pool.num_ranks)]

    def find(self, digest: Digest) -> TierLink | None:
        """The first tier that holds all ranks' parts, by what can be known without waiting."""
        for link in self.links:
            if not link.tier.answers_at_once or not link.breaker.is_ready:
                continue
            try:
                if all(link.tier.contains(self.keys(digest))):
                    return link
            except Exception as error:  # noqa: BLE001
                # Not only `TierError`: what breaks the tier's contract must not reach the engine.
                link.breaker.failed(error)
        return None

    def load(
        self, link: TierLink, digests: Sequence[Digest], slots: Sequence[int]
    ) -> list[tuple[Future[list[bool]], int]]:
        """Bring chunks from `link` into slots the caller holds until the futures are done.

        One (future, chunks) a batch, in order; the future's list tells for each chunk whether it
        is whole and right. A future that fails stands for a batch of misses.
        """
        per_batch = self._per_batch(link, len(digests))
        batches: list[tuple[Future[list[bool]], int]] = []
        for at in range(0, len(digests), per_batch):
            batch = digests[at : at + per_batch]
            into = slots[at : at + per_batch]
            job = link.queue.load(lambda b=batch, s=into: self._load(link, b, s))
            batches.append((job, len(batch)))
        return batches

    def _per_batch(self, link: TierLink, count: int) -> int:
        by_bytes = max(1, _BATCH_BYTES // max(1, self._shape.total_nbytes))
        by_threads = -(-count // link.queue.num_threads)
        return max(1, min(by_bytes, by_threads))

    def _load(self, link: TierLink, digests: Sequence[Digest], slots: Sequence[int]) -> list[bool]:
        keys: list[ChunkKey] = []
        frames: list[memoryview] = []
        for digest, slot in zip(digests, slots, strict=True):
            keys += self.keys(digest)
            frames += [self._pool.view(slot, rank) for rank in range(self._pool.num_ranks)]
        with link.counters.timing("load") as event:
            lengths = link.tier.load(keys, frames)
            whole = [
                self._opens(link, key, frame, length)
                for key, frame, length in zip(keys, frames, lengths, strict=True)
            ]
            ranks = self._pool.num_ranks
            results = [all(whole[at : at + ranks]) for at in range(0, len(whole), ranks)]
            event.nbytes = sum(results) * self._shape.total_nbytes
        return results

    def _opens(self, link: TierLink, key: ChunkKey, frame: memoryview, length: int | None) -> bool:
        if length is None:
            return False
        try:
            open_frame(
                frame[:length],
                namespace_digest=self._namespace.digest,
                digest=key.digest,
                rank=key.rank,
                raw_nbytes=self._shape.payload_nbytes[key.rank],
            )
        except FrameError as error:
            link.counters.add("corrupt")
            logger.warning("%s tier: %s is no good (%s): deleted", link.name, key.name, error)
            # Left where it can't be deleted: it is found bad again.
            with contextlib.suppress(TierError):
                link.tier.delete([key])
            return False
        return True

    def store(self, digest: Digest, slot: int) -> Future[None]:
        """Write a chunk through to every tier; drop it where a queue is full.

        The caller holds the slot until the future is done; it never fails. Frames are sealed by
        the jobs: the payload is not written any more by then, and all seal alike.
        """
        done: Future[None] = Future()
        if not self.links:
            done.set_result(None)
            return done
        countdown = _Countdown(len(self.links), done)
        for link in self.links:
            job = link.queue.store(
                lambda to=link: self._store(to, digest, slot), sum(self._pool.slot_bytes)
            )
            if job is None:
                link.counters.add("dropped")
                countdown.arrive()
            else:
                job.add_done_callback(lambda _job: countdown.arrive())
        return done

    def _store(self, link: TierLink, digest: Digest, slot: int) -> None:
        keys = self.keys(digest)
        if link.tier.answers_at_once and all(link.tier.contains(keys)):
            return
        with link.counters.timing("store") as event:
            frames = [
                seal(
                    self._pool.view(slot, key.rank),
                    namespace_digest=self._namespace.digest,
                    digest=digest,
                    rank=key.rank,
                    num_tokens=self._shape.num_tokens,
                    raw_nbytes=self._shape.payload_nbytes[key.rank],
                    payload_nbytes=self._shape.payload_nbytes[key.rank],
                ).toreadonly()
                for key in keys
            ]
            link.tier.store(keys, frames)
            event.nbytes = self._shape.total_nbytes

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued stores have run; False if that takes longer."""
        flushed = [link.queue.flush(timeout_s) for link in self.links]
        return all(flushed)

    def close(self) -> None:
        """Store what is queued while there is time, then end threads and tiers."""
        for link in self.links:
            link.queue.close()
            link.tier.close()


class _Countdown:
    """Sets `done` once `count` calls of `arrive` were made. Thread-safe."""

    def __init__(self, count: int, done: Future[None]) -> None:
        self._left = count
        self._done = done
        self._lock = threading.Lock()

    def arrive(self) -> None:
        with self._lock:
            self._left -= 1
            left = self._left
        if left == 0:
            self._done.set_result(None)
