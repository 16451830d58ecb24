"""Who else is working in a directory of the disk tier.

Whose a temp file is cannot be told by process id (containers have their own) nor by age alone (a
slow disk). So each open tier has a random token and holds an flock on `.kvkeep/<token>.lock` from
before its first temp file to after its last, and the kernel lets go of it however the process ends:
a temp file is dead when nobody holds its token's lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Sequence

from kvkeep.tiers.disk_layout import OWN_DIRECTORY, Temp, entries_of

_LOCK_SUFFIX = ".lock"

_STALE_S = 3600.0
"""Where the file system has no flock: a temp file this old is dead. An hour is 100 times what the
largest chunk takes on the slowest disk worth having."""

_NO_FLOCK = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})


class Presence:
    """An open tier's token and locks; `enter` before the first temp file, `leave` after the last.

    One for each open tier, also where a process has several on one directory.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self.token = secrets.token_hex(8)
        self.locks_work = True
        """False once a directory turned out to have no flock: then any other may be alive."""
        self._roots = roots
        self._held: list[int] = []

    def enter(self) -> None:
        """Take the lock in each directory. Raises `OSError`."""
        for root in self._roots:
            os.makedirs(f"{root}/{OWN_DIRECTORY}", exist_ok=True)
            self._held.append(self._lock(self._lock_path(root, self.token)))

    def leave(self) -> None:
        """Let go of the locks; safe to call twice."""
        for root, fd in zip(self._roots, self._held, strict=False):
            with contextlib.suppress(OSError):
                os.unlink(self._lock_path(root, self.token))
            os.close(fd)
        self._held.clear()

    def others(self) -> set[str]:
        """Tokens of other tiers that are open on any of these directories, or, where there is no
        flock, may be. Signs of dead ones are removed.
        """
        tokens: set[str] = set()
        for root in self._roots:
            for entry in entries_of(f"{root}/{OWN_DIRECTORY}"):
                token, suffix = os.path.splitext(entry.name)
                if suffix == _LOCK_SUFFIX and token != self.token and self._is_live(entry.path):
                    tokens.add(token)
        return tokens

    def sweep(self, temps: Sequence[Temp]) -> int:
        """Remove those of `temps` that nobody is writing; how many that were.

        `temps` must have been seen before this call: only then does a token without a lock mean
        that its tier has ended, and not that it was about to begin.
        """
        if not temps:
            return 0
        live = self.others() | {self.token}
        swept = 0
        for temp in temps:
            with contextlib.suppress(FileNotFoundError):
                stale = time.time() - os.stat(temp.path).st_mtime > _STALE_S
                if stale if not self.locks_work else temp.token not in live:
                    os.unlink(temp.path)
                    swept += 1
        return swept

    def _lock(self, path: str) -> int:
        """An open, locked file at `path`."""
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                # Another's `others` may have come in between and removed a sign that looked dead.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(path), os.fstat(fd)):
                        return fd
            except OSError as error:
                if error.errno in _NO_FLOCK:
                    self.locks_work = False
                    return fd
                os.close(fd)
                raise
            os.close(fd)

    def _is_live(self, path: str) -> bool:
        if not self.locks_work:
            return True
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            return error.errno != errno.ENOENT
        try:
            # Shared, so that two that ask at once do not take each other for the owner.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.unlink(path)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        else:
            return False
        finally:
            os.close(fd)

    @staticmethod
    def _lock_path(root: str, token: str) -> str:
        return f"{root}/{OWN_DIRECTORY}/{token}{_LOCK_SUFFIX}"
