"""The only threads: a bounded pool of them for each slow tier, loads before stores.

A tier is blocking; here its batches are queued, run, timed and, when it fails, cut off. Nothing
in this module waits for a tier on the caller's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from kvkeep.errors import TierError, TierUnavailable

logger = logging.getLogger(__name__)
T = TypeVar("T")


def in_background(name: str, job: Callable[[], object]) -> None:
    """Run `job` once on a thread of its own that ends with it, or with the process."""
    threading.Thread(target=job, name=name, daemon=True).start()


class Breaker:
    """Cuts off a tier that fails, and lets it try again by itself. Thread-safe.

    Closed: every batch goes through. After `threshold` failures in a row it opens: nothing goes
    through for a back-off that doubles up to `max_backoff_s`. Then one batch is let through; its
    success closes the breaker.
    """

    def __init__(
        self,
        name: str,
        *,
        threshold: int = 3,
        backoff_s: float = 1.0,
        max_backoff_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._threshold = threshold
        self._first_backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self.openings = 0
        """How often it has opened so far: what was queued before one is not worth trying after."""
        self._backoff_s = backoff_s
        self._retry_at: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """True while the tier is cut off, its probe included."""
        return self._retry_at is not None

    def allows(self) -> bool:
        """Whether a batch may go through now; a yes to an open breaker is the one probe."""
        if not self.is_open:
            return True
        with self._lock:
            if not self._ready():
                return False
            self._probing = self._retry_at is not None
            return True

    @property
    def is_ready(self) -> bool:
        """Whether `allows` would say yes; asks without taking the probe."""
        with self._lock:
            return self._ready()

    def _ready(self) -> bool:
        if self._retry_at is None:
            return True
        return not self._probing and self._clock() >= self._retry_at

    def succeeded(self) -> None:
        """A batch went well."""
        if self._failures == 0 and self._retry_at is None:
            return
        with self._lock:
            was_open = self._retry_at is not None
            self._failures = 0
            self._retry_at = None
            self._probing = False
            self._backoff_s = self._first_backoff_s
        if was_open:
            logger.info("%s tier works again", self._name)

    def failed(self, error: BaseException) -> None:
        """A batch failed. One that was under way when the breaker opened changes nothing."""
        with self._lock:
            self._failures += 1
            was_open, was_probe = self.is_open, self._probing
            self._probing = False
            if was_open and not was_probe:
                return
            if not was_open and self._failures < self._threshold:
                return
            wait_s = self._backoff_s
            self._retry_at = self._clock() + wait_s
            self._backoff_s = min(self._backoff_s * 2, self._max_backoff_s)
            self.openings += 1
        if not was_open:
            logger.warning(
                "%s tier is cut off after %d failures in a row; next try in %.0f s. Last: %s",
                self._name,
                self._failures,
                wait_s,
                error,
            )


class _Job(NamedTuple):
    future: Future[Any]
    work: Callable[[], Any]
    openings: int
    """The breaker's, when it was queued."""


class TransferQueue:
    """Runs one tier's jobs on a few threads of its own; loads go before stores. Thread-safe."""

    def __init__(
        self, name: str, breaker: Breaker, *, num_threads: int, max_store_bytes: int
    ) -> None:
        """`num_threads` run stores; loads have as many more, which stores never use, so that a
        load does not wait for a store to end, and one batch is checked while others are read.
        `max_store_bytes`: how much may wait to be stored; what comes on top is dropped.
        """
        self._name = name
        self._breaker = breaker
        self._num_threads = num_threads
        self._max_store_bytes = max_store_bytes
        # Two conditions on one lock: a job wakes one thread, and never who waits in `flush`.
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._flushed = threading.Condition(self._lock)
        self._loads: deque[_Job] = deque()
        self._stores: deque[tuple[_Job, int]] = deque()
        self._store_bytes = 0
        self._running_stores = 0
        self._threads: list[threading.Thread] = []
        self._closing = False

    @property
    def waiting_store_bytes(self) -> int:
        """Bytes queued or being stored now."""
        return self._store_bytes

    @property
    def num_threads(self) -> int:
        """How many loads can run at once."""
        return 2 * self._num_threads

    def open(self) -> None:
        """Start the threads."""
        for number in range(self.num_threads):
            thread = threading.Thread(
                target=self._run, name=f"kvkeep-{self._name}-{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def load(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` soon. The future fails with `TierUnavailable` while the tier is cut off."""
        future: Future[T] = Future()
        with self._condition:
            if self._closing:
                future.set_exception(TierUnavailable(f"{self._name} tier is closing"))
            elif not self._breaker.allows():
                future.set_exception(TierUnavailable(f"{self._name} tier is cut off"))
            else:
                self._loads.append(_Job(future, job, self._breaker.openings))
                self._condition.notify()
        return future

    def store(self, job: Callable[[], T], nbytes: int) -> Future[T] | None:
        """Run `job` when no load waits; None, at once, if that would queue too many bytes."""
        future: Future[T] = Future()
        with self._condition:
            if self._closing or self._store_bytes + nbytes > self._max_store_bytes:
                return None
            if not self._breaker.allows():
                return None
            self._store_bytes += nbytes
            self._stores.append((_Job(future, job, self._breaker.openings), nbytes))
            if self._may_store():
                self._condition.notify()
        return future

    def _finish(self, job: _Job) -> None:
        if job.openings != self._breaker.openings:
            job.future.set_exception(TierUnavailable(f"{self._name} tier is cut off"))
            return
        try:
            result = job.work()
        except TierError as error:
            self._breaker.failed(error)
            job.future.set_exception(error)
        except BaseException as error:
            # A fault of ours, or a panic of a library: it must not end the thread.
            logger.warning("%s tier: unexpected %r", self._name, error, exc_info=True)
            self._breaker.failed(error)
            job.future.set_exception(error)
        else:
            self._breaker.succeeded()
            job.future.set_result(result)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._loads and not self._may_store() and not self._closing:
                    self._condition.wait()
                store_bytes: int | None = None
                if self._loads:
                    job = self._loads.popleft()
                elif self._stores:
                    job, store_bytes = self._stores.popleft()
                    self._running_stores += 1
                else:
                    return
            self._finish(job)
            if store_bytes is not None:
                with self._condition:
                    self._store_bytes -= store_bytes
                    self._running_stores -= 1
                    # What waits to be stored next is taken by this thread, unless it takes a load.
                    if self._loads and self._may_store():
                        self._condition.notify()
                    if not self._stores and not self._running_stores:
                        self._flushed.notify_all()

    def _may_store(self) -> bool:
        return bool(self._stores) and self._running_stores < self._num_threads

    def flush(self, timeout_s: float) -> bool:
        """Wait until every queued store has run; False if that takes longer."""
        deadline = time.monotonic() + timeout_s
        with self._flushed:
            while self._stores or self._running_stores:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._flushed.wait(left_s)
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Store what is queued while there is time, drop the rest, end the threads."""
        flushed = self.flush(timeout_s)
        with self._condition:
            self._closing = True
            dropped = list(self._stores)
            self._stores.clear()
            self._store_bytes -= sum(nbytes for _, nbytes in dropped)
            self._condition.notify_all()
        if not flushed:
            logger.warning("%s tier: %d stores dropped at shutdown", self._name, len(dropped))
        for job, _ in dropped:
            job.future.set_exception(TierUnavailable(f"{self._name} tier is closing"))
        for thread in self._threads:
            thread.join(timeout_s)
        self._threads.clear()
