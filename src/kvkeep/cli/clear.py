"""`kvkeep clear`: deletes what is kept, and nothing that is not kvkeep's.

Safe beside a running engine, for which a file that is gone is a miss: then directories and their
descriptions stay, since an engine makes those only once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvkeep.cli.command import (
    Exit,
    Parser,
    UsageError,
    add_directories,
    add_namespace,
    print_json,
)
from kvkeep.cli.kept import Kept, look
from kvkeep.cli.tables import short_size
from kvkeep.tiers.disk_layout import DESCRIPTION, Temp, entries_of
from kvkeep.tiers.disk_presence import Presence

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(slots=True)
class Cleared:
    """What was deleted, or what would be."""

    files: int = 0
    bytes: int = 0
    temporary: int = 0
    namespaces: int = 0
    """Which hold nothing any more."""
    failed: int = 0


def add_arguments(parser: Parser) -> None:
    """As `Command.add_arguments`."""
    add_directories(parser)
    add_namespace(parser, "clear this namespace only")
    parser.add_argument(
        "--older-than",
        metavar="AGE",
        type=parse_age_s,
        help="clear only what was not used for so long: 45s, 30m, 12h, 7d, 2w",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")


def parse_age_s(text: str) -> float:
    """Seconds; the type of `--older-than`."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age; write for example 12h or 7d")
    return float(match[1]) * _UNIT_S[match[2]]


def run(args: argparse.Namespace) -> Exit:
    """As `Command.run`."""
    kept = [_old_part(one, args.older_than) for one in look(args.directories, args.namespace)]
    planned = Cleared(
        files=sum(len(one.chunks) for one in kept),
        bytes=sum(chunk.nbytes for one in kept for chunk in one.chunks),
        temporary=sum(len(one.temps) for one in kept),
        namespaces=len({chunk.key.namespace for one in kept for chunk in one.chunks}),
    )
    cleared = Cleared()
    if not args.yes:
        if planned.files == planned.temporary == 0:
            _report(cleared, as_json=args.json)
            return Exit.OK
        if not _agreed(planned):
            print("nothing was deleted", file=sys.stderr)
            return Exit.OK
    for one in kept:
        _clear(one, cleared)
    cleared.namespaces = len(
        {name for one in kept for name in one.namespaces}
        - {name for one in look(args.directories) for name in one.namespaces}
    )
    _report(cleared, as_json=args.json)
    return Exit.WRONG if cleared.failed else Exit.OK


def _report(cleared: Cleared, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(cleared))
    else:
        counts = " ".join(f"{name}={count}" for name, count in asdict(cleared).items())
        print(f"clear: {counts}")


def _old_part(kept: Kept, older_than_s: float | None) -> Kept:
    """`kept` without what was used in the last `older_than_s` seconds."""
    if older_than_s is None:
        return kept
    until_s = time.time() - older_than_s
    return Kept(
        kept.root,
        tuple(chunk for chunk in kept.chunks if chunk.mtime_ns / 1e9 < until_s),
        tuple(temp for temp in kept.temps if _is_older(temp, until_s)),
        kept.foreign,
        kept.namespaces,
    )


def _is_older(temp: Temp, until_s: float) -> bool:
    try:
        return os.stat(temp.path).st_mtime < until_s
    except FileNotFoundError:
        return False


def _agreed(planned: Cleared) -> bool:
    """Ask on stderr, so that stdout stays the report's. Raises `UsageError` if nobody is there."""
    what = (
        f"{planned.files} files of {short_size(planned.bytes)} and {planned.temporary} temporary "
        f"ones in {planned.namespaces} namespaces"
    )
    if not sys.stdin.isatty():
        raise UsageError(f"would delete {what}; say --yes to do it")
    print(f"This deletes {what}. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _clear(kept: Kept, cleared: Cleared) -> None:
    for chunk in kept.chunks:
        path = kept.path_of(chunk)
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            cleared.failed += 1
            print(f"kvkeep clear: cannot delete {path}: {error.strerror}", file=sys.stderr)
        else:
            cleared.files += 1
            cleared.bytes += chunk.nbytes
    presence = Presence([kept.root])
    cleared.temporary += presence.sweep(kept.temps)
    if not presence.others():
        _prune(kept.root, list(kept.namespaces))


def _prune(root: str, namespaces: Sequence[str]) -> None:
    """Remove those of the directories that are empty now, and the descriptions of nothing."""
    for name in namespaces:
        directory = f"{root}/{name}"
        for rank in list(entries_of(directory)):
            if _is_rank(rank.name):
                for shard in list(entries_of(rank.path)):
                    _remove_empty(shard.path)
                _remove_empty(rank.path)
        if not any(_is_rank(entry.name) for entry in entries_of(directory)):
            with contextlib.suppress(OSError):
                os.unlink(f"{directory}/{DESCRIPTION}")
            _remove_empty(directory)


def _is_rank(name: str) -> bool:
    return name[:1] == "r" and name[1:].isdecimal()


def _remove_empty(directory: str) -> None:
    with contextlib.suppress(OSError):  # not empty, or not a directory
        os.rmdir(directory)
