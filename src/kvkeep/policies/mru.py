"""Most recently used first: right for loops longer than the cache, and for hardly anything else.

A trace that reads the same sequence over and over through a cache too small for it gives LRU no
hits at all, and MRU nearly as many as any order can (Chou and DeWitt, "An evaluation of buffer
management strategies for relational database systems", VLDB 1985). Chat and agent traces are not
like that; the policy is here because people who come from LMCache may have it in their settings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class MRU(Generic[K]):
    """`Policy`: victims come in the reverse order of their last use, an insert being a use."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K) -> None:
        """Hold `key` as the most recent, so the first to go."""
        if key in self._order:
            raise KeyError(key)
        self._order[key] = None

    def touch(self, key: K) -> None:
        """Make `key` the most recent, so the first to go."""
        self._order.move_to_end(key)

    def remove(self, key: K) -> None:
        """Forget `key`."""
        del self._order[key]

    def victims(self, keep: Container[K] = ()) -> Iterator[K]:
        """From the most to the least recent. Changes nothing."""
        for key in reversed(self._order):
            if key not in keep:
                yield key

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)
