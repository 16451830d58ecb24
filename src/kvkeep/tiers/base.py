"""What a tier is: a place that keeps bytes by key.

A tier knows neither tensors nor codecs nor threads. It is blocking, batched and thread-safe; the
caller (`kvkeep.transfer`) owns concurrency, deadlines and the breaker. Every tier passes
`kvkeep.testing.tiers.TierTests`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvkeep.types import ChunkKey


@runtime_checkable
class Tier(Protocol):
    """Blocking, batched, thread-safe. An empty batch is always safe and does nothing.

    A miss is a value (`None`, `False`), never an exception. `TierError` means that the whole
    batch failed and nothing may be assumed of any of its keys.
    """

    name: str
    """Short and stable: the label in logs and metrics, such as "disk"."""

    answers_at_once: bool
    """True where `contains` is a look-up in this process's memory: it may be asked on the
    engine's scheduling path. False where it costs a round trip."""

    def open(self) -> None:
        """Start: read what is there, connect. Called once, first. Raises `TierError`."""
        ...

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of `keys` are kept. Changes nothing, not even the order of eviction."""
        ...

    def load(self, keys: Sequence[ChunkKey], into: Sequence[memoryview]) -> list[int | None]:
        """Fill `into[i]` with the bytes of `keys[i]`; bytes written, or None on a miss.

        `into[i]`: writable, C-contiguous, `format == "B"`, owned by the caller until the call
        returns. A value longer than its buffer is a miss. After a miss the buffer's content is
        undefined. A short read is an error of the tier, never a short value.
        """
        ...

    def store(self, keys: Sequence[ChunkKey], values: Sequence[memoryview]) -> None:
        """Keep `values[i]` (`format == "B"`, C-contiguous, read-only use) under `keys[i]`.

        Each key becomes visible only when it is whole; a key that is there already is replaced
        or left, both are right, since a key names its content. Returns when the bytes are no
        longer needed.
        """
        ...

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Forget `keys`; those that are not there are skipped."""
        ...

    def close(self) -> None:
        """End; safe to call twice. What is kept stays kept, where the tier outlives the process."""
        ...


class Occupancy(NamedTuple):
    """How full a tier is."""

    used_bytes: int
    cap_bytes: int


@runtime_checkable
class BoundedTier(Tier, Protocol):
    """A tier whose cap in bytes we keep ourselves."""

    def occupancy(self) -> Occupancy:
        """How full it is now; cheap enough to be asked at every step."""
        ...
