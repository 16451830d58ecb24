"""`kvkeep config`: the settings in effect, as the engine would read them here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any, cast

from kvkeep.cli.command import Exit, Parser, UsageError, print_json
from kvkeep.cli.tables import table
from kvkeep.config import load_config


def add_arguments(parser: Parser) -> None:
    """As `Command.add_arguments`."""
    add_extra(parser)
    parser.add_argument(
        "--file", metavar="FILE", help="the YAML file, instead of what KVKEEP_CONFIG_FILE names"
    )


def add_extra(parser: Parser) -> None:
    """`--extra JSON`."""
    parser.add_argument(
        "--extra",
        metavar="JSON",
        type=parse_extra,
        help="what the engine is given as kv_connector_extra_config, or the whole of "
        "--kv-transfer-config",
    )


def parse_extra(text: str) -> Mapping[str, Any]:
    """The type of `--extra`. The engine's whole setting is taken for the part that is ours."""
    try:
        given: object = json.loads(text)
    except (ValueError, RecursionError):
        raise argparse.ArgumentTypeError("is not right JSON") from None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError("is not a JSON object")
    mapping = cast("dict[str, Any]", given)
    if "kv_connector" not in mapping:
        return mapping
    inner: object = mapping.get("kv_connector_extra_config") or {}
    if not isinstance(inner, dict):
        raise argparse.ArgumentTypeError("kv_connector_extra_config is not a JSON object")
    return cast("dict[str, Any]", inner)


def run(args: argparse.Namespace) -> Exit:
    """As `Command.run`. Wrong settings are a `ConfigError`."""
    if args.file is not None and not args.file.strip():
        raise UsageError("--file needs a file's name")
    loaded = load_config(extra=args.extra, file=args.file)
    values = loaded.config.describe()
    if args.json:
        print_json(
            {
                "settings": {
                    name: {"value": value, "source": loaded.sources[name]}
                    for name, value in values.items()
                },
                "notes": list(loaded.notes),
                "warnings": list(loaded.warnings),
            }
        )
        return Exit.OK
    rows = [(name, value, loaded.sources[name]) for name, value in values.items()]
    print(table(("SETTING", "VALUE", "FROM"), rows))
    for note in loaded.notes:
        print(f"note: {note}")
    for warning in loaded.warnings:
        print(f"warning: {warning}")
    return Exit.OK
