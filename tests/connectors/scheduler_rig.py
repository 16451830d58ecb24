"""A small engine around `SchedulerSide`: a scheduler, workers and pages, without vLLM's own.

It follows the order of vLLM's calls. A token's KV is a hash of all tokens up to it, so that KV in
the wrong place, or of another prefix, is seen at once.
"""

import hashlib
import warnings
from types import SimpleNamespace

from kvkeep.config import KVKeepConfig
from kvkeep.device.groups import GroupPart
from kvkeep.errors import PoolError
from kvkeep.testing.fake import PATIENCE_S, FakePages, eventually, fake_cache, fake_namespace

with warnings.catch_warnings():
    # What importing vLLM 0.32 says of torch, in torch's own modules.
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
    from kvkeep.connectors.vllm.messages import Outcome, StepReport
    from kvkeep.connectors.vllm.scheduler import Roles, SchedulerSide

CHUNK, BLOCK, TOKEN_NBYTES = 8, 4, 16


class FakeRequest:
    """What `SchedulerSide` reads of vLLM's `Request`."""

    def __init__(self, request_id, tokens, *, salt=None, lora=None):
        self.request_id = request_id
        self.all_token_ids = list(tokens)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_computed_tokens = 0
        self.cache_salt = salt
        self.lora_request = lora
        self.block_ids = []
        self.ended = False

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    def is_finished(self):
        return self.ended


def kv_of(request, at, rank):
    """The KV of the token at position `at`."""
    tokens = ",".join(map(str, request.all_token_ids[: at + 1]))
    lora = getattr(request.lora_request, "lora_name", None)
    return hashlib.shake_128(f"{rank}/{lora}/{tokens}".encode()).digest(TOKEN_NBYTES)


class Rig:
    def __init__(self, *tiers, num_slots=8, num_ranks=1, stores=True, loads=True, **settings):
        nbytes = CHUNK * TOKEN_NBYTES
        self.cache = fake_cache(
            *tiers, num_slots=num_slots, payload_nbytes=[nbytes] * num_ranks, chunk_tokens=CHUNK
        )
        self.side = SchedulerSide(
            self.cache,
            fake_namespace(),
            KVKeepConfig(**settings),
            Roles(stores=stores, loads=loads),
            groups=[GroupPart.of(CHUNK, BLOCK, None)],
            num_ranks=num_ranks,
        )
        self.pages = [
            FakePages(
                self.cache.pool,
                num_blocks=64,
                block_nbytes=BLOCK * TOKEN_NBYTES,
                blocks_per_chunk=CHUNK // BLOCK,
                rank=rank,
            )
            for rank in range(num_ranks)
        ]
        self.free = list(range(63, -1, -1))
        self.running = set()
        self.resumed = set()
        self.loading = {}

    # -- the engine's scheduler ----------------------------------------------------------------

    def admit(self, request, local=0):
        """Look the request up, its first `local` tokens being in the engine's own cache; how many
        tokens are to be loaded, None for "ask again".
        """
        count, is_async = self.side.match(request, local)
        if count is None:
            assert not is_async
            return None
        assert is_async == (count > 0)
        assert local + count < request.num_tokens
        return self.take(request, count, local)

    def take(self, request, count, local=0):
        """Give the request blocks and have `count` tokens loaded."""
        self._give_blocks(request, local + count)
        for at in range(local):
            self._compute(request, at)
        request.num_computed_tokens = local + count
        if count:
            self.loading[request.request_id] = request
            self.side.allocated(request, (request.block_ids,), count)
        return count

    def step(self, scheduled=None):
        """One step: `scheduled` says how many tokens of which request; ops that ran."""
        scheduled = scheduled or {}
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(self.resumed))
        for request, count in scheduled.items():
            before = len(request.block_ids)
            self._give_blocks(request, request.num_computed_tokens + count)
            added = request.block_ids[before:]
            if request.request_id not in self.running:
                self.side.allocated(request, (request.block_ids,), 0)
            if request.request_id in self.running | self.resumed:
                cached.req_ids.append(request.request_id)
                whole = request.block_ids if request.request_id in self.resumed else added
                cached.new_block_ids.append((list(whole),) if whole else None)
            self.running.add(request.request_id)
        self.resumed.clear()
        output = SimpleNamespace(
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={request.request_id: n for request, n in scheduled.items()},
            total_num_scheduled_tokens=sum(scheduled.values()),
        )
        plan = self.side.plan_step(output)
        reports = [StepReport() for _ in self.pages]
        for op in plan.loads:
            self._run(plan, op.runs, "scatter", [report.loads for report in reports], op.request_id)
        for request, count in scheduled.items():
            for at in range(request.num_computed_tokens, request.num_computed_tokens + count):
                self._compute(request, at)
            request.num_computed_tokens += count
        for op in plan.stores:
            self._run(plan, op.runs, "gather", [report.stores for report in reports], op.number)
        report = reports[0]
        for other in reports[1:]:
            report = report.aggregate(other)
        received = {op.request_id for op in plan.loads}
        self.side.take_results(report if report.loads or report.stores else None, received)
        for request_id in received:
            self._loaded(self.loading.pop(request_id), report.loads[request_id])
        return plan

    def serve(self, request, local=0, per_step=1000):
        """Look up, load, compute the rest of the prompt in steps, end; the tokens loaded."""
        count = self.admit(request, local)
        assert count is not None
        if count:
            self.step()
        while request.num_computed_tokens < request.num_tokens:
            left = request.num_tokens - request.num_computed_tokens
            self.step({request: min(per_step, left)})
        self.verify(request)
        self.finish(request)
        return count

    def finish(self, request):
        request.ended = True
        self.side.finished(request)
        self.running.discard(request.request_id)
        if request.request_id not in self.loading:
            self._take_blocks(request)

    def preempt(self, request):
        """As vLLM does: its blocks are gone, it starts again from its first token."""
        self.running.discard(request.request_id)
        self.resumed.add(request.request_id)
        self._take_blocks(request)
        request.num_computed_tokens = 0

    # -- the engine's workers ------------------------------------------------------------------

    def _run(self, plan, runs, copy, reports, name):
        assert plan.pool is not None
        assert plan.pool.kept_blocks == (CHUNK // BLOCK,)
        for pages, outcomes in zip(self.pages, reports, strict=True):
            failed = 0
            try:
                getattr(pages, copy)(runs).wait()
            except (OSError, PoolError):
                failed = 1
            outcomes[name] = Outcome(1, failed, 0.001)

    def _loaded(self, request, outcome):
        if request.is_finished():
            self._take_blocks(request)
        elif outcome.failed:  # the engine computes again from the first block that failed
            request.num_computed_tokens = 0

    def _compute(self, request, at):
        for rank, pages in enumerate(self.pages):
            block, place = request.block_ids[at // BLOCK], at % BLOCK * TOKEN_NBYTES
            old = pages[block]
            kv = kv_of(request, at, rank)
            pages[block] = old[:place] + kv + old[place + TOKEN_NBYTES :]

    def _give_blocks(self, request, num_tokens):
        while len(request.block_ids) * BLOCK < num_tokens:
            block = self.free.pop()
            request.block_ids.append(block)
            for pages in self.pages:
                pages[block] = b"\xee" * (BLOCK * TOKEN_NBYTES)

    def _take_blocks(self, request):
        self.free += request.block_ids
        request.block_ids = []

    # -- what must hold ------------------------------------------------------------------------

    def verify(self, request):
        """Every token that counts as computed has its own KV, on every rank."""
        for at in range(request.num_computed_tokens):
            place = at % BLOCK * TOKEN_NBYTES
            for rank, pages in enumerate(self.pages):
                found = pages[request.block_ids[at // BLOCK]][place : place + TOKEN_NBYTES]
                assert found == kv_of(request, at, rank), f"token {at} of rank {rank}"

    def settle(self):
        """Wait for what goes on between memory and slow tiers."""
        assert self.cache.hierarchy.flush(PATIENCE_S)
        eventually(lambda: "write" not in self.cache.pool.owners() and not self.cache._loading)

    def check_nothing_left(self):
        """All requests have ended: nothing is held but by memory, and nothing is remembered."""
        self.settle()
        self.cache.check_integrity()
        assert set(self.cache.pool.owners()) <= {"memory"}
        assert self.cache.pool.owners().get("memory", 0) == self.cache.num_chunks
        for remembered in ("_tracked", "_to_store", "_fetching", "_stores", "_loading_outcomes"):
            assert not getattr(self.side, remembered), remembered
        self.side.close()
        assert self.cache.pool.owners() == {}
