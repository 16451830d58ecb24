"""Names in a directory of the disk tier: which they are, and reading them back.

    <directory>/<namespace>/namespace.json                            for people
    <directory>/<namespace>/r<rank>/<2 hex>/<64 hex>.kv               one chunk
    <directory>/<namespace>/r<rank>/<2 hex>/<64 hex>.kv.<token>-<n>.tmp   one being written
    <directory>/.kvkeep/<token>.lock                                  one open tier

A temp file lies beside its target: creating and renaming then touch one of many directories, not
one that all threads queue for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvkeep.tiers import disk_files
from kvkeep.types import ChunkKey, Digest

OWN_DIRECTORY = ".kvkeep"
DESCRIPTION = "namespace.json"

_TEMP_SUFFIX = ".tmp"
_CHUNK_SUFFIX = ".kv"
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@=-]{0,199}")
_TEMP = re.compile(r"(?:[0-9a-f]{64}\.kv|namespace\.json)\.([0-9a-f]{16})-[0-9]+\.tmp")


class Found(NamedTuple):
    """A chunk's file that a survey came upon."""

    key: ChunkKey
    root: int
    """Which of the tier's directories it lies in."""
    nbytes: int
    mtime_ns: int


class Temp(NamedTuple):
    """A file that somebody was or is writing."""

    path: str
    token: str
    """Of the tier that made it."""


@dataclass(slots=True)
class Survey:
    """What lies in the directories."""

    found: list[Found] = field(default_factory=list[Found])
    seen: list[ChunkKey] = field(default_factory=list[ChunkKey])
    """Chunks that were known before, not asked for their size."""
    temps: list[Temp] = field(default_factory=list[Temp])
    foreign: list[str] = field(default_factory=list[str])
    """Paths whose names are none of ours."""


def is_namespace(name: str) -> bool:
    """True where `name` can be a directory's name and cannot lead out of its parent."""
    return _NAMESPACE.fullmatch(name) is not None


def chunk_path(root: str, key: ChunkKey) -> str:
    """Where `key` lies below the directory `root`."""
    digest = key.digest.hex()
    return f"{root}/{key.namespace}/r{key.rank}/{digest[:2]}/{digest}{_CHUNK_SUFFIX}"


def temp_path(path: str, token: str, number: int) -> str:
    """Where the file that becomes `path` is written; `number` differs for each call of a tier."""
    return f"{path}.{token}-{number}{_TEMP_SUFFIX}"


def make_parents(root: str, key: ChunkKey) -> None:
    """Create the directories of `key` below `root`, but never `root`: if that is gone, a disk was
    unmounted, and what is written to its empty mount point would fill another one.
    """
    directory = root
    for name in (key.namespace, f"r{key.rank}", key.digest.hex()[:2]):
        directory = f"{directory}/{name}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)


def write_description(
    root: str, namespace: str, fields: Mapping[str, str], token: str, number: int
) -> None:
    """Write `fields` beside the chunks of `namespace`, unless a description is there."""
    path = f"{root}/{namespace}/{DESCRIPTION}"
    if disk_files.size_of(path) is None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{root}/{namespace}")
        text = json.dumps(dict(fields), indent=2, sort_keys=True) + "\n"
        temp = temp_path(path, token, number)
        disk_files.write_file(temp, path, memoryview(text.encode()), direct=False)


def survey(root: str, number: int, known: Container[ChunkKey], into: Survey) -> None:
    """Add to `into` what lies below `root`, the tier's directory number `number`.

    Files that vanish meanwhile are skipped. Raises `OSError` where a directory cannot be read.
    """
    for namespace in entries_of(root):
        if namespace.name.startswith(".") or namespace.name == "lost+found":
            continue  # hidden, or the file system's own
        if not (is_namespace(namespace.name) and namespace.is_dir()):
            into.foreign.append(namespace.path)
            continue
        for rank in entries_of(namespace.path):
            if rank.name == DESCRIPTION:
                continue
            if not (rank.name[:1] == "r" and rank.name[1:].isdecimal() and rank.is_dir()):
                _other(rank, into)
                continue
            for shard in entries_of(rank.path):
                if not (len(shard.name) == 2 and shard.is_dir()):
                    into.foreign.append(shard.path)
                    continue
                _survey_shard(shard, namespace.name, int(rank.name[1:]), number, known, into)


def _survey_shard(
    shard: os.DirEntry[str],
    namespace: str,
    rank: int,
    number: int,
    known: Container[ChunkKey],
    into: Survey,
) -> None:
    # 100,000 times at start, so plain and in one piece: 10 us a file where a tidy one took 14.
    found, seen, prefix = into.found.append, into.seen.append, shard.name
    for entry in entries_of(shard.path):
        name = entry.name
        try:
            digest = bytes.fromhex(name[:64])
        except ValueError:
            digest = b""
        # `fromhex` also takes capitals and spaces, which our own names never have.
        if name != f"{digest.hex()}{_CHUNK_SUFFIX}" or len(digest) != 32 or name[:2] != prefix:
            _other(entry, into)
            continue
        key = ChunkKey(namespace, rank, Digest(digest))
        if key in known:
            seen(key)
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            found(Found(key, number, status.st_size, status.st_mtime_ns))
        else:
            _other(entry, into)


def _other(entry: os.DirEntry[str], into: Survey) -> None:
    temp = _TEMP.fullmatch(entry.name)
    if temp is None:
        into.foreign.append(entry.path)
    else:
        into.temps.append(Temp(entry.path, temp[1]))


def entries_of(directory: str) -> Iterator[os.DirEntry[str]]:
    """What is in `directory`; nothing where there is no such directory (any more)."""
    try:
        with os.scandir(directory) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return
