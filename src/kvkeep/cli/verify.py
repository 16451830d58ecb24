"""`kvkeep verify`: reads every frame and says which are not what they should be.

Safe beside a running engine: what vanishes meanwhile is no error, and nothing is changed unless
`--delete` says so.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from kvkeep.cli.command import (
    Exit,
    Parser,
    add_directories,
    add_namespace,
    count_from_1,
    print_json,
)
from kvkeep.cli.direct_reads import takes_direct_reads
from kvkeep.cli.frame_check import BadFile, Checked, FrameChecker, remove_if_same
from kvkeep.cli.kept import Kept, look
from kvkeep.cli.tables import Progress, one_line, short_age, short_size
from kvkeep.tiers.disk_layout import Found
from kvkeep.tiers.disk_presence import Presence

_DEFAULT_JOBS = 4
"""Two cores, virtual disk, 945 MB, `kvkeep verify DIR --jobs N` twice each beside other work:
N=1 0.7-0.8 GB/s, 2 1.1-1.3, 4 1.2-1.7, 8 1.2."""
_PROGRESS_S = 0.2


@dataclass(slots=True)
class Tally:
    """What was found so far."""

    files: int = 0
    bytes: int = 0
    vanished: int = 0
    bad: list[BadFile] = field(default_factory=list[BadFile])

    def add(self, checked: Checked) -> None:
        """Count one file's outcome."""
        self.bytes += checked.nbytes
        if checked.is_gone:
            self.vanished += 1
            return
        self.files += 1
        if checked.bad is not None:
            self.bad.append(checked.bad)


class Task(NamedTuple):
    """One file to check."""

    path: str
    chunk: Found
    direct: bool


@dataclass(frozen=True, slots=True)
class Deleted:
    """How many files `--delete` removed."""

    bad: int
    temporary: int


@dataclass(frozen=True, slots=True)
class Report:
    """All there is to say at the end."""

    tally: Tally
    temporary_ages_s: dict[str, float]
    """Path to seconds. They come and go beside an engine: the old ones are leftovers."""
    foreign: list[str]
    deleted: Deleted | None
    """None where nothing was to be deleted."""
    seconds: float

    def document(self) -> dict[str, object]:
        """For `--json`."""
        tally = self.tally
        return {
            "files": tally.files,
            "bytes": tally.bytes,
            "vanished": tally.vanished,
            "bad": [
                {"path": one.path, "reason": one.reason, "message": one.message}
                for one in tally.bad
            ],
            "temporary": [
                {"path": path, "age_s": age_s} for path, age_s in self.temporary_ages_s.items()
            ],
            "foreign": self.foreign,
            "deleted": self.deleted and asdict(self.deleted),
            "seconds": round(self.seconds, 3),
        }

    def lines(self) -> Iterator[str]:
        """For people; the last one is the summary."""
        tally, deleted = self.tally, self.deleted
        for one in tally.bad:
            yield f"bad: {one_line(one.path)}: {one.reason}: {one.message}"
        for path, age_s in self.temporary_ages_s.items():
            yield f"temporary: {one_line(path)}: {short_age(age_s)} old"
        for path in self.foreign:
            yield f"foreign: {one_line(path)}"
        summary = (
            f"verify: files={tally.files} bad={len(tally.bad)} "
            f"temporary={len(self.temporary_ages_s)} foreign={len(self.foreign)} "
            f"bytes={tally.bytes} seconds={self.seconds:.2f}"
        )
        yield summary if deleted is None else f"{summary} deleted={deleted.bad + deleted.temporary}"


def add_arguments(parser: Parser) -> None:
    """As `Command.add_arguments`."""
    add_directories(parser)
    add_namespace(parser, "verify this namespace only")
    parser.add_argument(
        "--delete",
        action="store_true",
        help="delete bad files, and temporary ones that nobody is writing",
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=count_from_1,
        default=_DEFAULT_JOBS,
        help=f"threads that read and check (default {_DEFAULT_JOBS})",
    )


def run(args: argparse.Namespace) -> Exit:
    """As `Command.run`."""
    began_s = time.monotonic()
    kept = look(args.directories, args.namespace)
    tally = check_all(kept, args.jobs)
    seconds = time.monotonic() - began_s
    ages = _ages([temp.path for one in kept for temp in one.temps])
    foreign = sorted(path for one in kept for path in one.foreign)
    deleted = _delete(tally.bad, kept) if args.delete else None
    report = Report(tally, ages, foreign, deleted, seconds)
    if args.json:
        print_json(report.document())
    else:
        print("\n".join(report.lines()))
    return Exit.WRONG if tally.bad else Exit.OK


def check_all(kept: Sequence[Kept], jobs: int) -> Tally:
    """Check every chunk of `kept` with `jobs` threads; `bad` is sorted by path."""
    tasks = [task for one in kept for task in _tasks(one)]
    tally = Tally()
    ahead = iter(tasks)
    lock = threading.Lock()
    stop = threading.Event()

    def work() -> None:
        checkers = {direct: FrameChecker(direct=direct) for direct in (False, True)}
        while not stop.is_set():
            with lock:
                task = next(ahead, None)
            if task is None:
                return
            checked = checkers[task.direct].check(task.path, task.chunk.key)
            with lock:
                tally.add(checked)

    with ThreadPoolExecutor(max(1, min(jobs, len(tasks))), "kvkeep-verify") as threads:
        try:
            _watch([threads.submit(work) for _ in range(jobs)], tally, len(tasks))
        finally:
            stop.set()
    tally.bad.sort(key=lambda bad: bad.path)
    return tally


def _tasks(kept: Kept) -> list[Task]:
    paths = {chunk: kept.path_of(chunk) for chunk in kept.chunks}
    direct = takes_direct_reads(paths.values()) is True
    return [Task(path, chunk, direct) for chunk, path in paths.items()]


def _watch(jobs: Sequence[Future[None]], tally: Tally, total: int) -> None:
    """Show how far they are until all are done; raises what one of them raised."""
    progress = Progress()
    began_s = time.monotonic()
    pending = set(jobs)
    while pending:
        _, pending = wait(pending, timeout=_PROGRESS_S)
        rate = short_size(int(tally.bytes / max(1e-9, time.monotonic() - began_s)))
        progress.show(
            f"verify: {tally.files} of {total} files, {short_size(tally.bytes)}, {rate}/s, "
            f"{len(tally.bad)} bad"
        )
    progress.clear()
    for job in jobs:
        job.result()


def _ages(paths: Sequence[str]) -> dict[str, float]:
    """Seconds since each was last written to; without those that are gone."""
    ages: dict[str, float] = {}
    for path in sorted(paths):
        try:
            ages[path] = round(max(0.0, time.time() - os.stat(path).st_mtime), 3)
        except FileNotFoundError:  # noqa: PERF203
            continue
    return ages


def _delete(bad: Sequence[BadFile], kept: Sequence[Kept]) -> Deleted:
    removed = 0
    for one in bad:
        try:
            removed += one.is_worthless and remove_if_same(one)
        except OSError as error:  # noqa: PERF203
            print(f"kvkeep verify: cannot delete {one.path}: {error.strerror}", file=sys.stderr)
    swept = sum(Presence([one.root]).sweep(one.temps) for one in kept)
    return Deleted(removed, swept)
