"""What the tests of the disk tier share."""

import contextlib
import os
from pathlib import Path

from kvkeep.testing.tiers import NAMESPACE, aligned, key_of, value_of
from kvkeep.tiers.disk import DiskTier

MIB = 1 << 20
PAGE = 4096
OPENED = []


def files_below(where):
    return sorted(path for path in Path(where).rglob("*.kv") if path.is_file())


def put_file(root, key, value):
    path = path_of(root, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(value)
    return path


def path_of(root, key):
    digest = key.digest.hex()
    return Path(root) / key.namespace / f"r{key.rank}" / digest[:2] / f"{digest}.kv"


def opened(where, size_bytes=64 * MIB, **settings):
    tier = DiskTier([where], size_bytes, **settings)
    OPENED.append(tier)
    tier.open()
    return tier


def store(tier, *numbers, nbytes=PAGE):
    for number in numbers:
        tier.store([key_of(number)], [aligned(value_of(number, nbytes))])


def kept(tier, numbers):
    numbers = list(numbers)
    answers = tier.contains([key_of(number) for number in numbers])
    return [number for number, answer in zip(numbers, answers, strict=True) if answer]


def disk_usage(root):
    """Of the files of chunks, half written ones included."""
    total = 0
    for directory, _, names in os.walk(Path(root) / NAMESPACE):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += -(-os.stat(f"{directory}/{name}").st_size // PAGE) * PAGE
    return total
