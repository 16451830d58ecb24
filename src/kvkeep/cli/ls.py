"""`kvkeep ls`: what is kept, a line for each namespace, or for each chunk of one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from kvkeep.cli.command import (
    Exit,
    Parser,
    UsageError,
    add_directories,
    add_namespace,
    count_from_1,
    print_json,
)
from kvkeep.cli.kept import Kept, look
from kvkeep.cli.tables import one_line, short_age, short_size, table
from kvkeep.tiers.disk_layout import Found


@dataclass(frozen=True, slots=True)
class NamespaceLine:
    """One namespace over all directories that were named."""

    namespace: str
    label: str | None
    """The model's short name; None, as the next two, where no `namespace.json` says it."""
    chunk_tokens: int | None
    dtype: str | None
    ranks: list[int]
    chunks: int
    """Different chunks; each has a file for each rank."""
    files: int
    bytes: int
    oldest_use_unix_s: float | None
    """When the chunk that was longest not used was last used; None where there are no chunks."""
    newest_use_unix_s: float | None


class _Placed(NamedTuple):
    kept: Kept
    chunk: Found


def add_arguments(parser: Parser) -> None:
    """As `Command.add_arguments`."""
    add_directories(parser)
    add_namespace(parser, "list the chunks of this namespace, the last used first")
    parser.add_argument(
        "--limit", metavar="N", type=count_from_1, help="list at most N chunks of the namespace"
    )


def run(args: argparse.Namespace) -> Exit:
    """As `Command.run`."""
    if args.limit is not None and args.namespace is None:
        raise UsageError("--limit is for the chunks of one namespace: add --namespace NAME")
    kept = look(args.directories, args.namespace)
    if args.namespace is not None:
        _print_chunks(kept, args.namespace, args.limit, as_json=args.json)
    else:
        _print_namespaces(kept, as_json=args.json)
    return Exit.OK


def namespace_lines(kept: Sequence[Kept]) -> list[NamespaceLine]:
    """One for each namespace, by name."""
    names = sorted({name for one in kept for name in one.namespaces})
    chunks: dict[str, list[Found]] = {name: [] for name in names}
    for one in kept:
        for chunk in one.chunks:
            chunks[chunk.key.namespace].append(chunk)
    return [_line(name, chunks[name], _fields(kept, name)) for name in names]


def _fields(kept: Sequence[Kept], name: str) -> dict[str, str]:
    """What the first directory that has a description of `name` says."""
    for one in kept:
        if fields := one.namespaces.get(name):
            return fields
    return {}


def _line(name: str, chunks: Sequence[Found], fields: dict[str, str]) -> NamespaceLine:
    uses = [chunk.mtime_ns / 1e9 for chunk in chunks]
    tokens = fields.get("chunk_tokens", "")
    return NamespaceLine(
        namespace=name,
        label=fields.get("label"),
        chunk_tokens=int(tokens) if tokens.isdecimal() else None,
        dtype=_dtype(fields),
        ranks=sorted({chunk.key.rank for chunk in chunks}),
        chunks=len({chunk.key.digest for chunk in chunks}),
        files=len(chunks),
        bytes=sum(chunk.nbytes for chunk in chunks),
        oldest_use_unix_s=min(uses, default=None),
        newest_use_unix_s=max(uses, default=None),
    )


def _dtype(fields: dict[str, str]) -> str | None:
    """The KV cache's own, where it is not the model's."""
    kv_dtype = fields.get("kv_dtype", "auto")
    given = fields.get("dtype") if kv_dtype in ("", "auto") else kv_dtype
    return given and given.removeprefix("torch.")


def _print_namespaces(kept: Sequence[Kept], *, as_json: bool) -> None:
    lines = namespace_lines(kept)
    if as_json:
        print_json(
            {
                "directories": [one.root for one in kept],
                "namespaces": [asdict(line) for line in lines],
            }
        )
        return
    if not lines:
        print("nothing is kept here")
        return
    now_s = time.time()
    rows = [
        (
            one_line(line.label or "?"),
            line.namespace,
            str(len(line.ranks)),
            str(line.chunks),
            short_size(line.bytes),
            _ago(line.oldest_use_unix_s, now_s),
            _ago(line.newest_use_unix_s, now_s),
            str(line.chunk_tokens or "?"),
            one_line(line.dtype or "?"),
        )
        for line in lines
    ]
    headers = (
        *("MODEL", "NAMESPACE", "RANKS>", "CHUNKS>", "SIZE>"),
        *("OLDEST USE>", "NEWEST USE>", "CHUNK TOKENS>", "DTYPE"),
    )
    print(table(headers, rows))


def _print_chunks(
    kept: Sequence[Kept], namespace: str, limit: int | None, *, as_json: bool
) -> None:
    placed = [_Placed(one, chunk) for one in kept for chunk in one.chunks]
    placed.sort(key=lambda one: (-one.chunk.mtime_ns, one.chunk.key.digest, one.chunk.key.rank))
    shown = placed[:limit]
    now_s = time.time()
    if as_json:
        chunks = [_chunk_document(one, now_s) for one in shown]
        print_json({"namespace": namespace, "files": len(placed), "chunks": chunks})
        return
    rows = [
        (
            str(chunk.key.rank),
            chunk.key.digest.hex(),
            short_size(chunk.nbytes),
            _ago(chunk.mtime_ns / 1e9, now_s),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(chunk.mtime_ns / 1e9)),
        )
        for _, chunk in shown
    ]
    print(table(("RANK>", "DIGEST", "SIZE>", "AGE>", "LAST USE"), rows))
    if len(shown) < len(placed):
        print(f"and {len(placed) - len(shown)} more")


def _chunk_document(placed: _Placed, now_s: float) -> dict[str, object]:
    chunk = placed.chunk
    return {
        "rank": chunk.key.rank,
        "digest": chunk.key.digest.hex(),
        "bytes": chunk.nbytes,
        "age_s": round(max(0.0, now_s - chunk.mtime_ns / 1e9), 3),
        "last_use_unix_s": chunk.mtime_ns / 1e9,
        "path": placed.kept.path_of(chunk),
    }


def _ago(unix_s: float | None, now_s: float) -> str:
    return "-" if unix_s is None else f"{short_age(now_s - unix_s)} ago"
