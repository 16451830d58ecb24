"""What moves chunks between an engine's pages and the pool's slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from kvkeep.errors import PoolError

NO_SLOT = -1
"""In place of a slot whose bytes are lost: copying it is an error."""


class CopyRun(NamedTuple):
    """Chunks that follow one another in a request; the first may be there only in part.

    One run for many chunks, since plans are made on the scheduler's path and sent to workers.
    """

    slots: tuple[int, ...]
    """One a chunk."""
    first_block: int
    """Which of the first chunk's blocks the first of `block_ids` is."""
    block_ids: tuple[int, ...]
    """The engine's blocks, in the order of their tokens, over all chunks."""
    group: int = 0
    """Which of the model's KV groups."""

    def chunks(self, blocks_per_chunk: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """(slot, first block within the chunk, block ids) for each chunk. Raises `PoolError`
        where slots and blocks do not match, or a slot is lost.
        """
        at, first = 0, self.first_block
        for slot in self.slots:
            part = self.block_ids[at : at + blocks_per_chunk - first]
            if slot == NO_SLOT or not part:
                raise PoolError(f"slot {slot} is lost, or has no blocks")
            yield slot, first, part
            at, first = at + len(part), 0
        if at != len(self.block_ids):
            raise PoolError(f"{len(self.block_ids) - at} blocks have no slot")


def lost_run(block_ids: Sequence[Sequence[int]]) -> CopyRun:
    """A copy that fails: for a load that was promised and can't be made.

    `block_ids`: the request's block table of each KV group.
    """
    return CopyRun((NO_SLOT,), 0, tuple(block_ids[0]))


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
