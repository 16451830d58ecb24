"""Ways to damage a kept file. Each must be a miss, counted, and never a wrong token."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

from kvkeep.codecs.frame import read_header

_CHECKED_HEADER_BYTES = 136
"""Behind them the header is padding: nothing looks at it."""
_PAGE = 4096
_FUTURE = struct.Struct("<H")
_VERSION_AT = 8

Damage = Callable[[Path, Path, random.Random], None]
"""`damage(path, other, rng)`: `other` is another chunk's file, which is left as it is."""


def _write_at(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def _flip(path: Path, at: int, rng: random.Random) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def _payload_end(path: Path) -> int:
    """Where the payload ends; padding follows."""
    with path.open("rb") as file:
        return _PAGE + read_header(memoryview(file.read(_PAGE))).payload_nbytes


def bit_in_header(path: Path, other: Path, rng: random.Random) -> None:
    _flip(path, rng.randrange(_CHECKED_HEADER_BYTES), rng)


def bit_in_payload(path: Path, other: Path, rng: random.Random) -> None:
    _flip(path, rng.randrange(_PAGE, _payload_end(path)), rng)


def many_bits(path: Path, other: Path, rng: random.Random) -> None:
    end = _payload_end(path)
    for at in rng.sample(range(_PAGE, end), rng.randint(2, 50)):
        _flip(path, at, rng)


def truncated(path: Path, other: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def empty(path: Path, other: Path, rng: random.Random) -> None:
    os.truncate(path, 0)


def extended(path: Path, other: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.choice([1, 100, _PAGE, 3 * _PAGE])))


def page_of_zeros(path: Path, other: Path, rng: random.Random) -> None:
    """Of the payload, as a lost write leaves it."""
    pages = (_payload_end(path) - _PAGE) // _PAGE
    _write_at(path, _PAGE * rng.randint(1, pages), bytes(_PAGE))


def all_zeros(path: Path, other: Path, rng: random.Random) -> None:
    _write_at(path, 0, bytes(path.stat().st_size))


def garbage(path: Path, other: Path, rng: random.Random) -> None:
    _write_at(path, 0, rng.randbytes(path.stat().st_size))


def another_chunks(path: Path, other: Path, rng: random.Random) -> None:
    path.write_bytes(other.read_bytes())


def another_chunks_payload(path: Path, other: Path, rng: random.Random) -> None:
    _write_at(path, _PAGE, other.read_bytes()[_PAGE:])


def another_chunks_header(path: Path, other: Path, rng: random.Random) -> None:
    _write_at(path, 0, other.read_bytes()[:_PAGE])


def torn(path: Path, other: Path, rng: random.Random) -> None:
    """The first half as it was, the rest another chunk's: a write that ended half way."""
    middle = path.stat().st_size // 2 // _PAGE * _PAGE
    _write_at(path, middle, other.read_bytes()[middle:])


def future_format(path: Path, other: Path, rng: random.Random) -> None:
    _write_at(path, _VERSION_AT, _FUTURE.pack(rng.choice([0, 2, 3, 65535])))


KINDS: dict[str, Damage] = {
    function.__name__: function
    for function in (
        bit_in_header,
        bit_in_payload,
        many_bits,
        truncated,
        empty,
        extended,
        page_of_zeros,
        all_zeros,
        garbage,
        another_chunks,
        another_chunks_payload,
        another_chunks_header,
        torn,
        future_format,
    )
}
