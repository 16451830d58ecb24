"""One file whole, or an `OSError`: what the disk tier does to single files.

Nothing here knows keys, room or eviction. A direct transfer (O_DIRECT) goes between the disk and
the caller's buffer without the page cache. Whether a buffer is aligned well enough is the kernel's
to say, not ours: it answers EINVAL before it moves a byte, and the rest of that one file then goes
through the page cache.

No file is fsynced. What a power cut may tear is found at the next load by the frame's checksum
(and, where the length is wrong, by us), so a chunk can be lost by it but never be wrong; an fsync
for each chunk would cost more than the chunk is worth.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Generator, Sequence

from kvkeep.errors import TierError, TierFull, TierUnavailable

DIRECT_ALIGNMENT = 4096
"""Bytes. Lengths that are a multiple of this may go direct; every common device accepts it."""

FILE_MODE = 0o600
"""Only the owner reads: KV tensors tell the prompts they were computed from."""

_READ = os.O_RDONLY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_UNUSABLE = frozenset(
    {
        errno.EACCES,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENODEV,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENXIO,
        errno.EPERM,
        errno.EROFS,
        errno.ESTALE,
    }
)

_Transfer = Callable[[int, Sequence[memoryview], int], int]


def is_no_room(error: OSError) -> bool:
    """True where the file system, not the caller, ran out of room (or of quota)."""
    return error.errno in _NO_ROOM


@contextlib.contextmanager
def mapped(doing: str, what: str) -> Generator[None]:
    """Inside, an `OSError` becomes the `TierError` that says what could not be done to `what`."""
    try:
        yield
    except OSError as error:
        raise tier_error(error, doing, error.filename or what) from error


def tier_error(error: OSError, doing: str, path: str) -> TierError:
    """The one place where an `OSError` becomes kvkeep's; to be raised `from error`."""
    message = f"{doing} {path}: {error.strerror or error}"
    if error.errno in _NO_ROOM:
        return TierFull(message)
    if error.errno in _UNUSABLE:
        return TierUnavailable(message)
    return TierError(message)


def read_file(path: str, into: memoryview, *, direct: bool, restamp: bool) -> bool:
    """Fill `into` with the file at `path`; False, and nothing is promised of `into`, where the
    file is not exactly `len(into)` bytes long.

    `direct` asks for O_DIRECT, `restamp` sets the file's time of change to now. Raises `OSError`;
    one with EIO where the file ends before the length it said it has.
    """
    fd = os.open(path, _READ | _direct_flag(into, direct))
    try:
        # The cheapest exact question for the size: 0.3 us where fstat and its result take 1.2 us.
        if os.lseek(fd, 0, os.SEEK_END) != into.nbytes:
            return False
        _move(os.preadv, fd, into, path)
        if restamp:
            with contextlib.suppress(OSError):  # a hint for the next start, not worth a miss
                os.utime(fd)
    finally:
        os.close(fd)
    return True


def write_file(temp: str, path: str, value: memoryview, *, direct: bool) -> None:
    """Write `value` to the new file `temp`, then rename it to `path`, which is seen only whole.

    Their directories must exist, on one file system. Raises `OSError`, and then `temp` is gone.
    """
    fd = os.open(temp, _CREATE | _direct_flag(value, direct), FILE_MODE)
    try:
        try:
            _move(os.pwritev, fd, value, temp)
        finally:
            os.close(fd)
        os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise


def size_of(path: str) -> int | None:
    """The file's length in bytes, or None where there is none."""
    # The common answer is "none"; an exception for it would cost five times as much.
    if not os.access(path, os.F_OK):
        return None
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def why_not_direct(path: str) -> str | None:
    """None where a new file `path` can be written and read with O_DIRECT, else the reason.

    It is tried, with one page in a file that is removed again: file systems differ, and some
    accept the flag and refuse the transfer. Raises `OSError` where not even a plain file can be
    made.
    """
    os.close(os.open(path, _CREATE, FILE_MODE))
    try:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        finally:
            os.unlink(path)
        try:
            return _try_page(fd)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror or str(error)


def _try_page(fd: int) -> str | None:
    size = DIRECT_ALIGNMENT
    with mmap.mmap(-1, size) as sent, mmap.mmap(-1, size) as back:
        sent.write(os.urandom(size))
        wrote = os.pwritev(fd, [sent], 0)
        read = os.preadv(fd, [back], 0)
        if wrote == read == size and sent[:] == back[:]:
            return None
        return f"wrote {wrote} and read {read} of {size} bytes, or others"


def _direct_flag(view: memoryview, direct: bool) -> int:
    return os.O_DIRECT if direct and view.nbytes % DIRECT_ALIGNMENT == 0 else 0


def _move(call: _Transfer, fd: int, view: memoryview, path: str) -> None:
    """All of `view` by `call`, from the file's start; a count that is too small is an `OSError`."""
    done = 0
    while done < view.nbytes:
        try:
            count = call(fd, [view[done:] if done else view], done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _stop_direct(fd):
                raise
            continue
        if count <= 0:
            raise OSError(errno.EIO, f"ended after {done} of {view.nbytes} bytes", path)
        done += count


def _stop_direct(fd: int) -> bool:
    """Turn O_DIRECT off for `fd`; False where it was off."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True
