"""`kvkeep stat`: how much is kept, and how much room the file system has."""

from __future__ import annotations

import argparse
import contextlib
import os
from dataclasses import asdict, dataclass

from kvkeep.cli.command import Exit, Parser, add_directories, print_json
from kvkeep.cli.direct_reads import takes_direct_reads
from kvkeep.cli.kept import Kept, look
from kvkeep.cli.tables import one_line, short_size, table

_BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system's own block is."""


@dataclass(frozen=True, slots=True)
class Totals:
    """One directory's."""

    directory: str
    used_bytes: int
    """What the file system has allocated for the chunks."""
    frame_bytes: int
    """What the chunks' lengths add up to."""
    chunks: int
    files: int
    namespaces: int
    temporary: int
    foreign: int
    free_bytes: int
    """Of the file system, for a user without privileges."""
    size_bytes: int
    """Of the file system."""
    direct: bool | None
    """Whether O_DIRECT works there; None where there is no chunk to try it on."""


def add_arguments(parser: Parser) -> None:
    """As `Command.add_arguments`."""
    add_directories(parser)


def run(args: argparse.Namespace) -> Exit:
    """As `Command.run`."""
    totals = [totals_of(kept) for kept in look(args.directories)]
    if args.json:
        print_json({"directories": [asdict(one) for one in totals]})
    else:
        print(
            "\n\n".join(table(("directory", one_line(one.directory)), _rows(one)) for one in totals)
        )
    return Exit.OK


def totals_of(kept: Kept) -> Totals:
    """Count what `kept` has, and ask the file system for the rest."""
    room = os.statvfs(kept.root)
    used_bytes = 0
    for chunk in kept.chunks:
        with contextlib.suppress(FileNotFoundError):
            used_bytes += os.stat(kept.path_of(chunk)).st_blocks * _BLOCK_BYTES
    return Totals(
        directory=kept.root,
        used_bytes=used_bytes,
        frame_bytes=sum(chunk.nbytes for chunk in kept.chunks),
        chunks=len({(chunk.key.namespace, chunk.key.digest) for chunk in kept.chunks}),
        files=len(kept.chunks),
        namespaces=len(kept.namespaces),
        temporary=len(kept.temps),
        foreign=len(kept.foreign),
        free_bytes=room.f_bavail * room.f_frsize,
        size_bytes=room.f_blocks * room.f_frsize,
        direct=takes_direct_reads(map(kept.path_of, kept.chunks)),
    )


def _rows(totals: Totals) -> list[tuple[str, str]]:
    direct = {True: "works", False: "refused", None: "unknown: no chunk to try it on"}
    share = totals.free_bytes / totals.size_bytes if totals.size_bytes else 0.0
    return [
        ("used", f"{short_size(totals.used_bytes)} ({totals.used_bytes} bytes allocated)"),
        ("chunks", f"{totals.chunks} in {totals.files} files"),
        ("namespaces", str(totals.namespaces)),
        ("temporary", f"{totals.temporary} files"),
        ("foreign", f"{totals.foreign} names"),
        (
            "free",
            f"{short_size(totals.free_bytes)} of {short_size(totals.size_bytes)} ({share:.0%})",
        ),
        ("O_DIRECT", direct[totals.direct]),
    ]
