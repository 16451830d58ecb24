"""Orders of eviction, one file each."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from kvkeep.errors import ConfigError
from kvkeep.policies.base import Policy
from kvkeep.policies.fifo import FIFO
from kvkeep.policies.lfu import LFU
from kvkeep.policies.lru import LRU
from kvkeep.policies.mru import MRU
from kvkeep.policies.s3fifo import S3FIFO
from kvkeep.policies.slru import SLRU

__all__ = [
    "DEFAULT_POLICY",
    "FIFO",
    "LFU",
    "LRU",
    "MRU",
    "POLICY_NAMES",
    "S3FIFO",
    "SLRU",
    "Policy",
    "make_policy",
]

K = TypeVar("K", bound=Hashable)

_FACTORIES: dict[str, Callable[[int], Policy[Any]]] = {
    "lru": lambda capacity: LRU[Any](),
    "slru": SLRU,
    "lfu": lambda capacity: LFU[Any](),
    "s3fifo": S3FIFO,
    "fifo": lambda capacity: FIFO[Any](),
    "mru": lambda capacity: MRU[Any](),
}

POLICY_NAMES = tuple(_FACTORIES)

DEFAULT_POLICY = "slru"
"""The best of these on one chat and two agent traces at six sizes, `python benchmarks/policies.py`:

    mean of Belady       slru 0.820  lfu 0.816  lru 0.811  s3fifo 0.807  fifo 0.785  mru 0.488
    chat, 2 % of blocks  slru 0.094  lfu 0.086  lru 0.080  s3fifo 0.108  fifo 0.078  mru 0.049
    chat, 10 %           slru 0.298  lfu 0.298  lru 0.288  s3fifo 0.252  fifo 0.258  mru 0.073
    chat, 20 %           slru 0.353  lfu 0.354  lru 0.359  s3fifo 0.317  fifo 0.326  mru 0.110

S3-FIFO wins only where the cache is far too small, and LRU by little where it is nearly enough. The
constants of slru, lfu and s3fifo were chosen on these same traces, so small leads are soft; LRU has
none. A touch that promotes costs about five times LRU's, any other 1.2 times. Hit rates do not
depend on the machine; table and costs: `benchmarks/results/policies.json`."""


# K is what the caller expects: `self._policy: Policy[ChunkKey] = make_policy(...)`.
def make_policy(name: str, capacity: int) -> Policy[K]:  # pyright: ignore[reportInvalidTypeVarUse]
    """An empty policy called `name`, in any case, for a tier that can hold `capacity` keys.

    `capacity` sizes the inner queues of those that have any; who enforces it is the owner.
    Raises `ConfigError` for an unknown name, and for a capacity below 1.
    """
    factory = _FACTORIES.get(name.lower())
    if factory is None:
        near = difflib.get_close_matches(name.lower(), POLICY_NAMES, n=1, cutoff=0.5)
        hint = f", did you mean {near[0]!r}?" if near else ";"
        raise ConfigError(f"unknown policy {name!r}{hint} known are {', '.join(POLICY_NAMES)}")
    if capacity < 1:
        raise ConfigError(f"policy {name!r} needs a capacity of at least 1 key, not {capacity}")
    return factory(capacity)
