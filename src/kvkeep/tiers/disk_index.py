"""What the disk tier knows of its files: an index, an order of eviction, and the room they take.

All of it in RAM, under one lock that is held for dict work only and never over I/O. Room is taken
before a file is written and given out again only after a file is removed, so that the files never
take more than the cap however many threads store at once. The steps of a store:

    claim -> Leaving     room is taken; the victims are out of the index, their files still there
    settle               the victims' files are removed: what is left of their room is free
    publish | abandon    the new file is there | it is not, and its room is free
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvkeep.policies.base import Policy
from kvkeep.tiers.disk_layout import Found
from kvkeep.types import ChunkKey

BLOCK_BYTES = 4096
"""A file takes room in whole blocks."""


def room_of(nbytes: int) -> int:
    """Bytes that a file of `nbytes` takes on the disk."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(slots=True, eq=False)
class Entry:
    """One kept file. Compared by identity: a file stored anew has a new entry."""

    nbytes: int
    root: int
    """Which of the tier's directories it lies in."""
    stamped_s: float
    """Unix time of the file's last change, as far as this process knows."""


@dataclass(frozen=True, slots=True)
class DiskStats:
    """What the tier holds now, and what it did since `open`."""

    used_bytes: int
    """Room taken on the disk, in whole 4096-byte blocks, with what is being written now."""
    size_bytes: int
    """The cap."""
    chunks: int
    evicted: int
    refused: int
    """Values that were not stored for lack of room under the cap."""
    failed_reads: int
    """Loads that the disk could not do; each was a miss."""
    foreign_files: int
    """Names in the directories that are none of ours, at the last look; left alone."""
    direct: bool
    """True where all directories take O_DIRECT."""


class Leaving(NamedTuple):
    """Files that are out of the index and that the caller has yet to remove from the disk."""

    files: list[tuple[ChunkKey, Entry]]
    hold_bytes: int = 0
    """Room that becomes free once they are removed."""


class NoClaim(enum.Enum):
    """Why a file need not or cannot be written."""

    KEPT = "kept"
    """It is there already, with the same length."""
    BUSY = "busy"
    """Another thread is writing or removing it just now."""
    REFUSED = "refused"
    """There is no room, and none can be made."""


class DiskIndex:
    """Thread-safe. `used_bytes` counts files kept, files being written and files being removed."""

    def __init__(self, size_bytes: int, policy: Policy[ChunkKey]) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self.evicted = 0
        self.refused = 0
        self._policy = policy
        self._entries: dict[ChunkKey, Entry] = {}
        # Keys whose file a thread is writing or removing just now, with the room that each was
        # claimed for. Never in `_entries`.
        self._claimed: dict[ChunkKey, int] = {}
        self._leaving: set[ChunkKey] = set()
        self._held_bytes = 0
        # Keys that changed while a survey runs, of which it may have an old view. None: none runs.
        self._changed: set[ChunkKey] | None = None
        self._lock = threading.Lock()

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which are kept. Takes no lock: a look-up in a dict is atomic."""
        entries = self._entries
        return [key in entries for key in keys]

    def keys(self) -> list[ChunkKey]:
        """A copy of all keys, in no promised order."""
        with self._lock:
            return list(self._entries)

    def stats(self, failed_reads: int, foreign_files: int, *, direct: bool) -> DiskStats:
        """A snapshot of the counts, with those that the index does not know."""
        with self._lock:
            return DiskStats(
                used_bytes=self.used_bytes,
                size_bytes=self.size_bytes,
                chunks=len(self._entries),
                evicted=self.evicted,
                refused=self.refused,
                failed_reads=failed_reads,
                foreign_files=foreign_files,
                direct=direct,
            )

    def use(self, keys: Sequence[ChunkKey]) -> list[Entry | None]:
        """The entries of `keys`; those that are kept count as used, the last key first."""
        with self._lock:
            entries = [self._entries.get(key) for key in keys]
            for key, entry in zip(reversed(keys), reversed(entries), strict=True):
                if entry is not None:
                    self._policy.touch(key)
        return entries

    def claim(self, key: ChunkKey, nbytes: int) -> Leaving | NoClaim:
        """Take room for a file of `nbytes` under `key`, by eviction if need be.

        After a `Leaving` the caller removes its files, settles it, and publishes or abandons.
        """
        room = room_of(nbytes)
        with self._lock:
            if key in self._claimed or key in self._leaving:
                return NoClaim.BUSY
            old = self._entries.get(key)
            if old is not None and old.nbytes == nbytes:
                self._policy.touch(key)
                return NoClaim.KEPT
            # One of another length goes first, as a victim like any other.
            files = [] if old is None else [(key, old)]
            need_bytes = self.used_bytes + room - self.size_bytes
            if old is not None:
                need_bytes -= room_of(old.nbytes)
            fits = nbytes > 0 and room <= self.size_bytes
            victims = self._victims(need_bytes, keep=(key,)) if fits else None
            if victims is None:
                self.refused += 1
                return NoClaim.REFUSED
            self.evicted += len(victims)
            self._claimed[key] = room
            self.used_bytes += room
            self._note(key)
            return self._take_out(files + victims, room)

    def publish(self, key: ChunkKey, entry: Entry) -> None:
        """The file that `key` was claimed for is there."""
        with self._lock:
            self.used_bytes -= self._claimed.pop(key)
            self._put(key, entry)

    def abandon(self, key: ChunkKey) -> None:
        """The file that `key` was claimed for is not there."""
        with self._lock:
            self.used_bytes -= self._claimed.pop(key)

    def withdraw(self, keys: Iterable[ChunkKey]) -> Leaving:
        """Take out those of `keys` that are kept."""
        with self._lock:
            kept = dict.fromkeys(key for key in keys if key in self._entries)
            return self._take_out([(key, self._entries[key]) for key in kept])

    def withdraw_entry(self, key: ChunkKey, entry: Entry) -> Leaving:
        """Take out `key` if `entry` is still what is kept under it."""
        with self._lock:
            same = self._entries.get(key) is entry
            return self._take_out([(key, entry)] if same else [])

    def shrink(self) -> Leaving:
        """Take out what is over the cap."""
        with self._lock:
            victims = self._victims(self.used_bytes - self.size_bytes) or []
            self.evicted += len(victims)
            return self._take_out(victims)

    def evict(self, need_bytes: int, root: int) -> Leaving:
        """Take out at least `need_bytes` that lie in directory `root`, or all of it."""
        with self._lock:
            victims: list[tuple[ChunkKey, Entry]] = []
            for key in self._policy.victims():
                if need_bytes <= 0:
                    break
                entry = self._entries[key]
                if entry.root == root:
                    victims.append((key, entry))
                    need_bytes -= room_of(entry.nbytes)
            self.evicted += len(victims)
            return self._take_out(victims)

    def settle(self, leaving: Leaving, still_there: Iterable[tuple[ChunkKey, Entry]] = ()) -> None:
        """The files of `leaving` are removed, except those that could not be."""
        with self._lock:
            self.used_bytes -= leaving.hold_bytes
            self._held_bytes -= leaving.hold_bytes
            self._leaving.difference_update(key for key, _ in leaving.files)
            for key, entry in still_there:
                self._put(key, entry)

    def begin_survey(self) -> None:
        """The caller is about to look at the directories; one at a time."""
        with self._lock:
            self._changed = self._leaving.union(self._claimed)

    def end_survey(self, found: Sequence[Found], seen: Iterable[ChunkKey] | None) -> None:
        """Take in what others stored (`found`, oldest first), and forget what they removed: all
        that is neither in `found` nor in `seen`; nothing where `seen` is None. Of what changed
        meanwhile this process knows better.
        """
        there = None if seen is None else {file.key for file in found}.union(seen)
        with self._lock:
            changed, self._changed = self._changed or set(), None
            for key in () if there is None else self._entries.keys() - there - changed:
                entry = self._entries.pop(key)
                self._policy.remove(key)
                self.used_bytes -= room_of(entry.nbytes)
            for file in found:
                if file.key not in changed and file.key not in self._entries:
                    self._put(file.key, Entry(file.nbytes, file.root, file.mtime_ns / 1e9))

    def check_integrity(self) -> None:
        """Raise `AssertionError` where the index, the policy and the count of bytes disagree."""
        with self._lock:
            kept = sum(room_of(entry.nbytes) for entry in self._entries.values())
            claimed = sum(self._claimed.values())
            problems = {
                "in the index, not in the policy": [
                    key for key in self._entries if key not in self._policy
                ],
                "more in the policy than in the index": len(self._policy) - len(self._entries),
                "both kept and being written or removed": self._entries.keys()
                & (self._claimed.keys() | self._leaving),
                "bytes counted in excess": self.used_bytes - kept - claimed - self._held_bytes,
                "bytes held for nothing": 0 if self._leaving else self._held_bytes,
            }
        wrong = [f"{what}: {value}" for what, value in problems.items() if value]
        if wrong:
            raise AssertionError("; ".join(wrong))

    def _victims(
        self, need_bytes: int, keep: Sequence[ChunkKey] = ()
    ) -> list[tuple[ChunkKey, Entry]] | None:
        """Enough to free `need_bytes`, in the policy's order; None where all is not enough."""
        victims: list[tuple[ChunkKey, Entry]] = []
        if need_bytes <= 0:
            return victims
        for key in self._policy.victims(keep):
            entry = self._entries[key]
            victims.append((key, entry))
            need_bytes -= room_of(entry.nbytes)
            if need_bytes <= 0:
                return victims
        return None

    def _take_out(self, files: list[tuple[ChunkKey, Entry]], room: int = 0) -> Leaving:
        """Out of the index. Of their room, `room` is the claimer's, who removes them before it
        writes; the rest is held, and nobody's, until they are removed.
        """
        freed = 0
        for key, entry in files:
            del self._entries[key]
            self._policy.remove(key)
            self._leaving.add(key)
            self._note(key)
            freed += room_of(entry.nbytes)
        hold = max(0, freed - room)
        self.used_bytes += hold - freed
        self._held_bytes += hold
        return Leaving(files, hold)

    def _put(self, key: ChunkKey, entry: Entry) -> None:
        self._entries[key] = entry
        self._policy.insert(key)
        self.used_bytes += room_of(entry.nbytes)
        self._note(key)

    def _note(self, key: ChunkKey) -> None:
        if self._changed is not None:
            self._changed.add(key)
