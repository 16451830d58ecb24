"""The disk tier: one file a chunk, direct I/O into the caller's buffer, an index in RAM.

What it keeps survives the process: `open` reads the names back. The cap counts what was there
before. Two halves are joined here: `disk_index` counts room and evicts, `disk_directories` has the
I/O.

Several processes may share a directory. Each has its own index; a file that another removed is a
miss, one that another wrote is taken in when the directories are looked through again, about every
`RESCAN_S` while there is another and something is stored. Between two looks each counts only what
it knows, so the files may exceed the cap by what the others stored since; after a look each evicts
on its own, at worst each the whole excess. Alone, the cap is never exceeded.

The order of eviction survives through the files' times: a store sets it, and so does a load, at
most once in `RESTAMP_S` for each chunk.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvkeep.errors import TierError, TierUnavailable
from kvkeep.policies import make_policy
from kvkeep.tiers import disk_files
from kvkeep.tiers.base import Occupancy
from kvkeep.tiers.disk_directories import Directories, ODirect
from kvkeep.tiers.disk_index import DiskIndex, DiskStats, Entry, Leaving, NoClaim
from kvkeep.types import ChunkKey

_log = logging.getLogger(__name__)

RESCAN_S = 10.0
RESCAN_SHARE = 0.02
"""At most this share of the time goes into looking through shared directories, however full."""
RESTAMP_S = 600.0
"""A load's new time costs a system call and a dirty inode; order within ten minutes is enough."""
ROOM_ON_FULL_DISK = 0.01
"""When the disk is full before the cap is, this share goes at once: not every store shall fail."""

_TYPICAL_CHUNK_BYTES = 1 << 20  # only to tell a policy about how many keys to expect


class DiskTier:
    """`Tier`: keeps values in files, `size_bytes` in all, spread over `paths` by digest.

    Any length and alignment works; lengths and addresses in multiples of 4096 go direct.
    A value that no eviction can make room for, and an empty one (what a power cut leaves behind
    looks the same), is not stored: no error, the others of its batch are, `refused` counts it.
    While one thread stores a key, others that store it return at once and leave it to that one.

    A batch is taken from its end. Callers pass a prefix's chunks first to last, so that what is
    stored or used last, and therefore evicted last, is what the others are worthless without.
    """

    name = "disk"
    answers_at_once = True

    def __init__(
        self,
        paths: Sequence[str | Path],
        size_bytes: int,
        policy_name: str = "lru",
        odirect: ODirect = "auto",
    ) -> None:
        self._paths = [str(path) for path in paths]
        self._size_bytes = size_bytes
        self._policy_name = policy_name
        self._odirect: ODirect = odirect
        self._index = self._new_index()
        self._directories: Directories | None = None
        self._look_lock = threading.Lock()
        self._next_look_s = 0.0
        self._failed_reads = 0
        self._foreign_files = 0
        self._warned: set[str] = set()

    def open(self) -> None:
        """Create the directories, sweep what others left half written, rebuild the index.

        Evicts down to the cap where that is lower than what is there. Raises `TierError`.
        """
        if not self._paths:
            raise TierUnavailable("the disk tier has no directory")
        self._index = self._new_index()
        where = ", ".join(self._paths)
        with disk_files.mapped("cannot open", where), contextlib.ExitStack() as undo:
            directories = Directories(self._paths, self._odirect)
            undo.callback(directories.close)
            directories.open()
            self._survey(directories)
            self._remove(directories, self._index.shrink())
            undo.pop_all()
        self._next_look_s = time.monotonic() + RESCAN_S
        self._directories = directories

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of `keys` are kept, as far as this process knows. No I/O, no lock."""
        if self._directories is None:
            return [False] * len(keys)
        return self._index.contains(keys)

    def load(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | None]:
        """As `Tier.load`. A file that cannot be read is a miss and does not fail the others;
        `TierError` where there was such a one and the batch had no hit.
        """
        directories = self._opened()
        counts: list[int | None] = [None] * len(keys)
        failure: TierError | None = None
        entries = self._index.use(keys)
        for place in reversed(range(len(keys))):
            entry, buffer = entries[place], into[place]
            if entry is None or entry.nbytes > buffer.nbytes:
                continue
            try:
                if self._read(directories, keys[place], entry, buffer[: entry.nbytes]):
                    counts[place] = entry.nbytes
            except TierError as error:
                failure = error
        if failure is not None and not any(counts):
            raise failure
        return counts

    def store(self, keys: Sequence[ChunkKey], values: Sequence[memoryview]) -> None:
        """As `Tier.store`. `TierFull` where the file system, not the cap, has no room."""
        directories = self._opened()
        for key, value in zip(reversed(keys), reversed(values), strict=True):
            self._store(directories, key, value)
        if keys and time.monotonic() >= self._next_look_s:
            self._look_around(directories)

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """As `Tier.delete`."""
        self._remove(self._opened(), self._index.withdraw(keys))

    def close(self) -> None:
        """As `Tier.close`. The files stay; `contains` is False from now on."""
        directories, self._directories = self._directories, None
        if directories is not None:
            directories.close()

    def describe(self, namespace: str, fields: Mapping[str, str]) -> None:
        """Write `namespace.json` beside the chunks of `namespace`, for people and `kvkeep ls`;
        what is there already stays. Raises `TierError`.
        """
        directories = self._opened()
        with disk_files.mapped("cannot describe", namespace):
            directories.describe(namespace, fields)

    def keys(self) -> Iterator[ChunkKey]:
        """The keys kept now, in no promised order."""
        return iter(self._index.keys())

    def stats(self) -> DiskStats:
        """A snapshot."""
        directories = self._directories
        direct = directories is not None and directories.direct
        return self._index.stats(self._failed_reads, self._foreign_files, direct=direct)

    def occupancy(self) -> Occupancy:
        """As `BoundedTier.occupancy`; takes no lock."""
        return Occupancy(self._index.used_bytes, self._size_bytes)

    def check_integrity(self) -> None:
        """Raise `AssertionError` where the index, the policy and the used bytes disagree."""
        self._index.check_integrity()

    def _read(
        self, directories: Directories, key: ChunkKey, entry: Entry, into: memoryview
    ) -> bool:
        """Fill `into`; False, and the entry is dropped, where the file is gone or not as long."""
        now_s = time.time()
        restamp = now_s - entry.stamped_s > RESTAMP_S
        try:
            whole = directories.read(key, entry.root, into, restamp=restamp)
        except OSError as error:
            self._failed_reads += 1
            if error.errno == errno.EIO:  # a bad sector, or it shrank as we read
                self._drop(directories, key, entry)
            where = directories.path_of(key, entry.root)
            raise disk_files.tier_error(error, "cannot read", where) from error
        if not whole:
            where = directories.path_of(key, entry.root)
            if disk_files.size_of(where) is not None:
                self._failed_reads += 1
                self._warn_once("disk tier: %s has another length than was kept: deleted", where)
            self._drop(directories, key, entry)
        elif restamp:
            entry.stamped_s = now_s
        return whole

    def _store(self, directories: Directories, key: ChunkKey, value: memoryview) -> None:
        claim = self._index.claim(key, value.nbytes)
        if isinstance(claim, NoClaim):
            return
        try:
            self._remove(directories, claim)
            entry = self._write(directories, key, value)
        except BaseException:
            self._index.abandon(key)
            raise
        self._index.publish(key, entry)

    def _write(self, directories: Directories, key: ChunkKey, value: memoryview) -> Entry:
        root = directories.root_of(key)
        try:
            written = directories.write(key, root, value)
        except OSError as error:
            where = directories.path_of(key, root)
            if not disk_files.is_no_room(error):
                raise disk_files.tier_error(error, "cannot write", where) from error
            with disk_files.mapped("cannot write", where):
                written = self._write_on_full_disk(directories, key, root, value)
        # Of a file that another process wrote we do not know the time: the next load sets it.
        return Entry(value.nbytes, root, time.time() if written else 0.0)

    def _write_on_full_disk(
        self, directories: Directories, key: ChunkKey, root: int, value: memoryview
    ) -> bool:
        """Make room in directory `root` and try once more."""
        self._warn_once(
            "disk tier: %s is full before the cap of %d bytes is reached",
            directories.path_of(key, root),
            self._size_bytes,
        )
        share_bytes = int(self._index.used_bytes * ROOM_ON_FULL_DISK)
        self._remove(directories, self._index.evict(max(value.nbytes, share_bytes), root))
        return directories.write(key, root, value)

    def _drop(self, directories: Directories, key: ChunkKey, entry: Entry) -> None:
        with contextlib.suppress(TierError):  # then it stays, and is tried again
            self._remove(directories, self._index.withdraw_entry(key, entry))

    def _remove(self, directories: Directories, leaving: Leaving) -> None:
        """Remove the files of `leaving` and settle it. What cannot be removed is kept on, since it
        still takes room; `TierError` then.
        """
        still_there: list[tuple[ChunkKey, Entry]] = []
        failure: TierError | None = None
        for key, entry in leaving.files:
            try:  # one that stays must not keep the others
                directories.remove(key, entry.root)
            except OSError as error:  # noqa: PERF203
                still_there.append((key, entry))
                where = directories.path_of(key, entry.root)
                failure = disk_files.tier_error(error, "cannot remove", where)
        if leaving.files:
            self._index.settle(leaving, still_there)
        if failure is not None:
            raise failure

    def _survey(self, directories: Directories) -> None:
        """Bring the index in line with the directories."""
        self._index.begin_survey()
        try:
            survey = directories.survey(self._index)
        except BaseException:
            self._index.end_survey([], None)
            raise
        self._index.end_survey(survey.found, survey.seen)
        self._foreign_files = len(survey.foreign)
        if survey.foreign:
            self._warn_once(
                "disk tier: left %d names alone that are not kvkeep's, such as %s",
                len(survey.foreign),
                survey.foreign[0],
            )

    def _look_around(self, directories: Directories) -> None:
        """Look through the directories again if somebody else is working there."""
        if not self._look_lock.acquire(blocking=False):
            return
        began_s = time.monotonic()
        try:
            if directories.shared():
                self._survey(directories)
                self._remove(directories, self._index.shrink())
        except (OSError, TierError) as error:
            # What was to be stored is stored; the next look may go better.
            self._warn_once("disk tier: cannot look for others' files: %s", error)
        finally:
            ended_s = time.monotonic()
            self._next_look_s = ended_s + max(RESCAN_S, (ended_s - began_s) / RESCAN_SHARE)
            self._look_lock.release()

    def _warn_once(self, message: str, *args: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _log.warning(message, *args)

    def _opened(self) -> Directories:
        directories = self._directories
        if directories is None:
            raise TierUnavailable("the disk tier is not open")
        return directories

    def _new_index(self) -> DiskIndex:
        num_keys = max(1, self._size_bytes // _TYPICAL_CHUNK_BYTES)
        return DiskIndex(self._size_bytes, make_policy(self._policy_name, num_keys))
