"""What the cache counts. Plain numbers here; an adapter turns them into Prometheus metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


@dataclass(slots=True)
class TransferEvent:
    """One batch on its way; whoever moves it sets `nbytes`."""

    nbytes: int = 0


@dataclass(slots=True)
class TierCounters:
    """Counters of one tier since it was opened. Thread-safe through `add` and the timers."""

    hit_tokens: int = 0
    """Prompt tokens whose KV this tier gave."""
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    dropped: int = 0
    """Chunks not stored because the queue or the tier was full."""
    corrupt: int = 0
    """Frames that did not fit: deleted and taken for misses."""
    failures: int = 0
    """Batches that failed."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount` to the counter called `name`."""
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)

    @contextmanager
    def timing(self, what: Literal["load", "store"]) -> Generator[TransferEvent, None, None]:
        """Count a batch: its bytes, its seconds, its failure."""
        started = time.perf_counter()
        event = TransferEvent()
        try:
            yield event
        except BaseException:
            self.add("failures")
            raise
        finally:
            self.add("loaded_bytes" if what == "load" else "stored_bytes", event.nbytes)
            self.add(f"{what}_seconds", time.perf_counter() - started)


class TierUsage(NamedTuple):
    """How full a tier is now."""

    used_bytes: int
    cap_bytes: int
    is_cut_off: bool


@dataclass(slots=True)
class CacheCounters:
    """Counters of the cache as a whole."""

    requested_tokens: int = 0
    """Prompt tokens that were asked for beyond what the engine had itself."""
    missed_tokens: int = 0
    """Those of them that no tier had."""
    stored_chunks: int = 0
    dropped_chunks: int = 0
    """Chunks not kept because no slot could be freed."""
    memory: TierCounters = field(default_factory=TierCounters)
