"""Is the file of one chunk what its name says: all that can be doubted without an engine."""

from __future__ import annotations

import errno
import mmap
import os
from dataclasses import dataclass

from kvkeep.codecs.frame import FrameHeader, frame_nbytes, read_header, verify
from kvkeep.errors import FrameError
from kvkeep.memory.pool import HEADER_BYTES
from kvkeep.tiers.disk_files import read_file
from kvkeep.types import ChunkKey

_ATTEMPTS = 3
"""How often a file may be replaced by another while it is read."""


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file with a chunk's name that is not this chunk."""

    path: str
    reason: str
    """One word: as `FrameError.reason`, or `unreadable`."""
    message: str
    inode: int
    """Which file it was that was looked at."""
    is_worthless: bool
    """True where nobody can make use of it; False where only we could not read it."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of one file."""

    nbytes: int
    """Its length where it was read whole, else 0."""
    bad: BadFile | None = None
    is_gone: bool = False
    """It went away meanwhile: an engine evicted it."""


class FrameChecker:
    """Checks one file after another with one buffer. Not thread-safe: one for each thread."""

    def __init__(self, *, direct: bool) -> None:
        """`direct`: read what is on the device and leave the page cache alone."""
        self._direct = direct
        self._buffer = mmap.mmap(-1, HEADER_BYTES)

    def check(self, path: str, key: ChunkKey) -> Checked:
        """Whether the file at `path` is the frame of `key`."""
        inode = nbytes = 0
        try:
            for _ in range(_ATTEMPTS):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    status = os.fstat(fd)
                    inode = status.st_ino
                    _check_header(fd, status.st_size, key)
                finally:
                    os.close(fd)
                frame = self._room_for(status.st_size)
                # The length is known to be right: only another file in its place has another.
                if read_file(path, frame, direct=self._direct, restamp=False):
                    nbytes = len(frame)
                    verify(frame)
                    return Checked(nbytes)
        except FileNotFoundError:
            pass
        except FrameError as error:
            return Checked(nbytes, BadFile(path, error.reason, str(error), inode, True))
        except OSError as error:
            message = f"cannot be read: {error.strerror or error}"
            lost = error.errno == errno.EIO
            return Checked(nbytes, BadFile(path, "unreadable", message, inode, lost))
        return Checked(0, is_gone=True)

    def _room_for(self, nbytes: int) -> memoryview:
        """The first `nbytes` of the buffer, which starts on a page, as O_DIRECT needs it."""
        if nbytes > len(self._buffer):
            self._buffer = mmap.mmap(-1, nbytes)
        return memoryview(self._buffer)[:nbytes]


def remove_if_same(bad: BadFile) -> bool:
    """Remove the file, unless another has taken its place; False where nothing was removed.

    An engine that found it bad too may have stored the chunk anew. Raises `OSError`.
    """
    try:
        if os.stat(bad.path).st_ino != bad.inode:
            return False
        os.unlink(bad.path)
    except FileNotFoundError:
        return False
    return True


def _check_header(fd: int, file_nbytes: int, key: ChunkKey) -> None:
    """Check what the first page tells, before the rest is read."""
    header = read_header(memoryview(os.pread(fd, HEADER_BYTES, 0)))
    _check_name(header, key)
    promised = frame_nbytes(header.payload_nbytes)
    if file_nbytes != promised:
        reason = "truncated" if file_nbytes < promised else "length"
        raise FrameError(reason, f"{file_nbytes} bytes long, where {promised} are right")


def _check_name(header: FrameHeader, key: ChunkKey) -> None:
    ending = header.namespace_digest[:8].hex()
    if not key.namespace.endswith(f"-{ending}"):
        raise FrameError("namespace", f"belongs to a namespace whose name ends in -{ending}")
    if header.digest != key.digest:
        raise FrameError("digest", f"holds chunk {header.digest.hex()}")
    if header.rank != key.rank:
        raise FrameError("rank", f"holds rank {header.rank}'s bytes")
