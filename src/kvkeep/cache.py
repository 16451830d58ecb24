"""KVCache: match, fetch, put. The data path, to be read from top to bottom.

One index, one writer: an engine's scheduler side owns a `KVCache` and is told slot numbers; the
engine's workers move bytes between those slots and the GPU and know no keys.

    match(digests)            which leading chunks are kept, and where; changes nothing
    fetch(match, owner)       bring them into slots and hold them for `owner`
    reserve(digests, owner)   slots for chunks that are new        } put, in the two halves
    publish(reservation)      their bytes are in the slots: keep   } between which a worker copies

Nothing here waits for a tier. A chunk that two requests want is loaded once, and a chunk that
two requests compute is kept once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from kvkeep.errors import TierTimeout
from kvkeep.hierarchy import ChunkShape, Hierarchy, TierLink
from kvkeep.memory.index import ChunkIndex
from kvkeep.memory.pool import Lease, SlotPool
from kvkeep.metrics import CacheCounters, TierCounters, TierUsage
from kvkeep.policies.base import Policy
from kvkeep.types import Digest

_NOTHING: frozenset[Digest] = frozenset()


class Match(NamedTuple):
    """The longest run of leading chunks that is kept somewhere."""

    digests: tuple[Digest, ...]
    in_memory: int
    """How many of them lie in memory before the first that does not."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Slots for chunks that are being computed; ends by `publish` or `abandon`."""

    positions: tuple[int, ...]
    """Which of the digests that were offered got a slot, in order."""
    digests: tuple[Digest, ...]
    lease: Lease


@dataclass(slots=True, eq=False)
class _Loading:
    """One chunk on its way from a slow tier; `lease` becomes the index's own."""

    digest: Digest
    source: str
    lease: Lease
    waiting: list[Fetch] = field(default_factory=list["Fetch"])
    arrived: bool = False


class _Piece(NamedTuple):
    digest: Digest
    slot: int
    source: str
    loading: _Loading | None


@dataclass(slots=True, eq=False)
class Fetch:
    """A run of chunks held for one owner, some of them perhaps still on their way.

    Only the cache writes to it.
    """

    owner: str
    pieces: list[_Piece]
    lease: Lease
    pending: int = 0
    """How many chunks are still on their way."""
    done: bool = False
    """True once no more will come; then `slots` and `sources` stand."""
    started_at: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    """How long the slow tiers took; 0.0 for a run that lay in memory."""

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots of the leading chunks that are there. Valid until released."""
        return self.lease.slots if self.done else ()

    def source_runs(self) -> list[tuple[str, int]]:
        """(tier name, chunks) for each run of chunks in `slots` that one tier gave, in order."""
        sources = (piece.source for piece in self.pieces[: len(self.slots)])
        return [(source, len(list(run))) for source, run in groupby(sources)]

    def age_s(self) -> float:
        """Seconds since it was asked for."""
        return time.monotonic() - self.started_at


class KVCache:
    """See the module. Thread-safe; made for one scheduler that asks and many transfers that end."""

    def __init__(
        self,
        pool: SlotPool,
        policy: Policy[Digest],
        hierarchy: Hierarchy,
        shape: ChunkShape,
        *,
        keeps_memory: bool = True,
    ) -> None:
        """`keeps_memory` False: the pool is a staging buffer; chunks leave it once written."""
        self.pool = pool
        self.hierarchy = hierarchy
        self.shape = shape
        self.counters = CacheCounters()
        self.generation = 0
        """Grows whenever something new is kept: an unsuccessful `match` need not be repeated
        before."""
        self._keeps_memory = keeps_memory
        self._index: ChunkIndex[Digest] = ChunkIndex(pool, policy)
        self._loading: dict[Digest, _Loading] = {}
        self._storing: set[Digest] = set()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def open(self) -> None:
        """Start the slow tiers."""
        self.hierarchy.open()

    # -- match ---------------------------------------------------------------------------------

    def match(self, digests: Sequence[Digest]) -> Match:
        """The longest prefix of `digests` that memory and slow tiers hold together."""
        with self._lock:
            in_memory = found = self._index.prefix(digests)
            if self.hierarchy.links or self._loading:
                while found < len(digests) and self._is_kept(digests[found]):
                    found += 1
        return Match(tuple(digests[:found]), in_memory)

    def _is_kept(self, digest: Digest) -> bool:
        return (
            digest in self._index
            or digest in self._loading
            or self.hierarchy.find(digest) is not None
        )

    # -- fetch ---------------------------------------------------------------------------------

    def fetch(self, match: Match, owner: str) -> Fetch:
        """Hold the matched chunks for `owner`, bringing those that are not in memory.

        Done at once if all are in memory. May end shorter than the match: where a tier failed,
        a frame was bad or no slot was to be had. The caller ends it by
        `release`.
        """
        with self._lock:
            pieces, jobs = self._plan(match.digests)
            lease = self.pool.share([piece.slot for piece in pieces], owner)
            fetch = Fetch(owner, pieces, lease)
            for piece in pieces:
                if piece.loading is not None:
                    piece.loading.waiting.append(fetch)
                    fetch.pending += 1
            if fetch.pending == 0:
                fetch.done = True
        for link, loadings in jobs:
            self._start(link, loadings)
        return fetch

    def _plan(
        self, digests: Sequence[Digest]
    ) -> tuple[list[_Piece], list[tuple[TierLink, list[_Loading]]]]:
        """Where each chunk comes from, up to the first that can't; and what must be loaded."""
        memory = self._index.prefix(digests)
        self._index.touch(digests[:memory])
        here = digests[:memory]
        pieces = [
            _Piece(digest, slot, "memory", None)
            for digest, slot in zip(here, self._index.slots(here), strict=True)
        ]
        jobs: list[tuple[TierLink, list[_Loading]]] = []
        keep = frozenset(digests) if memory < len(digests) else _NOTHING
        for digest in digests[memory:]:
            if digest in self._index:
                self._index.touch([digest])
                pieces.append(_Piece(digest, self._index.slots([digest])[0], "memory", None))
                continue
            loading = self._loading.get(digest)
            if loading is None:
                link = self.hierarchy.find(digest)
                lease = self._index.reserve(1, "memory", keep) if link is not None else None
                if link is None or lease is None:
                    break
                loading = self._loading[digest] = _Loading(digest, link.name, lease)
                if not jobs or jobs[-1][0] is not link:
                    jobs.append((link, []))
                jobs[-1][1].append(loading)
            pieces.append(_Piece(digest, loading.lease.slots[0], loading.source, loading))
        return pieces, jobs

    def _start(self, link: TierLink, loadings: list[_Loading]) -> None:
        digests = [loading.digest for loading in loadings]
        slots = [loading.lease.slots[0] for loading in loadings]
        at = 0
        for batch, size in self.hierarchy.load(link, digests, slots):
            part = loadings[at : at + size]
            at += size
            batch.add_done_callback(lambda done, part=part: self._arrived(part, done))

    def _arrived(self, loadings: list[_Loading], batch: Future[list[bool]]) -> None:
        results = batch.result() if batch.exception() is None else [False] * len(loadings)
        with self._changed:
            # The end of a prefix first, so that its beginning becomes the more recent.
            for loading, arrived in reversed(list(zip(loadings, results, strict=True))):
                del self._loading[loading.digest]
                loading.arrived = arrived
                if arrived and self._keeps_memory:
                    self._index.insert([loading.digest], loading.lease)
                else:
                    loading.lease.release()
                for fetch in loading.waiting:
                    fetch.pending -= 1
                    if fetch.pending == 0:
                        self._settle(fetch)
            self.generation += 1
            self._changed.notify_all()

    def _settle(self, fetch: Fetch) -> None:
        """Cut the run at the first chunk that did not come; hold no more than the rest."""
        if fetch.done:
            return
        pieces = fetch.pieces
        there = 0
        for piece in pieces:
            if piece.loading is not None and not piece.loading.arrived:
                break
            there += 1
        held = fetch.lease
        if held.held and there < len(pieces):
            fetch.lease = self.pool.share(held.slots[:there], fetch.owner)
            held.release()
        # Batches end in any order; in the order of eviction the prefix must come out right.
        self._index.touch([piece.digest for piece in pieces if piece.digest in self._index])
        fetch.seconds = time.monotonic() - fetch.started_at
        fetch.done = True

    def give_up(self, fetch: Fetch) -> None:
        """Go on with what is there; what comes later is kept for the next who asks.

        A tier that made it necessary has failed, as far as its breaker is concerned.
        """
        with self._lock:
            late = {
                piece.source
                for piece in fetch.pieces
                if piece.loading is not None and piece.loading.digest in self._loading
            }
            self._settle(fetch)
        for link in self.hierarchy.links:
            if link.name in late:
                link.breaker.failed(TierTimeout(f"{link.name} tier took too long"))

    def release(self, fetch: Fetch) -> None:
        """Hold nothing for `fetch` any more. Safe at any time, safe to call twice."""
        with self._lock:
            if fetch.lease.held:
                fetch.lease.release()

    # -- put -----------------------------------------------------------------------------------

    def reserve(
        self, digests: Sequence[Digest], owner: str, keep: Collection[Digest] = ()
    ) -> Reservation | None:
        """Slots for those of `digests` that memory does not hold and nobody is bringing.

        Nothing of `digests` or `keep` is evicted for them: `keep` is what comes before.

        Where there is not room for all, the first ones get it and the others are dropped, since a
        chunk is worth nothing without those before it. None if nothing is left to store.
        """
        with self._lock:
            index, storing, loading = self._index, self._storing, self._loading
            new = [
                position
                for position, digest in enumerate(digests)
                if digest not in index and digest not in storing and digest not in loading
            ]
            if not new:
                return None
            lease = index.reserve(len(new), owner, keep=frozenset(keep) | set(digests))
            granted = len(lease.slots) if lease is not None else 0
            self.counters.dropped_chunks += len(new) - granted
            if lease is None:
                return None
            taken = tuple(digests[position] for position in new[:granted])
            storing.update(taken)
            return Reservation(tuple(new[:granted]), taken, lease)

    def publish(self, reservation: Reservation) -> None:
        """The chunks' bytes are in their slots: keep them, and write them through."""
        with self._lock:
            self._storing.difference_update(reservation.digests)
            new = self._index.insert(reservation.digests, reservation.lease)
            self.counters.stored_chunks += len(new)
            self.generation += 1
            writes: list[tuple[Digest, Lease]] = []
            if self.hierarchy.links:
                slots = self._index.slots(new)
                writes = [
                    (digest, self.pool.share([slot], "write"))
                    for digest, slot in zip(new, slots, strict=True)
                ]
        for digest, hold in writes:
            written = self.hierarchy.store(digest, hold.slots[0])
            written.add_done_callback(lambda _, d=digest, h=hold: self._written(d, h))

    def _written(self, digest: Digest, hold: Lease) -> None:
        with self._changed:
            hold.release()
            if not self._keeps_memory:
                self._index.remove([digest])
            self._changed.notify_all()

    def abandon(self, reservation: Reservation) -> None:
        """The bytes will not come: free the slots."""
        with self._lock:
            self._storing.difference_update(reservation.digests)
            reservation.lease.release()

    # -- around --------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Sleep until some transfer ends, `timeout_s` at most; at once if none is under way."""
        with self._changed:
            if self._loading:
                self._changed.wait(timeout_s)

    def clear_memory(self) -> int:
        """Forget what memory holds; slow tiers keep theirs. How many chunks that were."""
        with self._lock:
            return self._index.clear()

    def tier_counters(self) -> dict[str, TierCounters]:
        """Tier name -> its counters; "memory" first."""
        links = {link.name: link.counters for link in self.hierarchy.links}
        return {"memory": self.counters.memory, **links}

    def usage(self) -> dict[str, TierUsage]:
        """Tier name -> how full it is, and whether it is cut off."""
        used = self.num_chunks * sum(self.pool.slot_bytes)
        memory = TierUsage(used, self.pool.memory.nbytes, is_cut_off=False)
        links = {link.name: link.usage() for link in self.hierarchy.links}
        return {"memory": memory, **links}

    @property
    def num_chunks(self) -> int:
        """How many chunks memory holds."""
        return len(self._index)

    @property
    def evictions(self) -> int:
        """How many chunks were evicted from memory so far."""
        return self._index.evictions

    def check_integrity(self) -> None:
        """Index, policy, pool and leases agree. Raises `PoolError`."""
        with self._lock:
            self._index.check_integrity()
            self.pool.check_integrity()

    def close(self) -> None:
        """Write what is queued while there is time, end the tiers, free the pool."""
        self.hierarchy.close()
        self.clear_memory()
        self.pool.close()
