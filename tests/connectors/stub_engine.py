"""A small engine around `KVKeepConnector`, in the order of one vLLM release's calls.

Run as a program with a stub of that release first on the path (`engine_stub`), the release's
record and the names of scenarios; it writes one line of JSON: name -> "" or what went wrong.
A token's KV is random bytes that follow from all tokens up to it, so KV in the wrong place or of
another prefix is seen at once.
"""

import hashlib
import json
import pickle
import sys
import traceback
from pathlib import Path

import torch
import vllm
from stub_objects import BLOCK, DIM, HEADS, PAGE_NBYTES, Backend, attention, made, vllm_config
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvkeep.connectors.vllm.connector import KVKeepConnector

NUM_BLOCKS, LAYERS = 40, 3


class StubEngine:
    """One rank. `windows`: one entry a KV group."""

    def __init__(self, api, windows=(None,), **settings):
        assert hasattr(utils, "get_current_attn_backends")
        utils.get_current_attn_backends = lambda config, layer_names=None: [Backend]
        self.calls = api["calls"]
        # Groups lie on each other, as the engine has them: a block belongs to one at a time.
        self.raw = torch.zeros((LAYERS, NUM_BLOCKS, PAGE_NBYTES), dtype=torch.uint8)
        shape = (NUM_BLOCKS, HEADS, BLOCK, 2 * DIM)
        self.caches = {
            f"layer.{number}.{at}": self.raw[at].view(torch.float16).view(shape)
            for number in range(len(windows))
            for at in range(LAYERS)
        }
        groups = [
            made(
                specs.KVCacheGroupSpec,
                layer_names=[f"layer.{number}.{at}" for at in range(LAYERS)],
                kv_cache_spec=attention(window),
                enable_kv_transfer=True,
            )
            for number, window in enumerate(windows)
        ]
        self.windows = windows
        caches = made(specs.KVCacheConfig, num_blocks=NUM_BLOCKS, kv_cache_groups=groups)
        config = vllm_config({"memory.size": "8MiB", "chunk_tokens": 32, **settings})
        self.worker = KVKeepConnector(config, KVConnectorRole.WORKER, caches)
        self.worker.register_kv_caches(self.caches)
        self.scheduler = KVKeepConnector(config, KVConnectorRole.SCHEDULER, caches)
        self.shake_hands()
        self.free = list(range(NUM_BLOCKS - 1, 0, -1))  # block 0 is nobody's
        self.waiting = {}

    def shake_hands(self):
        metadata = pickle.loads(pickle.dumps(self.worker.get_handshake_metadata()))
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})

    # -- requests ------------------------------------------------------------------------------

    def blocks_for(self, num_tokens):
        return tuple(
            [self.free.pop() for _ in range(-(-num_tokens // BLOCK))] for _ in self.windows
        )

    def serve(self, request):
        """Look up, load, compute, end; (tokens that were loaded, the request's blocks)."""
        found, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert is_async == (found > 0)
        block_ids = self.blocks_for(request.num_tokens)
        if found:
            self.allocated(request, block_ids, found)
            request.num_computed_tokens = found
            self.waiting[request.request_id] = request
            self.step({}, {})
            assert request.request_id not in self.waiting, "the load was never reported"
        self.allocated(request, block_ids, 0)
        self.step({request: request.num_tokens - request.num_computed_tokens}, {request: block_ids})
        if isinstance(self.scheduler, SupportsHMA):
            held, _ = self.scheduler.request_finished_all_groups(request, block_ids)
        else:
            held, _ = self.scheduler.request_finished(request, block_ids[0])
        assert held is False
        return found, block_ids

    def allocated(self, request, block_ids, num_tokens):
        blocks = made(KVCacheBlocks, get_block_ids=lambda: block_ids)
        self.scheduler.update_state_after_alloc(request, blocks, num_tokens)
        if num_tokens and "get_external_cache_hit_sources" in self.calls:
            sources = self.scheduler.get_external_cache_hit_sources(request, num_tokens)
            assert sum(sources.values()) == num_tokens

    # -- a step --------------------------------------------------------------------------------

    def step(self, scheduled, block_ids):
        cached = made(CachedRequestData, req_ids=[], new_block_ids=[], resumed_req_ids=set())
        output = made(
            SchedulerOutput,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={request.request_id: n for request, n in scheduled.items()},
            total_num_scheduled_tokens=sum(scheduled.values()),
            has_sync_kv_loads=False,
        )
        plan = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        worker = self.worker
        worker.bind_connector_metadata(plan)
        # Since 0.29 loads that nobody waits for in this step start after the forward pass.
        loads_first = not hasattr(output, "has_sync_kv_loads")
        if loads_first:
            worker.start_load_kv(None)
        for request, count in scheduled.items():
            start = request.num_computed_tokens
            for at in range(start, start + count):
                self.compute(request, at, block_ids[request])
        if not loads_first:
            worker.start_load_kv(None)
        if scheduled:  # before 0.31 not in a step without a forward pass
            worker.wait_for_save()
        self.scheduler.update_connector_output(self.results())
        worker.clear_connector_metadata()
        for request, count in scheduled.items():
            request.num_computed_tokens += count

    def results(self):
        """What the worker tells; a failed load starts its request again, as the engine does."""
        failed = set()
        if "get_transfer_results" in self.calls:
            results = self.worker.get_transfer_results(set())
            received, failed = results.finished_recving, results.failed_recving
        else:
            _, received = self.worker.get_finished(set())
        self.invalid = self.worker.get_block_ids_with_load_errors()
        self.failed = failed
        for name in received or ():
            request = self.waiting.pop(name)
            if self.invalid or name in failed:
                request.num_computed_tokens = 0
        return made(
            KVConnectorOutput,
            finished_recving=received or None,
            kv_connector_worker_meta=pickle.loads(
                pickle.dumps(self.worker.build_connector_worker_meta())
            ),
        )

    # -- KV ------------------------------------------------------------------------------------

    def kv(self, request, at, group):
        tokens = ",".join(map(str, request.all_token_ids[: at + 1]))
        seed = f"{group}/{tokens}".encode()
        raw = hashlib.shake_128(seed).digest(LAYERS * HEADS * 2 * DIM * 2)
        return torch.frombuffer(bytearray(raw), dtype=torch.int16).view(LAYERS, HEADS, 2 * DIM)

    def places(self, at, block_ids, group):
        block, slot = block_ids[group][at // BLOCK], at % BLOCK
        for layer in range(LAYERS):
            yield self.caches[f"layer.{group}.{layer}"].view(torch.int16)[block, :, slot]

    def compute(self, request, at, block_ids):
        for group in range(len(self.windows)):
            for kv, place in zip(
                self.kv(request, at, group), self.places(at, block_ids, group), strict=True
            ):
                place.copy_(kv)

    def verify(self, request, block_ids, loaded):
        """Every token has its own KV; of a window's group those that can still be seen."""
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, loaded - window + 1)
            for at in range(first, request.num_tokens):
                expected = self.kv(request, at, group)
                for kv, place in zip(expected, self.places(at, block_ids, group), strict=True):
                    assert torch.equal(kv, place), f"token {at} of group {group}"

    def end(self):
        assert self.scheduler.off_because == "", self.scheduler.off_because
        cache = self.scheduler._scheduler.cache
        cache.check_integrity()
        assert set(cache.pool.owners()) <= {"memory"}
        self.worker.shutdown()
        self.scheduler.shutdown()


def main(record, *names):
    import stub_scenarios

    api = json.loads(Path(record).read_text())
    assert vllm.__version__ == api["version"], f"this is {vllm.__file__}, not a stub"
    print(json.dumps({name: outcome(getattr(stub_scenarios, name), api) for name in names}))


def outcome(scenario, api):
    try:
        scenario(api)
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    sys.modules["stub_engine"] = sys.modules["__main__"]
    main(*sys.argv[1:])
