"""The worker side: moves bytes between the engine's pages and the pool's slots, by number.

Knows no keys and decides nothing. What goes wrong here is reported: a load as failed blocks,
which the engine computes again; a store as failed, which the scheduler side forgets.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from kvkeep.connectors.vllm import engine
from kvkeep.connectors.vllm.messages import (
    GroupReport,
    LayoutReport,
    LoadOp,
    Outcome,
    PoolPlace,
    StepPlan,
    StepReport,
)
from kvkeep.connectors.vllm.selftest import check_copies
from kvkeep.device.copier import PageCopier
from kvkeep.device.layout import BlockLayout, describe_layout
from kvkeep.device.reference import grouped_copier, layer_tensor
from kvkeep.errors import KVKeepError, LayoutError
from kvkeep.memory.shared import SharedMemory
from kvkeep.transfer import in_background

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


class WorkerSide:
    """One engine rank. Not thread-safe: the engine calls it from its one worker thread."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, self_test: bool
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._self_test = self_test
        self._rank = vllm_config.parallel_config.rank
        self._layouts: list[BlockLayout | None] = []
        """One entry a KV group; None where this rank has none of its layers."""
        self._tensors: dict[int, torch.Tensor] = {}
        self._memory: SharedMemory | None = None
        self._copier: PageCopier | None = None
        self._report = StepReport()
        self._fails_by_request = False
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._received: set[str] = set()
        self._said: set[str] = set()
        self.handshake = LayoutReport(error="the engine registered no KV cache")

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's KV cache: `kv_caches[layer]`, paged, on the engine's device."""
        try:
            self.handshake = self._described(kv_caches)
        except KVKeepError as error:
            self.handshake = LayoutReport(error=str(error))

    def _described(self, kv_caches: dict[str, torch.Tensor]) -> LayoutReport:
        groups = engine.kv_groups(self._vllm_config, self._kv_cache_config)
        self._fails_by_request = engine.fails_by_request(groups)
        names = [name for group in groups for name in group.layer_names]
        missing = [name for name in names if name not in kv_caches]
        if missing:
            raise LayoutError(f"the engine registered no KV cache for layer {missing[0]}")
        if not names:
            raise LayoutError("this rank has no layer with a KV cache")
        self._tensors = {
            kv_caches[name].untyped_storage().data_ptr(): kv_caches[name] for name in names
        }
        self._layouts = [self._layout_of(group, kv_caches) for group in groups]
        if self._self_test:
            parts = [
                (layout, [kv_caches[name] for name in group.layer_names])
                for layout, group in zip(self._layouts, groups, strict=True)
                if layout is not None
            ]
            check_copies(parts, self._tensors)
        return LayoutReport(
            groups=tuple(
                GroupReport(
                    block_tokens=group.block_tokens,
                    block_nbytes=layout.block_nbytes if layout is not None else 0,
                    window=group.window,
                    fingerprint=layout.fingerprint if layout is not None else "",
                )
                for layout, group in zip(self._layouts, groups, strict=True)
            ),
            backends=engine.attention_backends(self._vllm_config, tuple(names)),
            device=kv_caches[names[0]].device.type,
        )

    def _layout_of(
        self, group: engine.KVGroup, kv_caches: dict[str, torch.Tensor]
    ) -> BlockLayout | None:
        if not group.layer_names:
            return None
        return describe_layout(
            [layer_tensor(name, kv_caches[name]) for name in group.layer_names],
            num_blocks=self._kv_cache_config.num_blocks,
            block_tokens=group.block_tokens,
            page_bytes=group.page_bytes,
        )

    def load(self, plan: StepPlan) -> None:
        """Bring slots into pages, as the plan says."""
        for op in plan.loads:
            started = time.perf_counter()
            failed = 0
            try:
                self._copier_for(plan.pool).scatter(op.runs).wait()
            except Exception as error:
                failed = 1
                self._load_failed(op, error)
            seconds = time.perf_counter() - started
            self._report.loads[op.request_id] = Outcome(1, failed, seconds)
            self._received.add(op.request_id)

    def _load_failed(self, op: LoadOp, error: Exception) -> None:
        self._warn_once("request %s: load failed, computing instead: %r", op.request_id, error)
        if self._fails_by_request:
            self._failed_requests.add(op.request_id)
            return
        for run in op.runs:
            self._failed_blocks.update(run.block_ids)

    def _warn_once(self, message: str, *values: object) -> None:
        """At most one warning for each kind of trouble; the counters tell how often."""
        kind = f"{message} {type(values[-1]).__name__}"
        level = logging.DEBUG if kind in self._said else logging.WARNING
        self._said.add(kind)
        logger.log(level, message, *values)

    def store(self, plan: StepPlan) -> None:
        """Bring pages that this step completed into slots, as the plan says."""
        for op in plan.stores:
            started = time.perf_counter()
            failed = 0
            try:
                self._copier_for(plan.pool).gather(op.runs).wait()
            except Exception as error:
                failed = 1
                self._warn_once("a store failed: %r", error)
            self._report.stores[op.number] = Outcome(1, failed, time.perf_counter() - started)

    def _copier_for(self, place: PoolPlace | None) -> PageCopier:
        if self._copier is not None:
            return self._copier
        if place is None or not self._layouts:
            raise LayoutError("an operation came without a pool or before the KV cache")
        memory = self._memory = SharedMemory.attach(place.handle)
        base = place.num_slots * sum(place.slot_bytes[: self._rank])
        slot_bytes = place.slot_bytes[self._rank]
        nbytes = place.num_slots * slot_bytes
        # The pages are there, but each process maps them for itself, one fault at a time.
        in_background("kvkeep-map", lambda: memory.populate(base, nbytes))
        slots = torch.frombuffer(self._memory.view, dtype=torch.uint8)[base : base + nbytes]
        self._copier = grouped_copier(
            zip(self._layouts, place.kept_blocks, strict=True),
            self._tensors,
            slots,
            slot_bytes=slot_bytes,
        )
        return self._copier

    def take_received(self) -> set[str]:
        """Requests whose load has ended, well or badly, since the last call."""
        received, self._received = self._received, set()
        return received

    def take_failed_blocks(self) -> set[int]:
        """Blocks whose load failed since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests of a model with several KV groups whose load failed since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_report(self) -> StepReport | None:
        """What was done since the last call."""
        report, self._report = self._report, StepReport()
        return report if report.loads or report.stores else None

    def close(self) -> None:
        """Let go of the pool."""
        self._copier = None
        self._memory = None

    def __getstate__(self) -> Any:
        raise TypeError("a worker side belongs to one process")
