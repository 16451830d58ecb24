"""What a subcommand is, and what all of them share: its parser, its errors, its JSON."""

from __future__ import annotations

import argparse
import json
from enum import IntEnum
from typing import Any, NoReturn, Protocol


class Exit(IntEnum):
    """What a command's exit status tells a script."""

    OK = 0
    WRONG = 1
    """It found something wrong."""
    USAGE = 2
    """It was not asked in a way that can be answered."""


class UsageError(Exception):
    """The command line cannot be carried out; the message is one line for a person."""


class Command(Protocol):
    """A module of this package that is a subcommand."""

    def add_arguments(self, parser: Parser) -> None:
        """Say which arguments there are besides `--json`."""
        ...

    def run(self, args: argparse.Namespace) -> Exit:
        """Do it, print to stdout. Raises `UsageError`, `KVKeepError`, `OSError`."""
        ...


class Parser(argparse.ArgumentParser):
    """As argparse's, but a mistake is told in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(Exit.USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_directories(parser: Parser) -> None:
    """The positional argument of the commands that look at kept data."""
    parser.add_argument(
        "directories",
        metavar="DIR",
        nargs="+",
        help="a directory of the disk tier, as in disk.paths",
    )


def add_namespace(parser: Parser, help_text: str) -> None:
    """`--namespace NAME`."""
    parser.add_argument("--namespace", metavar="NAME", help=help_text)


def count_from_1(text: str) -> int:
    """The type of an argument that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def print_json(document: dict[str, Any]) -> None:
    """The one thing that a command with `--json` writes to stdout."""
    print(json.dumps(document, indent=2))
