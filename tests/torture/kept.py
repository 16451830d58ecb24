"""What lies in a folder, and what `kvkeep verify` says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def chunk_files(folder: str) -> list[Path]:
    """Every kept chunk's file."""
    return sorted(path for path in Path(folder).rglob("*.kv") if path.is_file())


def temporaries(folder: str) -> int:
    """How many files are half written, or were when their writer was killed."""
    return sum(1 for path in Path(folder).rglob("*.tmp"))


def used_bytes(folder: str) -> int:
    """Bytes of the chunks' files, by what the file system gave them."""
    return sum(path.stat().st_blocks * 512 for path in chunk_files(folder))


def verify(folder: str) -> dict[str, Any]:
    """`kvkeep verify --json`, as a user runs it."""
    ran = subprocess.run(
        [Path(sys.executable).with_name("kvkeep"), "verify", folder, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        return json.loads(ran.stdout)
    except ValueError:
        raise AssertionError(f"kvkeep verify said {ran.stdout!r} {ran.stderr!r}") from None


def problems(folder: str, cap_bytes: int) -> Iterator[str]:
    """What is wrong in the folder after an engine was killed: nothing may be."""
    bad = verify(folder)["bad"]
    if bad:
        yield f"{len(bad)} bad files, the first: {bad[0]}"
    used = used_bytes(folder)
    if used > cap_bytes:
        yield f"{used} bytes where {cap_bytes} are allowed"
