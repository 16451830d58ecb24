"""Whether a directory's file system takes O_DIRECT, found out without writing to it."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable

from kvkeep.tiers.disk_files import DIRECT_ALIGNMENT


def takes_direct_reads(paths: Iterable[str]) -> bool | None:
    """Read the first page of the first of `paths` that is there; None where none can be tried.

    The tier's own probe writes a file: right for the one whose directory it is, and not for a
    command that only looks.
    """
    with mmap.mmap(-1, DIRECT_ALIGNMENT) as page:
        for path in paths:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return False
                continue
            try:
                if os.preadv(fd, [page], 0) > 0:
                    return True
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return False
            finally:
                os.close(fd)
    return None
