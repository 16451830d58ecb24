"""How a terminal shows things: columns, and numbers short enough for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_SIZE_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_AGE_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines with aligned columns. A header that ends in `>` has its column to the right."""
    to_right = [header.endswith(">") for header in headers]
    lines = [[header.removesuffix(">") for header in headers], *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = (
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, to_right, strict=True)
        )
        for line in lines
    )
    return "\n".join(line.rstrip() for line in shown)


def short_size(nbytes: int) -> str:
    """`nbytes` in three digits: `512 B`, `1.50 MiB`."""
    if nbytes < 1000:
        return f"{nbytes} B"
    value, power = float(nbytes), 0
    while value >= 999.5 and power < len(_SIZE_UNITS):
        value /= 1024
        power += 1
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {_SIZE_UNITS[power - 1]}"


def short_age(seconds: float) -> str:
    """A time span in its largest unit, whole: `3d`, `5h`, `12m`, `40s`."""
    whole = max(0, int(seconds))
    for name, unit_s in _AGE_UNITS:
        if whole >= unit_s:
            return f"{whole // unit_s}{name}"
    return "0s"


def one_line(text: str) -> str:
    """`text`, quoted where a terminal would not show it as it is: a file's name may be anything."""
    return text if text.isprintable() else repr(text)


class Progress:
    """One line on stderr that is written over; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._shows:
            try:
                width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
            except OSError:
                width = 79
            sys.stderr.write(f"\r\x1b[K{text[:width]}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Take the line away."""
        self.show("")
