"""Stores under way: chunks that have slots and are being copied into them by the workers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple

from kvkeep.cache import KVCache, Reservation
from kvkeep.connectors.vllm.messages import Outcome, StoreOp
from kvkeep.connectors.vllm.report import RequestReport
from kvkeep.connectors.vllm.tracked import Tracked
from kvkeep.device.copier import CopyRun
from kvkeep.device.groups import GroupPart
from kvkeep.types import Digest

logger = logging.getLogger(__name__)


class _UnderWay(NamedTuple):
    reservation: Reservation
    report: RequestReport
    outcome: Outcome
    """Of the ranks that have reported so far."""


class Stores:
    """Not thread-safe: belongs to the scheduler side."""

    def __init__(self, cache: KVCache, groups: Sequence[GroupPart], num_ranks: int) -> None:
        self._cache = cache
        self._groups = tuple(groups)
        self._num_ranks = num_ranks
        self._under_way: dict[int, _UnderWay] = {}
        self._numbers = itertools.count()
        self._outdated: set[int] = set()

    def __len__(self) -> int:
        """How many operations are under way."""
        return len(self._under_way)

    def plan(self, tracked: Tracked, digests: Sequence[Digest], ready: int) -> StoreOp | None:
        """Store the request's chunks up to `ready` that were not stored before.

        None where all are kept or no slot is free.
        """
        first, tracked.num_stored = tracked.num_stored, ready
        whole = self._first_whole(tracked)
        if whole > first:
            # The engine has the chunks before from its own cache, and only what it needs of them.
            tracked.has_gap |= len(self._cache.match(digests[:whole]).digests) < whole
            first = whole
        if tracked.has_gap or first >= ready:
            return None
        request = tracked.request
        # What comes before is kept rather than what comes now: it is worth nothing without.
        reservation = self._cache.reserve(
            digests[first:ready], request.request_id, keep=digests[:first]
        )
        if reservation is None:
            return None
        if any(
            len(ids) < ready * part.blocks
            for ids, part in zip(tracked.block_ids, self._groups, strict=True)
        ):
            # We lost track of the request's blocks; storing the wrong ones is the one thing
            # that must not happen.
            self._cache.abandon(reservation)
            logger.warning("request %s: block list too short", request.request_id)
            return None
        number = next(self._numbers)
        tracked.report.storing(len(reservation.digests), request.num_tokens)
        self._under_way[number] = _UnderWay(reservation, tracked.report, Outcome())
        return StoreOp(number, self._runs(reservation, tracked.block_ids, first))

    def _first_whole(self, tracked: Tracked) -> int:
        """The first chunk of which the engine still has all that is to be kept."""
        computed = tracked.request.num_computed_tokens
        return max(
            part.first_whole(part.taken_away(ids, computed)) if part.window is not None else 0
            for ids, part in zip(tracked.block_ids, self._groups, strict=True)
        )

    def _runs(
        self, reservation: Reservation, block_ids: Sequence[Sequence[int]], first_chunk: int
    ) -> tuple[CopyRun, ...]:
        """The reserved chunks, those that follow one another as one run, group by group."""
        positions, slots = reservation.positions, reservation.lease.slots
        runs: list[CopyRun] = []
        at = 0
        while at < len(positions):
            end = at + 1
            while end < len(positions) and positions[end] == positions[at] + end - at:
                end += 1
            start = first_chunk + positions[at]
            for group, part in enumerate(self._groups):
                ids = part.of_chunks(block_ids[group], start, start + end - at)
                runs.append(CopyRun(slots[at:end], 0, ids, group))
            at = end
        return tuple(runs)

    def ended(self, number: int, outcome: Outcome) -> None:
        """Some ranks have ended a store; with the last of them its chunks are kept, or not."""
        entry = self._under_way.pop(number, None)
        if entry is None:
            return
        reservation, report, before = entry
        total = before.plus(outcome)
        if total.ended < self._num_ranks:
            self._under_way[number] = _UnderWay(reservation, report, total)
            return
        if total.failed or number in self._outdated:
            self._cache.abandon(reservation)
        else:
            self._cache.publish(reservation)
            counters = self._cache.counters.memory
            counters.add("stored_bytes", len(reservation.digests) * self._cache.shape.total_nbytes)
            counters.add("store_seconds", total.seconds)
        self._outdated.discard(number)
        report.stored(len(reservation.digests), total)

    def outdate(self) -> None:
        """What is under way is worth nothing any more: free it when it ends."""
        self._outdated.update(self._under_way)

    def close(self) -> None:
        """Free all that is under way; no worker may be copying any more."""
        for entry in self._under_way.values():
            self._cache.abandon(entry.reservation)
        self._under_way.clear()
