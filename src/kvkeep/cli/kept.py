"""What lies in directories of the disk tier, seen from outside and changed by nothing here.

An engine may be at work in them: what is seen may be gone a moment later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from kvkeep.cli.command import UsageError
from kvkeep.tiers.disk_layout import (
    DESCRIPTION,
    Found,
    Survey,
    Temp,
    chunk_path,
    entries_of,
    is_namespace,
    survey,
)
from kvkeep.types import ChunkKey


@dataclass(frozen=True, slots=True)
class Kept:
    """One directory at the time it was looked at."""

    root: str
    """As the person named it."""
    chunks: tuple[Found, ...]
    """Files with a chunk's name: one for each rank of a chunk."""
    temps: tuple[Temp, ...]
    foreign: tuple[str, ...]
    """Paths whose names are none of kvkeep's."""
    namespaces: dict[str, dict[str, str]]
    """Name to what its `namespace.json` says; empty fields where there is none that can be read."""

    def path_of(self, chunk: Found) -> str:
        """Where the chunk's file lies."""
        return chunk_path(self.root, chunk.key)

    def only(self, namespace: str | None) -> Kept:
        """The part of one namespace; all where that is None."""
        if namespace is None:
            return self
        below = f"{self.root}/{namespace}/"
        return Kept(
            self.root,
            tuple(chunk for chunk in self.chunks if chunk.key.namespace == namespace),
            tuple(temp for temp in self.temps if temp.path.startswith(below)),
            tuple(path for path in self.foreign if path.startswith(below)),
            {name: given for name, given in self.namespaces.items() if name == namespace},
        )


def look(directories: Sequence[str], namespace: str | None = None) -> list[Kept]:
    """Look through each directory once, at what belongs to `namespace` or at all.

    Raises `UsageError` for one that is no directory or not a tier's, and for a namespace that is
    in none of them; `OSError` for one that cannot be read.
    """
    everything = [_look(root) for root in _distinct(directories)]
    if namespace is not None:
        known = {name for kept in everything for name in kept.namespaces}
        if namespace not in known:
            raise UsageError(f"no namespace {namespace} there; {_hint(namespace, known)}")
    return [kept.only(namespace) for kept in everything]


def _look(root: str) -> Kept:
    seen = Survey()
    survey(root, 0, frozenset[ChunkKey](), seen)
    names = {chunk.key.namespace for chunk in seen.found} | set(_described(root))
    return Kept(
        root,
        tuple(seen.found),
        tuple(seen.temps),
        tuple(seen.foreign),
        {name: _read_description(f"{root}/{name}/{DESCRIPTION}") for name in sorted(names)},
    )


def _described(root: str) -> Iterator[str]:
    for entry in entries_of(root):
        if is_namespace(entry.name) and os.path.isfile(f"{entry.path}/{DESCRIPTION}"):
            yield entry.name


def _read_description(path: str) -> dict[str, str]:
    try:
        with open(path, "rb") as stream:
            content: object = json.load(stream)
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {str(name): str(value) for name, value in cast("dict[object, object]", content).items()}


def _distinct(directories: Sequence[str]) -> list[str]:
    roots: dict[tuple[int, int], str] = {}
    for directory in directories:
        root = directory.rstrip("/") or "/"
        if not os.path.isdir(root):
            problem = "is not a directory" if os.path.lexists(root) else "does not exist"
            raise UsageError(f"{directory} {problem}")
        if os.path.isfile(f"{root}/{DESCRIPTION}"):
            parent, name = os.path.split(os.path.abspath(root))
            raise UsageError(
                f"{directory} is one namespace's own directory; write {parent} --namespace {name}"
            )
        status = os.stat(root)
        roots.setdefault((status.st_dev, status.st_ino), root)
    return list(roots.values())


def _hint(wanted: str, known: set[str]) -> str:
    if not known:
        return "nothing is kept there"
    # Behind a wrong name only: it brings all of the settings' machinery with it.
    from kvkeep.config_values import nearest

    return nearest(wanted, known)
