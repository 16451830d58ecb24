"""`kvkeep doctor`: checks the installation, the machine and the directories, and says what to do.

Each finding is printed as it is made, the slow ones last. Nothing is changed, no engine started.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvkeep.cli.checks_disk import disk
from kvkeep.cli.checks_installation import engine, installation
from kvkeep.cli.checks_memory import memory
from kvkeep.cli.command import Exit, Parser, print_json
from kvkeep.cli.config import add_extra
from kvkeep.cli.finding import Finding, fail, ok, warn
from kvkeep.cli.tables import Progress
from kvkeep.config import DiskConfig, LoadedConfig, load_config
from kvkeep.errors import ConfigError


def add_arguments(parser: Parser) -> None:
    """As `Command.add_arguments`."""
    add_extra(parser)
    parser.add_argument(
        "--dir",
        metavar="DIR",
        dest="directories",
        action="append",
        default=[],
        help="check this directory too, besides those of disk.paths; may be given again",
    )


def run(args: argparse.Namespace) -> Exit:
    """As `Command.run`."""
    findings: list[Finding] = []
    progress = Progress()
    for finding in _checks(args.extra, args.directories, progress):
        findings.append(finding)
        if not args.json:
            progress.clear()
            _print(finding)
    progress.clear()
    counts = Counter(finding.status for finding in findings)
    if args.json:
        print_json({"findings": [asdict(finding) for finding in findings], **_summary(counts)})
    else:
        print("doctor: " + " ".join(f"{name}={count}" for name, count in _summary(counts).items()))
    return Exit.WRONG if counts["FAIL"] else Exit.OK


def settings(loaded: LoadedConfig | ConfigError) -> Iterator[Finding]:
    """Whether they load, and what is doubtful about them."""
    if isinstance(loaded, ConfigError):
        remedy = "correct it; docs/settings.md lists what can be written"
        yield fail("settings", str(loaded), remedy)
        return
    given = sum(source != "default" for source in loaded.sources.values())
    yield ok("settings", f"load; {given} of {len(loaded.sources)} are not the default")
    for warning in loaded.warnings:
        yield warn("settings", warning, "kvkeep config shows each setting and its source")


def _checks(
    extra: Mapping[str, Any] | None, directories: Sequence[str], progress: Progress
) -> Iterator[Finding]:
    yield from installation()
    loaded = _load(extra)
    yield from settings(loaded)
    if isinstance(loaded, LoadedConfig):
        yield from memory(loaded.config)
        yield from disk(loaded.config.disk, directories)
    elif directories:
        yield from disk(DiskConfig(), directories)
    progress.show("importing the engine ...")
    yield from engine()


def _load(extra: Mapping[str, Any] | None) -> LoadedConfig | ConfigError:
    try:
        return load_config(extra=extra)
    except ConfigError as error:
        return error


def _print(finding: Finding) -> None:
    print(f"{finding.status:<4}  {finding.check}: {finding.says}", flush=True)
    if finding.remedy:
        print(f"      remedy: {finding.remedy}", flush=True)


def _summary(counts: Mapping[str, int]) -> dict[str, int]:
    return {status.lower(): counts[status] for status in ("OK", "WARN", "FAIL")}
