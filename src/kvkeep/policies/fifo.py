"""First in, first out: the order of insertion, whatever was used since.

The cheapest order there is, and the baseline that every other one has to beat.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FIFO(Generic[K]):
    """`Policy`: victims come in the order they were inserted.

    A key that was removed and inserted again is new. An `OrderedDict` for the reason that
    `kvkeep.policies.lru.LRU` gives.
    """

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K) -> None:
        """Hold `key` behind all others."""
        if key in self._order:
            raise KeyError(key)
        self._order[key] = None

    def touch(self, key: K) -> None:
        """Nothing: use does not count."""
        if key not in self._order:
            raise KeyError(key)

    def remove(self, key: K) -> None:
        """Forget `key`."""
        del self._order[key]

    def victims(self, keep: Container[K] = ()) -> Iterator[K]:
        """From the oldest to the newest. Changes nothing."""
        for key in self._order:
            if key not in keep:
                yield key

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)
