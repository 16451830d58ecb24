"""What kvkeep asks of vLLM, and what differs between its versions: all of it, in one file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvkeep.errors import LayoutError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KVGroup(NamedTuple):
    """One KV cache group: layers that share a block table."""

    number: int
    layer_names: tuple[str, ...]
    block_tokens: int
    page_bytes: tuple[int, ...]
    """Bytes of one block, by layer, without padding."""


def only_group(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVGroup:
    """The engine's one group of full attention. Raises `LayoutError` for every other model."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise LayoutError(
            f"this model has {len(groups)} KV cache groups ({', '.join(kinds)}); "
            "this version of kvkeep serves models with one group of full attention"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise LayoutError(f"{name} > 1 spreads a block's tokens over ranks: not supported yet")
    group = groups[0]
    spec = group.kv_cache_spec
    specs: dict[str, Any] = (
        dict(spec.kv_cache_specs)
        if isinstance(spec, UniformTypeKVCacheSpecs)
        else dict.fromkeys(group.layer_names, spec)
    )
    for name, layer_spec in specs.items():
        if not isinstance(layer_spec, FullAttentionSpec):
            kind = type(layer_spec).__name__
            raise LayoutError(f"layer {name} has a {kind}, which kvkeep does not serve yet")
    return KVGroup(
        number=0,
        layer_names=tuple(group.layer_names),
        block_tokens=spec.block_size,
        page_bytes=tuple(_page_bytes(specs[name]) for name in group.layer_names),
    )


def _page_bytes(spec: Any) -> int:
    # 0.32 pads pages apart from their content; before, a page had no padding to speak of.
    unpadded = getattr(spec, "unpadded_page_size_bytes", None)
    return int(unpadded if unpadded is not None else spec.page_size_bytes)


def attention_backends(vllm_config: VllmConfig, layer_names: tuple[str, ...]) -> str:
    """Names of the attention backends of these layers, sorted, joined by commas."""
    from vllm.distributed.kv_transfer.kv_connector import utils

    backends = utils.get_current_attn_backends(vllm_config, list(layer_names))
    return ",".join(sorted({backend.get_name() for backend in backends}))


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
    """The prompt embeddings at positions `[start, stop)` as bytes; None where there are none."""
    import torch

    embeds = getattr(request, "prompt_embeds", None)
    if embeds is None or start >= len(embeds):
        return None
    part = embeds[start : min(stop, len(embeds))].contiguous().cpu()
    return part.view(torch.uint8).numpy().tobytes()


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
