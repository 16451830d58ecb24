"""Memory that several processes share without a name in the file system.

A memfd rather than a file in /dev/shm: containers cap /dev/shm at 64 MB by default, and a memfd
goes away with its last user, also after a crash. Another process of the same user attaches by
process id and descriptor number, through /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from dataclasses import dataclass

from kvkeep.errors import PoolError

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap module
_POPULATE_PIECE_BYTES = 32 << 20  # short enough that closing does not wait for long


@dataclass(frozen=True, slots=True)
class SharedHandle:
    """What another process needs to attach; travels between processes as it is."""

    pid: int
    fd: int
    inode: int
    nbytes: int


_created: weakref.WeakValueDictionary[SharedHandle, SharedMemory] = weakref.WeakValueDictionary()


class SharedMemory:
    """One mapping of `nbytes`, zero-filled, page-aligned. Made by `create` or `attach`."""

    def __init__(self, fd: int, nbytes: int, pid: int, remote_fd: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, nbytes)
        self.nbytes = nbytes
        self.view = memoryview(self._map)
        self.handle = SharedHandle(pid, remote_fd, os.fstat(fd).st_ino, nbytes)

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """New memory, whose pages come with their first use. Raises `OSError`."""
        fd = os.memfd_create("kvkeep-pool", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            memory = cls(fd, nbytes, os.getpid(), fd)
        except BaseException:
            os.close(fd)
            raise
        _created[memory.handle] = memory
        return memory

    @classmethod
    def attach(cls, handle: SharedHandle) -> SharedMemory:
        """The memory of another (or this) process. Raises `PoolError` if it is not there.

        In the process that created it, that is the same object: a second mapping would cost its
        page tables and count its pages twice.
        """
        own = _created.get(handle) if handle.pid == os.getpid() else None
        if own is not None:
            if own.is_closed:
                raise PoolError("the pool of this process is closed")
            return own
        path = f"/proc/{handle.pid}/fd/{handle.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PoolError(
                f"cannot attach the pool of process {handle.pid} ({path}: {error.strerror}); "
                "engine processes must run as one user in one process namespace"
            ) from error
        try:
            status = os.fstat(fd)
            if status.st_ino != handle.inode or status.st_size != handle.nbytes:
                raise PoolError(f"{path} is not the pool it was: its process has ended")
            return cls(fd, handle.nbytes, handle.pid, handle.fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def address(self) -> int:
        """Where the mapping starts in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def is_closed(self) -> bool:
        return self._fd < 0

    def populate(self, offset: int, nbytes: int) -> bool:
        """Give pages to a range now, so that its first use does not fault; False if it can't.

        Runs without the GIL. The range is widened to whole pages.
        """
        if self.is_closed:
            return False
        start = offset - offset % mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        for at in range(start, offset + nbytes, _POPULATE_PIECE_BYTES):
            length = min(_POPULATE_PIECE_BYTES, offset + nbytes - at)
            result = libc.madvise(
                ctypes.c_void_p(self.address + at), ctypes.c_size_t(length), _MADV_POPULATE_WRITE
            )
            if result != 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
                return False
        return True

    def close(self) -> None:
        """Unmap. Views that are still in use keep their pages until they go."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
