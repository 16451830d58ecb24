"""Chunks in files over several directories: all I/O of the disk tier, by key.

Which directory a chunk is written to follows from its digest, so that a restart and another process
find it; where it is read from is what the last survey or store said, so that a changed list of
directories loses nothing. Everything here raises `OSError`; `disk` maps it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Container, Mapping, Sequence
from operator import attrgetter
from typing import Literal

from kvkeep.errors import TierError
from kvkeep.tiers import disk_files, disk_layout
from kvkeep.tiers.disk_layout import Found, Survey
from kvkeep.tiers.disk_presence import Presence
from kvkeep.types import ChunkKey

_log = logging.getLogger(__name__)

ODirect = Literal["auto", "on", "off"]


class Directories:
    """Made open: the directories exist, are marked as in use, and are probed for O_DIRECT.

    Thread-safe, without locks: two calls that write or remove one key leave one of the outcomes.
    """

    def __init__(self, paths: Sequence[str], odirect: ODirect) -> None:
        self._roots = _distinct(paths)
        self._presence = Presence(self._roots)
        self._numbers = itertools.count()
        self._namespaces: set[str] = set()
        self._direct: list[bool] = []
        self._odirect: ODirect = odirect

    @property
    def direct(self) -> bool:
        """True where all of the directories take O_DIRECT."""
        return all(self._direct)

    def open(self) -> None:
        """Mark and probe; after a failure too, `close`."""
        self._presence.enter()
        self._direct = [self._probe(root) for root in self._roots]

    def close(self) -> None:
        """Take the marks away; safe to call twice."""
        self._presence.leave()

    def root_of(self, key: ChunkKey) -> int:
        """Which directory `key` is written to."""
        # Other bytes than those that choose the subdirectory, or half of those would stay empty.
        return int.from_bytes(key.digest[8:16], "big") % len(self._roots)

    def path_of(self, key: ChunkKey, root: int) -> str:
        """Where `key` lies in directory `root`."""
        return disk_layout.chunk_path(self._roots[root], key)

    def read(self, key: ChunkKey, root: int, into: memoryview, *, restamp: bool) -> bool:
        """Fill `into` with a file of exactly its length; False where there is no such file."""
        path = self.path_of(key, root)
        try:
            return disk_files.read_file(path, into, direct=self._direct[root], restamp=restamp)
        except FileNotFoundError:
            return False

    def write(self, key: ChunkKey, root: int, value: memoryview) -> bool:
        """Put `value` in place; False where a file of its length was there, which stays."""
        path = self.path_of(key, root)
        if disk_files.size_of(path) == value.nbytes:
            return False
        self._require_namespace(key.namespace)
        temp = disk_layout.temp_path(path, self._presence.token, next(self._numbers))
        try:
            disk_files.write_file(temp, path, value, direct=self._direct[root])
        except FileNotFoundError:
            # The first in its subdirectory. To ask each time would cost each time.
            disk_layout.make_parents(self._roots[root], key)
            disk_files.write_file(temp, path, value, direct=self._direct[root])
        return True

    def remove(self, key: ChunkKey, root: int) -> None:
        """No file any more, whether or not there was one. Who has it open can read on."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path_of(key, root))

    def describe(self, namespace: str, fields: Mapping[str, str]) -> None:
        """Write `namespace.json` in each directory that has none for `namespace`."""
        self._require_namespace(namespace)
        for root in self._roots:
            temp_number = next(self._numbers)
            disk_layout.write_description(
                root, namespace, fields, self._presence.token, temp_number
            )

    def shared(self) -> bool:
        """True where another open tier, of this process or not, uses one of the directories."""
        return bool(self._presence.others())

    def survey(self, known: Container[ChunkKey]) -> Survey:
        """What lies in the directories, `found` oldest first.

        What is no use is removed on the way: temp files of the dead, empty files (a power cut
        leaves them), and of several files under one key all but the newest (a changed list of
        directories leaves them).
        """
        survey = Survey()
        for number, root in enumerate(self._roots):
            disk_layout.survey(root, number, known, survey)
        sound: dict[ChunkKey, Found] = {}
        for file in sorted(survey.found, key=attrgetter("mtime_ns")):
            if file.nbytes == 0:
                self.remove(file.key, file.root)
                continue
            older = sound.pop(file.key, None)  # popped, so that the key goes to the end
            if older is not None:
                self._remove_older(older, file)
            sound[file.key] = file
        survey.found = list(sound.values())
        self._presence.sweep(survey.temps)
        return survey

    def _remove_older(self, older: Found, newer: Found) -> None:
        older_path = self.path_of(older.key, older.root)
        # A symbolic link between the directories shows one file twice.
        with contextlib.suppress(FileNotFoundError):
            if not os.path.samefile(older_path, self.path_of(newer.key, newer.root)):
                os.unlink(older_path)

    def _require_namespace(self, namespace: str) -> None:
        if namespace in self._namespaces:
            return
        if not disk_layout.is_namespace(namespace):
            raise TierError(f"namespace {namespace!r} cannot be a directory's name")
        self._namespaces.add(namespace)

    def _probe(self, root: str) -> bool:
        if self._odirect == "off":
            return False
        reason = disk_files.why_not_direct(
            f"{root}/{disk_layout.OWN_DIRECTORY}/{self._presence.token}.probe"
        )
        if reason is not None:
            _log.log(
                logging.WARNING if self._odirect == "on" else logging.INFO,
                "disk tier: no O_DIRECT in %s (%s): it goes through the page cache",
                root,
                reason,
            )
        return reason is None


def _distinct(paths: Sequence[str]) -> list[str]:
    """The directories, created, each once; by identity, since one may be mounted at two places."""
    roots: dict[tuple[int, int], str] = {}
    for path in paths:
        root = os.path.abspath(path)
        os.makedirs(root, exist_ok=True)
        status = os.stat(root)
        roots.setdefault((status.st_dev, status.st_ino), root)
    return list(roots.values())
