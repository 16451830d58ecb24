"""`KVKeepConnector`: what vLLM calls. Thin: each call goes to the scheduler or the worker side.

Whatever goes wrong on our side ends here: the first unexpected error is logged once, with its
trace, and from then on this engine goes on as if there were no cache.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvkeep.assembly import choose_chunk_tokens, open_cache
from kvkeep.config import LoadedConfig, load_config
from kvkeep.connectors.vllm import engine
from kvkeep.connectors.vllm.messages import LayoutReport, LoadOp, StepPlan, StepReport
from kvkeep.connectors.vllm.namespace import engine_namespace
from kvkeep.connectors.vllm.prometheus import KVKeepPromMetrics, KVKeepStats, StatsSource
from kvkeep.connectors.vllm.scheduler import Roles, SchedulerSide
from kvkeep.connectors.vllm.worker import WorkerSide
from kvkeep.device.copier import lost_run
from kvkeep.device.groups import GroupPart
from kvkeep.errors import ConfigError, KVKeepError, LayoutError
from kvkeep.hierarchy import ChunkShape

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("kvkeep")
R = TypeVar("R")


def _guarded(fallback: Callable[[], Any]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Make a hook give `fallback()` once this connector is off, or when it fails, and then be off.

    vLLM's step has no handler of its own: what escapes here stops the engine.
    """

    def wrap(hook: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(hook)
        def guarded(self: KVKeepConnector, *args: Any, **kwargs: Any) -> R:
            if self.off_because:
                return fallback()
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                self.turn_off(f"{hook.__name__} failed: {error!r}", exc_info=True)
                return fallback()

        return guarded

    return wrap


def _nothing() -> None:
    return None


class KVKeepConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes one for the scheduler and one for each worker."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_beside_vllm()
        self.off_because = ""
        """Why this connector does nothing; empty while it works."""
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._stats: StatsSource | None = None
        self._reports: list[LayoutReport] = []
        """What the workers told of their KV cache at the start."""
        self._broken_loads: list[LoadOp] = []
        """Promised to the engine, but planned no more: workers report them as failed."""
        # A wrong setting stops the start, with one clear message: better than running for days
        # without the cache one believes to have.
        self._loaded = load_config(extra=self._kv_transfer_config.kv_connector_extra_config)
        if role == KVConnectorRole.WORKER:
            self._worker = WorkerSide(
                vllm_config, kv_cache_config, self_test=self._loaded.config.self_test
            )
        else:
            self._say_what_was_read(self._loaded)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache may drop: what is not kept is computed again."""
        return False

    def turn_off(self, reason: str, *, exc_info: bool = False) -> None:
        """Go on without the cache; say why, once."""
        if not self.off_because:
            self.off_because = reason
            logger.error(
                "kvkeep is off, the engine goes on without it: %s", reason, exc_info=exc_info
            )

    def _say_what_was_read(self, loaded: LoadedConfig) -> None:
        if self._kv_transfer_config.kv_connector != type(self).__name__:
            logger.info(
                "%s resolves to kvkeep: LMCache is not installed",
                self._kv_transfer_config.kv_connector,
            )
        for note in loaded.notes:
            logger.info("%s", note)
        for warning in loaded.warnings:
            logger.warning("%s", warning)
        if getattr(self._kv_transfer_config, "kv_load_failure_policy", "recompute") == "fail":
            logger.warning(
                'kv_load_failure_policy is "fail": a load that breaks half way fails its request; '
                'set it to "recompute" in --kv-transfer-config to have it computed instead'
            )

    # -- start: workers describe their KV cache, the scheduler side opens the cache ------------

    @_guarded(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._worker is None:
            return None
        if self.off_because:
            return LayoutReport(error=self.off_because)
        return self._worker.handshake

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): report for rank, report in metadata.items()}
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        told = [metadata[rank] for rank in sorted(metadata)]
        reports = [report for report in told if isinstance(report, LayoutReport)]
        if self._scheduler is not None:
            # An engine that wakes from sleep tells again (0.33 and later), the same if all is well.
            if reports != self._reports:
                self.turn_off("the engine's KV cache is another one than at its start")
            return
        try:
            self._connect(reports)
            self._reports = reports
        except ConfigError:
            raise
        except KVKeepError as error:
            self.turn_off(str(error))
        except Exception as error:
            self.turn_off(f"start failed: {error!r}", exc_info=True)

    def _connect(self, reports: list[LayoutReport]) -> None:
        parallel = self._vllm_config.parallel_config
        for report in reports:
            if report.error:
                raise LayoutError(report.error)
        if len(reports) != parallel.world_size:
            raise LayoutError(
                f"{len(reports)} of {parallel.world_size} workers described their KV cache"
            )
        config = self._loaded.config
        groups = reports[0].groups
        for report in reports:
            if [(g.block_tokens, g.window) for g in report.groups] != [
                (g.block_tokens, g.window) for g in groups
            ]:
                raise LayoutError("the workers have different KV groups")
        # What every group has whole blocks in.
        block_tokens = math.lcm(*(group.block_tokens for group in groups))
        chunk_tokens = choose_chunk_tokens(config, block_tokens)
        parts = [GroupPart.of(chunk_tokens, group.block_tokens, group.window) for group in groups]
        shape = ChunkShape(
            chunk_tokens,
            tuple(
                sum(
                    part.kept * group.block_nbytes
                    for part, group in zip(parts, report.groups, strict=True)
                )
                for report in reports
            ),
        )
        namespace = engine_namespace(self._vllm_config, reports, chunk_tokens)
        cache = open_cache(
            config, namespace, shape, num_engines=engine.local_engines(self._vllm_config)
        )
        if engine.is_one_of_unknown_many(self._vllm_config):
            logger.warning(
                "memory.size is for each of the data-parallel engines of this node: give each its "
                "share of what the node has for kvkeep"
            )
        transfer = self._kv_transfer_config
        self._scheduler = SchedulerSide(
            cache,
            namespace,
            config,
            Roles(stores=transfer.is_kv_producer, loads=transfer.is_kv_consumer),
            groups=parts,
            num_ranks=len(reports),
        )
        self._stats = StatsSource(cache)

    # -- scheduler side ------------------------------------------------------------------------

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is None or (self.off_because and not num_external_tokens):
            return
        block_ids = blocks.get_block_ids()
        try:
            self._scheduler.allocated(request, block_ids, num_external_tokens)
        except Exception as error:
            self.turn_off(f"update_state_after_alloc failed: {error!r}", exc_info=True)
            if num_external_tokens:
                # The request waits for this load. It must end, if only badly.
                self._broken_loads.append(LoadOp(request.request_id, (lost_run(block_ids),)))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepPlan()
        try:
            if self.off_because:
                plan = self._scheduler.plan_loads()
            else:
                plan = self._scheduler.plan_step(scheduler_output)
        except Exception as error:
            self.turn_off(f"build_connector_meta failed: {error!r}", exc_info=True)
            plan = self._scheduler.plan_loads()
        plan.loads += self._broken_loads
        self._broken_loads = []
        return plan

    @_guarded(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            report = connector_output.kv_connector_worker_meta
            self._scheduler.take_results(
                report if isinstance(report, StepReport) else None,
                connector_output.finished_recving or (),
            )

    @_guarded(lambda: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request)
        # The copies of every step end within it, so the blocks are free to go.
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    @_guarded(dict)
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """Which of vLLM's kinds of source the hit's tokens came from (0.32 and later ask)."""
        if self._scheduler is None:
            return {}
        return engine.hit_sources(self._scheduler.hit_tokens(request), num_external_tokens)

    @_guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # -- worker side ---------------------------------------------------------------------------

    # Not guarded: the worker side ends every operation it is given, well or badly. A load that
    # was promised must be reported, or its request would wait for ever.

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        plan = self._connector_metadata
        if self._worker is not None and isinstance(plan, StepPlan):
            self._worker.load(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request is scheduled only after its load has ended: nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Whole chunks are stored once a step, by `wait_for_save`."""

    def wait_for_save(self) -> None:
        plan = self._connector_metadata
        if self._worker is not None and isinstance(plan, StepPlan):
            self._worker.store(plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, (self._worker.take_received() or None) if self._worker is not None else None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Like `get_finished`, for an engine that knows failed loads by request."""
        if self._worker is None:
            return engine.transfer_results(set(), set())
        return engine.transfer_results(
            self._worker.take_received(), self._worker.take_failed_requests()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_report() if self._worker is not None else None

    # -- both ----------------------------------------------------------------------------------

    @_guarded(_nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._stats.take() if self._stats is not None else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return KVKeepStats(data or {"counters": {}, "gauges": {}})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return KVKeepPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        try:
            if self._scheduler is not None:
                self._scheduler.close()
            if self._worker is not None:
                self._worker.close()
        except Exception as error:
            logger.warning("shutdown: %r", error, exc_info=True)
        self._scheduler = None
        self._worker = None
        self._stats = None


def _log_beside_vllm() -> None:
    """Send our log where vLLM's goes, unless the user set it up otherwise."""
    theirs = logging.getLogger("vllm")
    if not logger.handlers and theirs.handlers:
        logger.handlers = list(theirs.handlers)
        logger.setLevel(theirs.level or logging.INFO)
        logger.propagate = False


__all__ = ["KVKeepConnector"]
