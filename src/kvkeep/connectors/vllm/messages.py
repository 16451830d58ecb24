"""What scheduler side and workers tell each other: slot and block numbers, never bytes or keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvkeep.device.copier import CopyRun
from kvkeep.memory.shared import SharedHandle


class GroupReport(NamedTuple):
    """One KV group on one worker."""

    block_tokens: int
    block_nbytes: int
    """Bytes of one block over the worker's layers of this group; 0 where it has none."""
    window: int | None
    fingerprint: str


@dataclass(slots=True)
class LayoutReport(KVConnectorHandshakeMetadata):
    """A worker's KV cache, told once when the engine starts."""

    groups: tuple[GroupReport, ...] = ()
    backends: str = ""
    """Attention backends: the same shape can mean other bytes under another backend."""
    device: str = ""
    error: str = ""
    """Why this worker can't take part; empty where it can."""

    @property
    def fingerprint(self) -> str:
        """Equal where a chunk's bytes mean the same."""
        return ",".join(
            group.fingerprint if group.window is None else f"{group.fingerprint}w{group.window}"
            for group in self.groups
        )


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Where the pool is, for a worker to attach to."""

    handle: SharedHandle
    num_slots: int
    slot_bytes: tuple[int, ...]
    """One entry a rank."""
    kept_blocks: tuple[int, ...]
    """One entry a KV group: how many of its blocks lie in a chunk."""


@dataclass(frozen=True, slots=True)
class LoadOp:
    """Slots -> the blocks of a request that waits for them."""

    request_id: str
    runs: tuple[CopyRun, ...]


@dataclass(frozen=True, slots=True)
class StoreOp:
    """Blocks that this step completes -> slots."""

    number: int
    runs: tuple[CopyRun, ...]


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """What the workers do in one step."""

    pool: PoolPlace | None = None
    loads: list[LoadOp] = field(default_factory=list[LoadOp])
    stores: list[StoreOp] = field(default_factory=list[StoreOp])


@dataclass(slots=True)
class Outcome:
    """How often an operation ended well and badly, over all ranks, and its longest time."""

    ended: int = 0
    failed: int = 0
    seconds: float = 0.0

    def plus(self, other: Outcome) -> Outcome:
        """Both together."""
        return Outcome(
            self.ended + other.ended, self.failed + other.failed, max(self.seconds, other.seconds)
        )


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):
    """What the workers did since their last report."""

    loads: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    """By request id."""
    stores: dict[int, Outcome] = field(default_factory=dict[int, Outcome])
    """By operation number."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Merge another rank's report of the same step."""
        if not isinstance(other, StepReport):
            raise TypeError(f"expected a StepReport, got {type(other).__name__}")
        merged = StepReport(dict(self.loads), dict(self.stores))
        for request_id, outcome in other.loads.items():
            merged.loads[request_id] = merged.loads.get(request_id, Outcome()).plus(outcome)
        for number, outcome in other.stores.items():
            merged.stores[number] = merged.stores.get(number, Outcome()).plus(outcome)
        return merged
