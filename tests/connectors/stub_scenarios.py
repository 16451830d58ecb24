"""What `stub_engine` is made to do; each is called with the record of one vLLM release."""

import tempfile
from typing import Any

import pytest
from prometheus_client import Counter, Gauge, Histogram
from stub_engine import StubEngine
from stub_objects import made, make_request, vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1 import kv_cache_interface as specs

from kvkeep.connectors.vllm import plugin
from kvkeep.connectors.vllm.connector import KVKeepConnector
from kvkeep.connectors.vllm.engine import kv_groups
from kvkeep.errors import LayoutError

PROMPT = range(100, 200)  # three chunks of 32 tokens, and four tokens


def keep_and_give_back(api):
    """One prompt twice, and one that shares its beginning."""
    engine = StubEngine(api)
    if "requires_kv_delivery" in api["classes"]["KVConnectorBase_V1"]["methods"]:
        assert engine.scheduler.requires_kv_delivery is False
    first, again = (make_request(name, PROMPT) for name in ("first", "again"))
    other = make_request("other", [*PROMPT[:70], *range(7, 47)])
    assert engine.serve(first)[0] == 0
    for request, expected in ((again, 96), (other, 64)):
        loaded, block_ids = engine.serve(request)
        assert loaded == expected
        engine.verify(request, block_ids, loaded)
    check_statistics(engine)
    assert engine.scheduler.reset_cache() is True
    assert engine.serve(make_request("after a reset", PROMPT))[0] == 0
    engine.end()


def check_statistics(engine):
    """From the scheduler's side through the API server to Prometheus."""
    stats = engine.scheduler.get_kv_connector_stats()
    assert not stats.is_empty()
    payload = stats.to_dict() if hasattr(stats, "to_dict") else stats.data
    logged = KVKeepConnector.build_kv_connector_stats(payload)
    both = logged.aggregate(KVKeepConnector.build_kv_connector_stats(payload))
    assert both.reduce()["kvkeep memory/hit_tokens"] == 2 * (96 + 64)
    seen = {}
    metrics = KVKeepConnector.build_prom_metrics(
        engine.scheduler._vllm_config,
        {kind: lambda name, **_: FakeMetric(name, seen) for kind in (Counter, Gauge, Histogram)},
        ["model_name", "engine"],
        {0: ["stub", "0"]},
    )
    metrics.observe(payload, 0)
    assert seen["kvkeep:hit_tokens", ("stub", "0", "memory")] == 96 + 64


class FakeMetric:
    def __init__(self, name, seen, labels=()):
        self._name, self._seen, self._labels = name, seen, labels

    def labels(self, *values):
        return FakeMetric(self._name, self._seen, values)

    def inc(self, amount):
        self._seen[self._name, self._labels] = amount

    set = inc


def fail_to_load(api):
    """A load that breaks is reported in the way that this release knows, and computed again."""
    engine = StubEngine(api)
    engine.serve(make_request("first", PROMPT))
    copier: Any = engine.worker._worker._copier
    engine.worker._worker._copier = Broken(copier)
    again = make_request("again", PROMPT)
    found, is_async = engine.scheduler.get_num_new_matched_tokens(again, 0)
    assert (found, is_async) == (96, True)
    block_ids = engine.blocks_for(again.num_tokens)
    engine.allocated(again, block_ids, found)
    again.num_computed_tokens = found
    engine.waiting["again"] = again
    engine.step({}, {})
    assert engine.invalid | engine.failed
    assert engine.invalid <= set(block_ids[0])
    engine.worker._worker._copier = copier
    engine.allocated(again, block_ids, 0)
    engine.step({again: again.num_tokens}, {again: block_ids})
    engine.verify(again, block_ids, 0)
    engine.scheduler.request_finished(again, block_ids[0])
    engine.end()


class Broken:
    def __init__(self, copier):
        self.gather = copier.gather

    def scatter(self, runs):
        raise OSError("made to fail")


def groups_with_a_window(api):
    """Full attention beside a sliding window: served where the release can be told of failures."""
    engine = StubEngine(api, windows=(None, 40))
    if "get_transfer_results" not in api["calls"]:
        assert "sliding windows" in engine.scheduler.off_because
        assert engine.serve(make_request("first", PROMPT))[0] == 0
        return
    engine.serve(make_request("first", PROMPT))
    again = make_request("again", PROMPT)
    loaded, block_ids = engine.serve(again)
    assert loaded == 96
    engine.verify(again, block_ids, loaded)
    engine.end()


def wake_up(api):
    """Since 0.33 the workers' metadata comes a second time, after a sleep: the cache is the same.

    A second cache would have another pool, and the workers go on with the first: what comes into
    its slots from a slow tier would never reach the engine, and other chunks' bytes would.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine = StubEngine(api, **{"disk.paths": folder, "disk.size": "64MiB"})
        engine.serve(make_request("other", range(300, 400)))
        engine.serve(make_request("first", PROMPT))
        cache = engine.scheduler._scheduler.cache
        if hasattr(engine.worker, "unregister_kv_caches"):
            engine.worker.unregister_kv_caches()
            engine.worker.restore_kv_caches()
        engine.shake_hands()
        assert engine.scheduler.off_because == ""
        assert engine.scheduler._scheduler.cache is cache
        again = make_request("again", PROMPT)
        loaded, block_ids = engine.serve(again)
        assert loaded == 96
        engine.verify(again, block_ids, loaded)
        assert cache.hierarchy.flush(5)
        engine.end()


def refuse(api):
    """Of all specifications that this release has, only those that are known are served."""
    served = {
        "FullAttentionSpec": layer(),
        "MLAAttentionSpec": layer(specs.MLAAttentionSpec),
        "UniformTypeKVCacheSpecs": made(
            specs.UniformTypeKVCacheSpecs, block_size=16, kv_cache_specs={"layer": layer()}
        ),
    }
    if "get_transfer_results" in api["calls"]:
        served["SlidingWindowSpec"] = layer(specs.SlidingWindowSpec, sliding_window=40)
    refused = [
        # Whichever of the two names the release has.
        layer(specs.MLAAttentionSpec, tokens_per_state=4, compress_ratio=4),
        layer(non_causal=True),
        made(
            specs.UniformTypeKVCacheSpecs,
            block_size=16,
            kv_cache_specs={"layer": layer(specs.MambaSpec)},
        ),
        *(layer(getattr(specs, name)) for name in api["specs"].keys() - served.keys()),
    ]
    config = vllm_config({})
    for spec in served.values():
        assert kv_groups(config, one_group(spec))[0].page_bytes == (4096,)
    for spec in refused:
        try:
            kv_groups(config, one_group(spec))
        except LayoutError:
            continue
        raise AssertionError(f"{type(spec).__name__} is not refused")
    if "enable_kv_transfer" in specs.KVCacheGroupSpec.known:
        hidden = one_group(layer())
        hidden.kv_cache_groups[0].enable_kv_transfer = False
        with pytest.raises(LayoutError):
            kv_groups(config, hidden)


def layer(kind=specs.FullAttentionSpec, **changes):
    values = {"sliding_window": 40, "unpadded_page_size_bytes": 4096, "page_size_bytes": 5120}
    return made(kind, block_size=16, **{**values, **changes})


def one_group(spec):
    group = made(specs.KVCacheGroupSpec, layer_names=["layer"], kv_cache_spec=spec)
    return made(specs.KVCacheConfig, num_blocks=8, kv_cache_groups=[group])


def register_name(api):
    """The name that users give, twice."""
    plugin.register()
    plugin.register()
    assert KVConnectorFactory._registry["KVKeepConnector"] == (
        "kvkeep.connectors.vllm.connector",
        "KVKeepConnector",
    )
