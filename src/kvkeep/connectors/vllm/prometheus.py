"""The cache's figures on vLLM's own `/metrics`.

The engine process counts; vLLM carries each step's differences to its API server, where they are
added to Prometheus metrics called `kvkeep:*`, labelled by engine and, where it applies, by tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvkeep.cache import KVCache

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_TIER_COUNTERS = {
    "hit_tokens": "Prompt tokens whose KV this tier gave.",
    "loaded_bytes": "Bytes of KV loaded from this tier.",
    "load_seconds": "Seconds spent loading from this tier, summed over its threads.",
    "stored_bytes": "Bytes of KV stored in this tier.",
    "store_seconds": "Seconds spent storing in this tier, summed over its threads.",
    "dropped": "Chunks not stored because this tier's queue was full.",
    "corrupt": "Frames from this tier that did not fit; deleted and taken for misses.",
    "failures": "Batches that failed in this tier.",
}
_CACHE_COUNTERS = {
    "requested_tokens": "Prompt tokens looked up beyond the engine's own prefix cache.",
    "missed_tokens": "Those of the requested tokens that no tier had.",
    "stored_chunks": "Chunks kept.",
    "dropped_chunks": "Chunks not kept because no room could be made in memory.",
    "evictions": "Chunks evicted from memory.",
}
_TIER_GAUGES = {
    "used_bytes": "Bytes this tier keeps now.",
    "cap_bytes": "Bytes this tier may keep.",
    "breaker_open": "1 while this tier is cut off after failures, else 0.",
}


@dataclass
class KVKeepStats(KVConnectorStats):
    """`data`: {"counters": {name: n}, "gauges": {name: n}}; per-tier names are `tier/name`."""

    def reset(self) -> None:
        self.data = {"counters": {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> KVKeepStats:
        counters = dict(self.data.get("counters", {}))
        for name, amount in other.data.get("counters", {}).items():
            counters[name] = counters.get(name, 0) + amount
        gauges = {**self.data.get("gauges", {}), **other.data.get("gauges", {})}
        return KVKeepStats({"counters": counters, "gauges": gauges})

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's periodic log line."""
        counters: dict[str, float] = self.data.get("counters", {})
        return {f"kvkeep {name}": round(amount, 3) for name, amount in sorted(counters.items())}

    def is_empty(self) -> bool:
        return not self.data.get("counters")


class StatsSource:
    """Turns the cache's running counters into differences since the last call."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._last: dict[str, float] = {}

    def take(self) -> KVKeepStats | None:
        """What has changed since the last call; None if nothing has."""
        now = self._counters()
        counters = {
            name: amount - self._last.get(name, 0)
            for name, amount in now.items()
            if amount != self._last.get(name, 0)
        }
        if not counters:
            return None
        self._last = now
        return KVKeepStats({"counters": counters, "gauges": self._gauges()})

    def _counters(self) -> dict[str, float]:
        cache = self._cache
        values: dict[str, float] = {
            "requested_tokens": cache.counters.requested_tokens,
            "missed_tokens": cache.counters.missed_tokens,
            "stored_chunks": cache.counters.stored_chunks,
            "dropped_chunks": cache.counters.dropped_chunks,
            "evictions": cache.evictions,
        }
        for tier, counters in cache.tier_counters().items():
            for name in _TIER_COUNTERS:
                values[f"{tier}/{name}"] = getattr(counters, name)
        return values

    def _gauges(self) -> dict[str, float]:
        return {
            f"{tier}/{name}": amount
            for tier, usage in self._cache.usage().items()
            for name, amount in zip(_TIER_GAUGES, usage, strict=True)
        }


class KVKeepPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics in the API server and adds what arrives to them."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make_counter, make_gauge = metric_types[Counter], metric_types[Gauge]
        by_tier = [*labelnames, "tier"]
        self._labels = per_engine_labelvalues
        self._metrics: dict[str, Any] = {
            name: make_counter(name=f"kvkeep:{name}", documentation=meaning, labelnames=labelnames)
            for name, meaning in _CACHE_COUNTERS.items()
        }
        for name, meaning in _TIER_COUNTERS.items():
            self._metrics[f"/{name}"] = make_counter(
                name=f"kvkeep:{name}", documentation=meaning, labelnames=by_tier
            )
        for name, meaning in _TIER_GAUGES.items():
            self._metrics[f"/{name}"] = make_gauge(
                name=f"kvkeep:{name}", documentation=meaning, labelnames=by_tier
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self._labels[engine_idx]
        for name, amount in transfer_stats_data.get("counters", {}).items():
            self._at(name, labels).inc(amount)
        for name, amount in transfer_stats_data.get("gauges", {}).items():
            self._at(name, labels).set(amount)

    def _at(self, name: str, labels: list[object]) -> Any:
        tier, slash, metric = name.rpartition("/")
        if not slash:
            return self._metrics[name].labels(*labels)
        return self._metrics[f"/{metric}"].labels(*labels, tier)
