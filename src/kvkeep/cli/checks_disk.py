"""Checks of `kvkeep doctor`: the directories of the disk tier, before an engine uses them."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvkeep.cli.command import UsageError
from kvkeep.cli.finding import Finding, fail, ok, warn
from kvkeep.cli.kept import look
from kvkeep.cli.tables import short_size
from kvkeep.config import DiskConfig
from kvkeep.config_values import show_size
from kvkeep.tiers.disk_files import why_not_direct

_OCTAL = re.compile(r"\\([0-7]{3})")
_NETWORK = "over the network: files may lack locks, and a slow server is a slow cache"
_DOUBTFUL_TYPES = {
    "tmpfs": "this is memory, not a disk: a restart loses it, and it takes room from the pool",
    "ramfs": "this is memory, not a disk: a restart loses it, and it takes room from the pool",
    "overlay": "this is the container's own layer: it goes with the container, and is slow",
    "nfs": _NETWORK,
    "nfs4": _NETWORK,
    "cifs": _NETWORK,
    "smb3": _NETWORK,
    "9p": _NETWORK,
}


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """What is known of one directory."""

    path: str
    there: str
    """The directory, or the nearest one above it that exists."""
    device: int
    fs_type: str
    """As the kernel calls it; `unknown` where it does not say."""
    free_bytes: int
    kept_bytes: int
    """What lies there of kvkeep's already."""
    problem: str | None
    """Why it cannot be used at all."""
    why_not_direct: str | None
    """Why O_DIRECT does not work there; None where it does."""


def disk(disk_config: DiskConfig, directories: Sequence[str]) -> Iterator[Finding]:
    """All checks of this file, for the directories of the settings and for others."""
    paths = list(dict.fromkeys(map(os.path.abspath, (*disk_config.paths, *directories))))
    if not paths:
        yield ok("disk", "no disk.paths: there is no disk tier")
        return
    all_facts = [directory_facts(path) for path in paths]
    for facts in all_facts:
        yield usable(facts)
        if facts.problem is None:
            yield direct(facts, disk_config.odirect)
            yield file_system(facts)
    yield from room([one for one in all_facts if one.problem is None], disk_config.size_bytes)


def directory_facts(path: str) -> DirectoryFacts:
    """Ask the system, by a small file that is removed again; the directory is not created."""
    there = path
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    problem = reason = None
    kept_bytes = 0
    try:
        if not os.path.isdir(there):
            problem = f"{there} is not a directory"
        elif not os.access(there, os.W_OK | os.X_OK):
            problem = f"{there} is not writable"
        else:
            reason = why_not_direct(f"{there}/.kvkeep-doctor-{secrets.token_hex(8)}.probe")
            if there == path:
                (kept,) = look([path])
                kept_bytes = sum(chunk.nbytes for chunk in kept.chunks)
    except OSError as error:
        problem = f"{error.filename or there}: {error.strerror or error}"
    except UsageError as error:
        problem = str(error)
    status, whole = os.stat(there), os.statvfs(there)
    return DirectoryFacts(
        path=path,
        there=there,
        device=status.st_dev,
        fs_type=fs_type_of(os.path.realpath(there)),
        free_bytes=whole.f_bavail * whole.f_frsize,
        kept_bytes=kept_bytes,
        problem=problem,
        why_not_direct=reason,
    )


def fs_type_of(path: str, mounts: str = "/proc/self/mountinfo") -> str:
    """The type of the file system that `path`, absolute and without links, lies on."""
    found, length = "unknown", -1
    try:
        lines = Path(mounts).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return found
    for line in lines:
        before, _, after = line.partition(" - ")
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), before.split()[4]).rstrip("/")
        # The last of those at one point hides the ones before it.
        if (path == point or path.startswith(f"{point}/")) and len(point) >= length:
            found, length = after.split()[0], len(point)
    return found


def usable(facts: DirectoryFacts) -> Finding:
    """Whether it is there or can be made, and written to."""
    if facts.problem is not None:
        remedy = "make it writable for the engine's user, or set disk.paths to another directory"
        return fail("directory", f"{facts.path}: {facts.problem}", remedy)
    if facts.there != facts.path:
        return ok("directory", f"{facts.path}: not there yet, can be made in {facts.there}")
    return ok("directory", f"{facts.path}: writable, {short_size(facts.kept_bytes)} kept")


def direct(facts: DirectoryFacts, odirect: str) -> Finding:
    """Whether reads and writes can go past the page cache."""
    if odirect == "off":
        return ok("O_DIRECT", f"{facts.path}: off by disk.odirect")
    if facts.why_not_direct is None:
        return ok("O_DIRECT", f"{facts.path}: works")
    return warn(
        "O_DIRECT",
        f"{facts.path}: {facts.why_not_direct}; all goes through the page cache, which is slower",
        "use a local ext4 or xfs file system, or set disk.odirect to off if this is wanted",
    )


def file_system(facts: DirectoryFacts) -> Finding:
    """Whether its type is one for a cache."""
    reason = _DOUBTFUL_TYPES.get(facts.fs_type)
    if reason is None and facts.fs_type.startswith("fuse"):
        reason = "a program serves it: it may be slow, and files may lack locks"
    if reason is None:
        return ok("file system", f"{facts.path}: {facts.fs_type}")
    return warn(
        "file system",
        f"{facts.path}: {facts.fs_type}: {reason}",
        "mount a local NVMe drive there, or name a directory on one",
    )


def room(all_facts: Sequence[DirectoryFacts], cap_bytes: int) -> Iterator[Finding]:
    """For each file system: free space against its share of the cap.

    Chunks are spread evenly over the directories, so its share is that of its directories.
    """
    for device in dict.fromkeys(facts.device for facts in all_facts):
        those = [facts for facts in all_facts if facts.device == device]
        where = ", ".join(facts.path for facts in those)
        free_bytes = those[0].free_bytes
        have_bytes = free_bytes + sum(facts.kept_bytes for facts in those)
        share_bytes = cap_bytes * len(those) // len(all_facts)
        says = f"{where}: {short_size(free_bytes)} free"
        if not cap_bytes:
            yield ok("room", says)
        elif have_bytes >= share_bytes:
            yield ok("room", f"{says}; disk.size is {show_size(cap_bytes)}")
        else:
            fits_gib = have_bytes * len(all_facts) // len(those) // 2**30
            yield warn(
                "room",
                f"{says}, but disk.size of {show_size(cap_bytes)} may take "
                f"{short_size(share_bytes)} there",
                f"make room, or lower disk.size (KVKEEP_DISK_SIZE) to at most {fits_gib}GiB",
            )
