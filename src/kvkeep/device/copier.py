"""What moves chunks between an engine's pages and the pool's slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

NO_SLOT = -1
"""A run whose bytes are lost: copying it is an error."""


class CopyRun(NamedTuple):
    """One chunk, or its part from some block on."""

    slot: int
    first_block: int
    """Which of the chunk's blocks the first of `block_ids` is."""
    block_ids: tuple[int, ...]
    """The engine's blocks, in the order of their tokens."""


class CopyEvent(Protocol):
    """A copy that was started."""

    def done(self) -> bool:
        """Whether it has ended. Never waits."""
        ...

    def wait(self) -> None:
        """Return when it has ended. Raises what went wrong."""
        ...


class PageCopier(Protocol):
    """Copies whole blocks, all layers. Blocks and slots must stay as they are until it ended."""

    def gather(self, runs: Sequence[CopyRun]) -> CopyEvent:
        """Engine pages -> slots; ordered after all that the engine has computed so far."""
        ...

    def scatter(self, runs: Sequence[CopyRun]) -> CopyEvent:
        """Slots -> engine pages; what the engine computes next must wait for the event."""
        ...


class Ended:
    """The event of a copy that was made at once."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return
