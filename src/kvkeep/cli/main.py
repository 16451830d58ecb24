"""The command `kvkeep`: finds the subcommand and turns what goes wrong into one line.

Only the subcommand that was asked for is imported, so that none pays for another's imports.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import cast

from kvkeep import __version__
from kvkeep.cli.command import Command, Exit, Parser, UsageError
from kvkeep.errors import KVKeepError

_SUMMARIES = {
    "ls": "what is kept on disk: the namespaces, or the chunks of one",
    "stat": "how much is kept on disk, and how much room there is",
    "verify": "read all that is kept on disk and check that it is whole and right",
    "clear": "delete what is kept on disk, all of it or what was not used for long",
    "config": "the settings in effect and where each comes from",
    "doctor": "check the installation, the machine and the directories",
}

_INTERRUPTED = 130
"""What a shell reports for a program that Ctrl-C ended."""
_PIPE_CLOSED = 141
"""The same where the reader of the output has gone, as in `kvkeep ls DIR | head`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own; the exit status.

    `SystemExit` for `--help`, `--version` and a line that cannot be parsed.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        prog="kvkeep",
        description="Look at and look after what kvkeep keeps.",
        epilog="Exit status: 0 all is well, 1 something is wrong, 2 the command line is.",
    )
    parser.add_argument("--version", action="version", version=f"kvkeep {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command")
    asked = next((word for word in words if not word.startswith("-")), None)
    command: Command | None = None
    for name, summary in _SUMMARIES.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        subparser = subparsers.add_parser(name, help=summary, description=description)
        if name == asked:
            command = cast("Command", importlib.import_module(f"kvkeep.cli.{name}"))
            command.add_arguments(subparser)
            subparser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(words)
    if command is None:
        parser.error(f"say which command: {', '.join(_SUMMARIES)}")
    return _outcome(command, args)


def _outcome(command: Command, args: argparse.Namespace) -> int:
    try:
        status = command.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left to be flushed at the end of the process would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except UsageError as error:
        return _failed(args.command, str(error), Exit.USAGE)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _failed(args.command, f"{where}{error.strerror or error}", Exit.WRONG)
    except KVKeepError as error:
        return _failed(args.command, str(error), Exit.WRONG)
    return status


def _failed(command: str, message: str, status: Exit) -> Exit:
    print(f"kvkeep {command}: {' '.join(message.split())}", file=sys.stderr)
    return status
