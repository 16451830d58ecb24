"""From settings to a running cache: the one place that knows every part."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import cast

from kvkeep.cache import KVCache
from kvkeep.config import KVKeepConfig
from kvkeep.errors import ConfigError
from kvkeep.hierarchy import ChunkShape, Hierarchy, TierLink
from kvkeep.keys import Namespace
from kvkeep.memory.pool import SlotPool
from kvkeep.policies import make_policy
from kvkeep.tiers.disk import DiskTier, ODirect
from kvkeep.transfer import in_background

logger = logging.getLogger(__name__)

DEFAULT_CHUNK_TOKENS = 16
"""Small chunks hit more: on the taubench agent trace 0.82 of tokens at 16, 0.37 at 256."""
_STORE_SHARE = 2
"""At most one half of the pool may wait to be written: the rest is there to be used."""


def choose_chunk_tokens(config: KVKeepConfig, block_tokens: int) -> int:
    """Tokens in a chunk: a whole number of the engine's blocks.

    Raises `ConfigError` that names the nearest right values.
    """
    if config.save_unfull_chunk:
        return block_tokens
    wanted = config.chunk_tokens
    if wanted is None:
        return max(1, -(-DEFAULT_CHUNK_TOKENS // block_tokens)) * block_tokens
    if wanted % block_tokens == 0:
        return wanted
    below = wanted - wanted % block_tokens
    near = [str(value) for value in (below, below + block_tokens) if value > 0]
    raise ConfigError(
        f"chunk_tokens={wanted} is not a multiple of the engine's block size of {block_tokens} "
        f"tokens; the nearest right values are {' and '.join(near)}"
    )


def open_cache(
    config: KVKeepConfig, namespace: Namespace, shape: ChunkShape, *, num_engines: int = 1
) -> KVCache:
    """A cache for one engine, opened. Raises `ConfigError` if its memory can't be had.

    `num_engines`: how many engines of this node share the memory that the settings give.
    """
    memory = config.memory
    size_bytes = (memory.size_bytes if memory.enabled else memory.staging_bytes) // num_engines
    pool = _make_pool(size_bytes, shape.slot_bytes, "size" if memory.enabled else "staging")
    hierarchy = Hierarchy(_links(config, pool), pool, namespace, shape)
    cache = KVCache(
        pool,
        make_policy(memory.policy, pool.num_slots),
        hierarchy,
        shape,
        keeps_memory=memory.enabled,
    )
    cache.open()
    for link in hierarchy.links:
        if isinstance(link.tier, DiskTier):
            link.tier.describe(namespace.name, {"label": namespace.label, **dict(namespace.fields)})
    # Pages come with their first use, at a cost the first requests would pay.
    in_background("kvkeep-populate", lambda: pool.memory.populate(0, pool.memory.nbytes))
    logger.info(
        "memory tier: %d chunks of %d tokens, %.3g GB; namespace %s",
        pool.num_slots,
        shape.num_tokens,
        pool.memory.nbytes / 1e9,
        namespace.name,
    )
    return cache


def _make_pool(size_bytes: int, slot_bytes: Sequence[int], setting: str) -> SlotPool:
    needed = sum(slot_bytes)
    if size_bytes < needed:
        raise ConfigError(
            f"memory.{setting} is {size_bytes} bytes, but one chunk of this model needs {needed}; "
            "raise it, or lower chunk_tokens"
        )
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size_bytes > installed:
        raise ConfigError(
            f"memory.{setting} is {size_bytes / 2**30:.4g} GiB, but this machine has "
            f"{installed / 2**30:.4g} GiB of memory"
        )
    try:
        return SlotPool.create(size_bytes, slot_bytes)
    except OSError as error:
        raise ConfigError(f"memory.{setting}: no {size_bytes} bytes to be had: {error}") from error


def _links(config: KVKeepConfig, pool: SlotPool) -> list[TierLink]:
    links: list[TierLink] = []
    if config.disk.paths:
        disk = config.disk
        tier = DiskTier(
            disk.paths,
            disk.size_bytes,
            policy_name=disk.policy,
            odirect=cast("ODirect", disk.odirect),
        )
        waiting = min(disk.write_queue_bytes, pool.memory.nbytes // _STORE_SHARE)
        links.append(TierLink.to(tier, num_threads=disk.io_threads, max_store_bytes=waiting))
    if config.remote.url is not None:
        raise ConfigError(
            "remote.url: this version of kvkeep keeps chunks in memory and on disk only; "
            "set disk.paths, or leave remote.url out"
        )
    return links
