"""The scheduler side: decides what is loaded and stored, for every rank at once.

Owns the cache (index, policy, leases) and moves no bytes. A request passes through here so:

    get_num_new_matched_tokens   hash its tokens, match, start fetching; None while a slow tier
                                 is under way (the request waits, and holds no GPU blocks)
    update_state_after_alloc     its blocks are known: plan the copy from slots to blocks
    build_connector_meta         plan the copies to slots of all chunks that this step completes
    update_connector_output      copies have ended: publish stores, let go of loads
    request_finished             let go of what the request still holds
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.cache import Fetch, KVCache, Match
from kvkeep.config import KVKeepConfig
from kvkeep.connectors.vllm import engine
from kvkeep.connectors.vllm.messages import (
    LoadOp,
    Outcome,
    PoolPlace,
    StepPlan,
    StepReport,
    StoreOp,
)
from kvkeep.connectors.vllm.namespace import lora_identity
from kvkeep.connectors.vllm.report import RequestReport
from kvkeep.connectors.vllm.stores import Stores
from kvkeep.connectors.vllm.tracked import Tracked
from kvkeep.device.copier import CopyRun, lost_run
from kvkeep.device.groups import GroupPart
from kvkeep.errors import PoolError
from kvkeep.keys import KeyChain, Namespace, Placed
from kvkeep.types import Digest

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.001
"""How long an otherwise idle step sleeps for a transfer to end. Without it the engine spins on
empty steps, and the threads that read from disk fight it for the interpreter."""


@dataclass(frozen=True, slots=True)
class Roles:
    """What this engine does with the cache (vLLM's kv_role)."""

    stores: bool
    loads: bool


class SchedulerSide:
    """Not thread-safe: the engine calls it from its one scheduling thread."""

    def __init__(
        self,
        cache: KVCache,
        namespace: Namespace,
        config: KVKeepConfig,
        roles: Roles,
        *,
        groups: Sequence[GroupPart],
        num_ranks: int,
    ) -> None:
        self._cache = cache
        self._namespace = namespace
        self._config = config
        self._roles = roles
        self._groups = tuple(groups)
        self._block_tokens = math.lcm(*(part.block_tokens for part in groups))
        self._chunk_tokens = cache.shape.num_tokens
        self._tracked: dict[str, Tracked] = {}
        self._to_store: dict[str, Tracked] = {}
        self._fetching: set[str] = set()
        self._loads: list[LoadOp] = []
        self._stores = Stores(cache, self._groups, num_ranks)
        self._loading_outcomes: dict[str, Outcome] = {}
        self._epoch: str | None = None
        self._place = PoolPlace(
            cache.pool.memory.handle,
            cache.pool.num_slots,
            cache.pool.slot_bytes,
            tuple(part.kept for part in groups),
        )

    # -- look-up -------------------------------------------------------------------------------

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens past `num_computed_tokens` are to be loaded; None: ask again later."""
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        tracked = self._track(request)
        if tracked.request is not request:
            # An id that is in use again while copies for its first request are under way.
            return 0, False
        tracked.start_token = num_computed_tokens
        self._hash(tracked)
        may_load = self._roles.loads and not tracked.has_failed
        if not may_load or num_computed_tokens % self._block_tokens:
            return 0, False
        first = num_computed_tokens // self._chunk_tokens
        fetch = self._fetch_from(tracked, first)
        if fetch is None:
            return 0, False
        if not fetch.done:
            if not self._is_late(fetch):
                self._fetching.add(request.request_id)
                return None, False
            logger.warning(
                "request %s: a slow tier took longer than %.1f s; going on without it",
                request.request_id,
                self._config.fetch_timeout_s,
            )
            self._cache.give_up(fetch)
            tracked.waits = False
        self._fetching.discard(request.request_id)
        # The last token is always computed: its logits are what the request is here for.
        end = min((first + len(fetch.slots)) * self._chunk_tokens, request.num_tokens - 1)
        num_tokens = end - num_computed_tokens
        if num_tokens < max(1, self._config.min_retrieve_tokens):
            self._let_go(tracked)
            return 0, False
        return num_tokens, True

    def _hash(self, tracked: Tracked) -> list[Digest]:
        """The digests of all chunks of the request so far."""
        if getattr(tracked.request, "mm_features", None):
            tracked.chain.items = [Placed(*item) for item in engine.placed_items(tracked.request)]
        return tracked.chain.extend(tracked.request.all_token_ids)

    def _track(self, request: Request) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            return tracked
        report = RequestReport(request.request_id, self._cache.shape)
        tracked = Tracked(request, self._new_chain(request), report)
        self._tracked[request.request_id] = tracked
        if self._roles.stores:
            self._to_store[request.request_id] = tracked
        return tracked

    def _new_chain(self, request: Request) -> KeyChain:
        embeds = getattr(request, "prompt_embeds", None)
        return KeyChain(
            self._namespace,
            self._chunk_tokens,
            salt=request.cache_salt,
            lora=lora_identity(request.lora_request),
            epoch=self._epoch,
            embeds=(lambda start, stop: engine.embed_bytes(request, start, stop))
            if embeds is not None
            else None,
        )

    def _fetch_from(self, tracked: Tracked, first: int) -> Fetch | None:
        """The request's run of kept chunks from `first` on, held; None if there is none."""
        if tracked.fetch is not None:
            if tracked.first_chunk == first:
                return tracked.fetch
            # The engine found more, or less, in its own cache than when it last asked.
            self._let_go(tracked)
        wanted = tracked.chain.digests[first:]
        asked = (self._cache.generation, first, len(wanted))
        if not wanted or tracked.missed == asked:
            return None
        match = self._cache.match(wanted)
        if not match.digests:
            tracked.missed = asked
            return None
        if not tracked.waits:
            match = Match(match.digests[: match.in_memory], match.in_memory)
            if not match.digests:
                return None
        tracked.fetch = self._cache.fetch(match, tracked.request.request_id)
        tracked.first_chunk = first
        return tracked.fetch

    def _is_late(self, fetch: Fetch) -> bool:
        return fetch.age_s() > self._config.fetch_timeout_s

    def _let_go(self, tracked: Tracked) -> None:
        self._fetching.discard(tracked.request.request_id)
        if tracked.fetch is not None:
            self._cache.release(tracked.fetch)
            tracked.fetch = None
        tracked.is_loading = False

    # -- after allocation ----------------------------------------------------------------------

    def allocated(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> None:
        """The request's blocks so far are `block_ids`, one list a KV group; `num_tokens` are to be
        loaded.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.block_ids = [list(ids) for ids in block_ids]
        self._count_tokens(tracked, num_tokens)
        fetch = tracked.fetch
        if num_tokens == 0 or fetch is None:
            if not tracked.is_loading:
                self._let_go(tracked)
            return
        start = tracked.start_token
        # The engine may take less than it was offered.
        runs = self._load_runs(tracked, fetch, start, start + num_tokens)
        self._loads.append(LoadOp(request.request_id, runs))
        tracked.is_loading = True
        self._loading_outcomes[request.request_id] = Outcome()
        tracked.report.loading(fetch, tracked.first_chunk, start, num_tokens, request.num_tokens)
        self._count_hits(tracked.report)

    def _load_runs(
        self, tracked: Tracked, fetch: Fetch, start: int, stop: int
    ) -> tuple[CopyRun, ...]:
        try:
            runs = [
                part.load_run(
                    group, fetch.slots, tracked.first_chunk, tracked.block_ids[group], start, stop
                )
                for group, part in enumerate(self._groups)
            ]
        except PoolError as error:
            logger.warning("request %s: %s; computing instead", tracked.request.request_id, error)
            return (lost_run(tracked.block_ids),)
        return tuple(run for run in runs if run is not None)

    def _count_tokens(self, tracked: Tracked, num_tokens: int) -> None:
        if tracked.is_counted or not self._roles.loads:
            return
        tracked.is_counted = True
        requested = tracked.request.num_tokens - tracked.start_token
        self._cache.counters.requested_tokens += requested
        self._cache.counters.missed_tokens += requested - num_tokens

    def _count_hits(self, report: RequestReport) -> None:
        counters = self._cache.tier_counters()
        for source, num_tokens in report.hit_tokens.items():
            counters[source].add("hit_tokens", num_tokens)

    # -- the step ------------------------------------------------------------------------------

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        """What the workers do in the step that `output` describes."""
        self._follow_blocks(output)
        stores = self._plan_stores(output)
        plan = self.plan_loads()
        if stores:
            plan.stores = stores
            plan.pool = self._place
        if plan.pool is None and self._fetching and output.total_num_scheduled_tokens == 0:
            self._cache.wait(_IDLE_WAIT_S)
        return plan

    def plan_loads(self) -> StepPlan:
        """The loads that the engine was promised since the last plan, and nothing else."""
        loads, self._loads = self._loads, []
        return StepPlan(self._place if loads else None, loads)

    def _follow_blocks(self, output: SchedulerOutput) -> None:
        """Add the blocks that running requests were given for this step."""
        if not self._to_store:
            return
        cached = output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            tracked = self._to_store.get(request_id)
            # A resumed request told all its blocks in `allocated`, when it was admitted again.
            if tracked is not None and new_ids and request_id not in cached.resumed_req_ids:
                for ids, added in zip(tracked.block_ids, new_ids, strict=True):
                    ids += added

    def _plan_stores(self, output: SchedulerOutput) -> list[StoreOp]:
        ops: list[StoreOp] = []
        finished: list[str] = []
        scheduled = output.num_scheduled_tokens
        # Many may be waiting, or many decoding: go through the fewer.
        names = scheduled if len(scheduled) < len(self._to_store) else self._to_store
        for request_id in names:
            tracked = self._to_store.get(request_id)
            num_scheduled = scheduled.get(request_id)
            if tracked is None or not num_scheduled:
                continue
            request = tracked.request
            limit = request.num_tokens
            if not self._config.save_decode_cache:
                limit = min(limit, request.num_prompt_tokens)
            # Only tokens whose ids are known and whose KV this step has computed at its end.
            computed = min(request.num_computed_tokens + num_scheduled, limit)
            ready = computed // self._chunk_tokens
            if ready > tracked.num_stored:
                op = self._stores.plan(tracked, self._hash(tracked), ready)
                if op is not None:
                    ops.append(op)
            if not self._config.save_decode_cache and ready == limit // self._chunk_tokens:
                finished.append(request_id)
        for request_id in finished:
            self._to_store.pop(request_id).report.complete()
        return ops

    # -- results -------------------------------------------------------------------------------

    def take_results(self, report: StepReport | None, received: Sequence[str] | set[str]) -> None:
        """What the workers did: `report` of this step, and the requests whose load has ended on
        every rank.
        """
        if report is not None:
            for number, outcome in report.stores.items():
                self._stores.ended(number, outcome)
            for request_id, outcome in report.loads.items():
                before = self._loading_outcomes.get(request_id, Outcome())
                self._loading_outcomes[request_id] = before.plus(outcome)
        for request_id in received:
            outcome = self._loading_outcomes.pop(request_id, Outcome())
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.report.loaded(outcome)
                if outcome.failed:
                    tracked.has_failed = True
                else:
                    counters = self._cache.counters.memory
                    counters.add("loaded_bytes", tracked.report.load_nbytes)
                    counters.add("load_seconds", outcome.seconds)
                self._let_go(tracked)
                if tracked.request.is_finished():
                    self._forget(request_id)

    def finished(self, request: Request) -> None:
        """The request has ended, served or aborted; copies under way go on."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if not tracked.is_loading:
            self._let_go(tracked)
            self._forget(request.request_id)
        else:
            self._stop_storing(request.request_id)

    def _forget(self, request_id: str) -> None:
        self._tracked.pop(request_id, None)
        self._stop_storing(request_id)

    def _stop_storing(self, request_id: str) -> None:
        tracked = self._to_store.pop(request_id, None)
        if tracked is not None:
            tracked.report.complete()

    def hit_tokens(self, request: Request) -> dict[str, int]:
        """Tier name -> tokens that the request's planned load takes from it."""
        tracked = self._tracked.get(request.request_id)
        return dict(tracked.report.hit_tokens) if tracked is not None else {}

    @property
    def cache(self) -> KVCache:
        """The cache itself, for statistics."""
        return self._cache

    def reset(self) -> None:
        """Give nothing any more of what was kept before (`reset_prefix_cache` with connectors).

        The engine is told so when its weights have changed under it. What lies in slow tiers can't
        be told apart by anything but its key, so keys are others from now on; that only this
        process uses: after a restart the weights are the model's own again.
        """
        self._cache.clear_memory()
        self._epoch = os.urandom(16).hex()
        self._stores.outdate()
        for request_id, tracked in list(self._tracked.items()):
            if not tracked.is_loading:
                self._let_go(tracked)
                self._forget(request_id)
                continue
            # It goes on with what it was promised. What it computes from that is of before and
            # after: not to be kept. Preempted, it asks for what is kept from now on.
            self._stop_storing(request_id)
            tracked.chain = self._new_chain(tracked.request)
            tracked.missed = None

    def close(self) -> None:
        """Let go of every request and end the cache."""
        for tracked in list(self._tracked.values()):
            self._let_go(tracked)
        self._stores.close()
        self._tracked.clear()
        self._cache.close()
