"""Segmented LRU: LRU that keeps a part of the tier for what was used at least twice.

Karedla, Love and Wherry, "Caching strategies to improve disk system performance", IEEE Computer
27(3), 1994. Most chunks of a chat are never asked for again, and under LRU each of them travels
through the whole tier before it leaves. Here a key enters *probation*; its first use moves it to
*protected*, and what protected has no room for goes back to probation as the most recent there.

Chains stay whole from the front for the same reason, and on the same condition, as in
`kvkeep.policies.lru`: the owner touches and inserts deepest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

PROTECTED_SHARE = 0.2
"""A low, flat hill. The replay of `benchmarks/policies.py` over its three traces and each half of
the conversation alone gives, as mean of Belady: 0.702 at 0.05, 0.706 at 0.1, 0.708 at 0.15 to 0.25,
0.702 at 0.4; LRU 0.696. Over its three traces at 0.8, SLRU is worse than LRU, 0.790 to 0.811."""


class SLRU(Generic[K]):
    """`Policy`: victims come from probation, then from protected, least recent first in each.

    `capacity` is the number of keys that the owner can hold. It sizes protected only; holding
    more than that is allowed. Below five keys there is no protected part, and this is LRU.
    """

    __slots__ = ("_probation", "_protected", "_protected_max")

    def __init__(self, capacity: int) -> None:
        self._protected_max = int(capacity * PROTECTED_SHARE)
        self._probation: OrderedDict[K, None] = OrderedDict()
        self._protected: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K) -> None:
        """Hold `key` as the most recent of probation."""
        if key in self._probation or key in self._protected:
            raise KeyError(key)
        self._probation[key] = None

    def touch(self, key: K) -> None:
        """Make `key` the most recent of protected; its least recent may fall to probation."""
        protected = self._protected
        if key in protected:
            protected.move_to_end(key)
            return
        del self._probation[key]
        protected[key] = None
        if len(protected) > self._protected_max:
            fallen, _ = protected.popitem(last=False)
            self._probation[fallen] = None

    def remove(self, key: K) -> None:
        """Forget `key`."""
        if key in self._probation:
            del self._probation[key]
        else:
            del self._protected[key]

    def victims(self, keep: Container[K] = ()) -> Iterator[K]:
        """Probation, then protected, each from the least recent. Changes nothing."""
        for segment in (self._probation, self._protected):
            for key in segment:
                if key not in keep:
                    yield key

    def __contains__(self, key: object) -> bool:
        return key in self._probation or key in self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)
