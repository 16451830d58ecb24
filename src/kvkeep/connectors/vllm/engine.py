"""What kvkeep asks of vLLM, and what differs between its versions: all of it, in one file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvkeep.errors import LayoutError

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults as _Results,
    )
except ImportError:  # before 0.31
    _Results = None

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KVGroup(NamedTuple):
    """One KV cache group: layers that share a block table."""

    layer_names: tuple[str, ...]
    block_tokens: int
    page_bytes: tuple[int, ...]
    """Bytes of one block, by layer, without padding."""
    window: int | None
    """The sliding window in tokens; None for full attention."""


# Exact classes: a subclass changes which tokens a block holds or when it is taken away.
_FULL = ("FullAttentionSpec", "MLAAttentionSpec")
_SLIDING = ("SlidingWindowSpec",)
_WHY_NOT = {
    "MambaSpec": "a recurrent state is kept for the last token only, not for every prefix",
    "ChunkedLocalAttentionSpec": "start vLLM with --disable-hybrid-kv-cache-manager to serve it",
}


def kv_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[KVGroup, ...]:
    """The model's KV groups. Raises `LayoutError` for a model that can't be served right."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise LayoutError(f"{name} > 1 spreads a block's tokens over ranks: not supported yet")
    groups = tuple(_kv_group(group) for group in kv_cache_config.kv_cache_groups)
    if not groups:
        raise LayoutError("this model has no KV cache")
    if fails_by_request(groups) and not HANDLES_GROUPS:
        raise LayoutError(
            "this vLLM can't compute again what failed to load for a model with sliding windows; "
            "update it"
        )
    return groups


def fails_by_request(groups: Sequence[KVGroup]) -> bool:
    """Whether a load that failed must be told by request, rather than by block.

    With several groups a block's number does not tell whose it is. With a window the engine would
    go on computing at the first block that failed, without those before it.
    """
    return len(groups) > 1 or any(group.window is not None for group in groups)


def _kv_group(group: Any) -> KVGroup:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    spec = group.kv_cache_spec
    if not getattr(group, "enable_kv_transfer", True):
        raise LayoutError(f"layers {group.layer_names[:1]} hold KV that vLLM does not hand over")
    specs: dict[str, Any] = (
        dict(spec.kv_cache_specs)
        if isinstance(spec, UniformTypeKVCacheSpecs)
        else dict.fromkeys(group.layer_names, spec)
    )
    windows = {_window(name, specs[name]) for name in group.layer_names}
    if len(windows) > 1:
        raise LayoutError(f"layers of one KV group have different windows: {windows}")
    return KVGroup(
        layer_names=tuple(group.layer_names),
        block_tokens=spec.block_size,
        page_bytes=tuple(_page_bytes(specs[name]) for name in group.layer_names),
        window=windows.pop() if windows else _window("of an empty group", spec),
    )


def _window(layer: str, spec: Any) -> int | None:
    kind = type(spec).__name__
    if kind not in (*_FULL, *_SLIDING):
        reason = _WHY_NOT.get(kind, "this version of kvkeep does not know how it is used")
        raise LayoutError(f"layer {layer} has a {kind}, which can't be kept: {reason}")
    if getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1)) != 1:
        raise LayoutError(f"layer {layer} keeps one state for several tokens: not supported yet")
    if getattr(spec, "non_causal", False):
        raise LayoutError(f"layer {layer} looks at tokens that come later: no prefix can be kept")
    return int(spec.sliding_window) if kind in _SLIDING else None


def _page_bytes(spec: Any) -> int:
    # 0.32 pads pages apart from their content; before, a page had no padding to speak of.
    unpadded = getattr(spec, "unpadded_page_size_bytes", None)
    return int(unpadded if unpadded is not None else spec.page_size_bytes)


HANDLES_GROUPS = _Results is not None
"""Whether the engine can compute again what failed to load for a model of several KV groups.

Before, it knew failed loads by block alone, and stopped where a model had several groups.
"""


def transfer_results(received: set[str], failed: set[str]) -> Any:
    """Requests whose load has ended, and which of them failed. Not asked for before 0.31."""
    assert _Results is not None
    return _Results(finished_recving=received, failed_recving=failed)


def local_engines(vllm_config: VllmConfig) -> int:
    """How many data-parallel engines share this node, this one included."""
    parallel = vllm_config.parallel_config
    return max(1, int(getattr(parallel, "data_parallel_size_local", 1) or 1))


def is_one_of_unknown_many(vllm_config: VllmConfig) -> bool:
    """Whether this engine is a data-parallel one that was not told of the others.

    vLLM starts engines of a dense model as if each were alone; only a name tells.
    """
    transfer = vllm_config.kv_transfer_config
    engine_id = str(getattr(transfer, "engine_id", ""))
    return local_engines(vllm_config) == 1 and re.search(r"_dp\d+$", engine_id) is not None


_WHOLE_PROMPTS = frozenset({"CPU_MLA"})
"""Backends that compute a prompt from its first token on or wrongly: from a prefix on they give
other answers (tests/gate/features/groups.py). vLLM turns its own prefix cache off for them."""


def attention_backends(vllm_config: VllmConfig, layer_names: tuple[str, ...]) -> str:
    """Names of the attention backends of these layers, sorted, joined by commas.

    Raises `LayoutError` for one that can't go on from a prefix.
    """
    from vllm.distributed.kv_transfer.kv_connector import utils

    backends = utils.get_current_attn_backends(vllm_config, list(layer_names))
    names = {backend.get_name() for backend in backends}
    if names & _WHOLE_PROMPTS:
        raise LayoutError(
            f"attention backend {', '.join(sorted(names & _WHOLE_PROMPTS))} can't go on computing "
            "from a kept prefix; choose another one to use kvkeep"
        )
    return ",".join(sorted(names))


def placed_items(request: Any) -> list[tuple[int, int, str]]:
    """A request's multimodal items: (first position, one past the last, content hash)."""
    return [
        (
            feature.mm_position.offset,
            feature.mm_position.offset + feature.mm_position.length,
            feature.identifier,
        )
        for feature in getattr(request, "mm_features", None) or ()
    ]


def embed_bytes(request: Any, start: int, stop: int) -> bytes | None:
    """The prompt embeddings at positions `[start, stop)` as bytes, and which of the positions are
    computed from their tokens all the same; None where there are none.
    """
    import torch

    embeds = getattr(request, "prompt_embeds", None)
    if embeds is None or start >= len(embeds):
        return None
    part = embeds[start : min(stop, len(embeds))].contiguous().cpu()
    rows = part.view(torch.uint8).numpy().tobytes()
    are_tokens = getattr(request, "prompt_is_token_ids", None)
    return rows if are_tokens is None else rows + bytes(map(bool, are_tokens[start:stop]))


def hit_sources(by_tier: Mapping[str, int], num_tokens: int) -> dict[Any, int]:
    """Tokens by vLLM's kinds of source, from tokens by our tiers. They sum to `num_tokens`."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:  # before 0.32 nobody asks
        return {}
    kinds = {"memory": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
    sources: dict[Any, int] = {}
    for tier, count in by_tier.items():
        kind = kinds.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
        if count:
            sources[kind] = sources.get(kind, 0) + count
    if sum(sources.values()) != num_tokens:
        return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_tokens} if num_tokens else {}
    return sources
