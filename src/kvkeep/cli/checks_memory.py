"""Checks of `kvkeep doctor`: whether the pool can be had, and the limits of the process."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvkeep.cli.finding import Finding, fail, ok, warn
from kvkeep.cli.tables import short_size
from kvkeep.config import KVKeepConfig
from kvkeep.config_values import show_size
from kvkeep.memory.shared import SharedMemory

_NO_LIMIT_BYTES = 1 << 60
"""From here on a cgroup's number means "none": version 1 writes the largest one it has."""
_MOST_OF_MEMORY = 0.8
"""A pool above this share leaves too little for the engine's own processes."""
_FEW_FILES = 1024


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What the machine has and what this process may use, in bytes."""

    total: int
    available: int
    cgroup_limit: int | None
    """None where there is none."""


def memory_facts(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> MemoryFacts:
    """Of this machine and process."""
    lines = (line.split() for line in _read(f"{proc}/meminfo").splitlines())
    kibs = {words[0]: int(words[1]) for words in lines if len(words) > 1}
    total = kibs.get("MemTotal:", 0) * 1024
    available = kibs.get("MemAvailable:", 0) * 1024
    return MemoryFacts(total, available or total, cgroup_limit(f"{proc}/self/cgroup", cgroups))


def cgroup_limit(own: str, cgroups: str) -> int | None:
    """The lowest memory limit of this process's cgroup and of those it is in, v1 or v2.

    `own`: the file that names the process's cgroups; `cgroups`: where they are mounted.
    """
    limits: list[int] = []
    for line in _read(own).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers == "":
            roots, name = (cgroups, f"{cgroups}/unified"), "memory.max"
        elif "memory" in controllers.split(","):
            roots, name = (f"{cgroups}/memory",), "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's, of which only the mounted root is seen.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for root in roots:
            for depth in range(len(parts) + 1):
                text = _read("/".join((root, *parts[:depth], name))).strip()
                if text.isdecimal() and int(text) < _NO_LIMIT_BYTES:
                    limits.append(int(text))
    return min(limits, default=None)


def memory(config: KVKeepConfig) -> Iterator[Finding]:
    """All checks of this file."""
    yield pool(config, memory_facts())
    yield shared_memory()
    yield memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def pool(config: KVKeepConfig, facts: MemoryFacts) -> Finding:
    """The pool's size against what there is."""
    name = "memory.size" if config.memory.enabled else "memory.staging"
    nbytes = config.memory.size_bytes if config.memory.enabled else config.memory.staging_bytes
    limit, whose = facts.total, "this machine's memory"
    if facts.cgroup_limit is not None and facts.cgroup_limit < limit:
        limit, whose = facts.cgroup_limit, "the cgroup's limit"
    size = f"{name} is {show_size(nbytes)}"
    lower = f"lower it (KVKEEP_{name.replace('.', '_').upper()})"
    if nbytes > limit:
        return fail("pool", f"{size}, more than {whose} of {short_size(limit)}", lower)
    if nbytes > facts.available:
        return warn(
            "pool",
            f"{size}, but only {short_size(facts.available)} are available now",
            f"{lower}, or end what else uses memory",
        )
    if nbytes > _MOST_OF_MEMORY * limit:
        return warn("pool", f"{size} of {whose} of {short_size(limit)}: little is left", lower)
    return ok("pool", f"{size} of {whose} of {short_size(limit)}")


def shared_memory() -> Finding:
    """Whether a pool can be made and given its pages ahead."""
    try:
        shared = SharedMemory.create(mmap.PAGESIZE)
    except OSError as error:
        return fail(
            "memfd",
            f"cannot be made: {error.strerror or error}",
            "allow memfd_create in the container's seccomp profile",
        )
    try:
        populates = shared.populate(0, shared.nbytes)
    finally:
        shared.close()
    if not populates:
        return warn(
            "memfd",
            "works, but without MADV_POPULATE_WRITE: the first use of each page is slow",
            f"run Linux 5.14 or newer (this is {os.uname().release})",
        )
    return ok("memfd", "works, with MADV_POPULATE_WRITE")


def memlock(limit: int) -> Finding:
    """Said because people ask. CUDA pins past it: `ulimit -l 64`, without CAP_IPC_LOCK, mlock of
    1 GiB fails and cudaHostRegister of it succeeds (one H200).
    """
    has_none = limit == resource.RLIM_INFINITY
    shown = "unlimited" if has_none else f"{short_size(limit)}; pinning by CUDA does not count"
    return ok("memlock", shown)


def open_files(limit: int) -> Finding:
    """The soft limit: a file for each I/O thread, and what the engine has."""
    if limit == resource.RLIM_INFINITY or limit >= _FEW_FILES:
        shown = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
        return ok("open files", shown)
    return warn("open files", f"at most {limit}", "ulimit -n 65536 before the engine starts")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
