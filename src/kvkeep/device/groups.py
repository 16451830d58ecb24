"""Several KV groups in one chunk: which blocks of each are kept, and which a hit must bring.

An engine gives each KV group of a model a block table of its own. A group of full attention needs
every block of a prefix. A group with a sliding window of W tokens needs only the last W tokens
before the position where computing goes on, and the engine takes blocks before them away while a
request still runs. So a chunk keeps, of such a group, its last blocks that cover W tokens: enough
to go on at the chunk's end, and always still there when the chunk's last token is computed.

In a slot the groups lie one after another: `[kept blocks of group 0][kept blocks of group 1]...`,
each block-major as `kvkeep.device.layout` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvkeep.device.copier import CopyEvent, CopyRun, PageCopier
from kvkeep.errors import PoolError

NULL_BLOCK = 0
"""In a block table where the engine took a block away; no request is ever given this one."""


class GroupPart(NamedTuple):
    """One KV group's part of a chunk: the last `kept` of its `blocks` blocks."""

    block_tokens: int
    blocks: int
    kept: int
    window: int | None
    """How many tokens a token can see, itself included; None for all."""

    @classmethod
    def of(cls, chunk_tokens: int, block_tokens: int, window: int | None) -> GroupPart:
        """`chunk_tokens` must be a multiple of `block_tokens`."""
        blocks = chunk_tokens // block_tokens
        kept = blocks if window is None else min(blocks, -(-window // block_tokens))
        return cls(block_tokens, blocks, kept, window)

    def needed(self, start: int, stop: int) -> range:
        """The blocks to bring so that computing can go on at token `stop`, where the engine has
        all it needs to go on at token `start`.
        """
        first = start if self.window is None else max(start, stop - self.window + 1)
        return range(first // self.block_tokens, -(-stop // self.block_tokens))

    def taken_away(self, block_ids: Sequence[int], num_computed: int) -> int:
        """How many leading blocks may be gone from the engine, with `num_computed` tokens computed
        before this step.

        An upper bound: an engine takes blocks away no sooner than it may.
        """
        if self.window is None:
            return 0
        gone = max(0, num_computed - self.window + 1) // self.block_tokens
        for number in range(len(block_ids) - 1, gone - 1, -1):
            if block_ids[number] == NULL_BLOCK:
                return number + 1
        return gone

    def first_whole(self, gone: int) -> int:
        """The first chunk none of whose kept blocks is among the first `gone` blocks."""
        return -(-(gone + self.kept) // self.blocks) - 1 if gone > 0 else 0

    def of_chunks(self, block_ids: Sequence[int], first: int, stop: int) -> tuple[int, ...]:
        """The kept blocks of chunks `[first, stop)`, from a request's block table."""
        if self.kept == self.blocks:
            return tuple(block_ids[first * self.blocks : stop * self.blocks])
        ids: list[int] = []
        for chunk in range(first, stop):
            end = (chunk + 1) * self.blocks
            ids += block_ids[end - self.kept : end]
        return tuple(ids)

    def load_run(
        self,
        group: int,
        slots: Sequence[int],
        first_chunk: int,
        block_ids: Sequence[int],
        start: int,
        stop: int,
    ) -> CopyRun | None:
        """The copy that brings this group's part of tokens `[start, stop)`, None for nothing.

        `slots[i]` holds chunk `first_chunk + i`. Raises `PoolError` where a block that is needed
        is not kept or has no place to go.
        """
        needed = self.needed(start, stop)
        if not needed:
            return None
        first = needed.start // self.blocks
        last = (needed.stop - 1) // self.blocks
        skipped = self.blocks - self.kept
        if (needed.start % self.blocks) < skipped or (first != last and skipped):
            raise PoolError(f"group {group}: block {needed.start} is needed but not kept")
        ids = tuple(block_ids[needed.start : needed.stop])
        if len(ids) != len(needed) or (self.window is not None and NULL_BLOCK in ids):
            raise PoolError(f"group {group}: a block that is to be loaded has no place")
        held = tuple(slots[first - first_chunk : last + 1 - first_chunk])
        return CopyRun(held, needed.start % self.blocks - skipped, ids, group)


class GroupedCopier:
    """One copier for each KV group, taken for one. Runs go to the group they name."""

    def __init__(self, copiers: Sequence[PageCopier | None]) -> None:
        """None for a group that has no layers on this rank: there is nothing to copy."""
        self._copiers = tuple(copiers)

    def gather(self, runs: Sequence[CopyRun]) -> CopyEvent:
        return _Events([copier.gather(part) for copier, part in self._split(runs)])

    def scatter(self, runs: Sequence[CopyRun]) -> CopyEvent:
        return _Events([copier.scatter(part) for copier, part in self._split(runs)])

    def _split(self, runs: Sequence[CopyRun]) -> list[tuple[PageCopier, list[CopyRun]]]:
        parts: list[tuple[PageCopier, list[CopyRun]]] = []
        for number, copier in enumerate(self._copiers):
            part = [run for run in runs if run.group == number]
            if part and copier is not None:
                parts.append((copier, part))
        if any(run.group >= len(self._copiers) for run in runs):
            raise PoolError(f"a copy of a KV group beyond the {len(self._copiers)} there are")
        return parts


class _Events:
    """Several copies as one."""

    def __init__(self, events: Sequence[CopyEvent]) -> None:
        self._events = events

    def done(self) -> bool:
        return all(event.done() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.wait()
