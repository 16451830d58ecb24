"""Least recently used first: the order that fits chained prefixes when the caller helps a little.

Keys of one request are a chain, and a chunk is worth nothing once a chunk before it is gone. LRU
keeps chains whole from the front, with no knowledge of the chain, if its owner touches and inserts
the keys of a request deepest first: every prefix is then more recent than what hangs from it, so
the end of a chain always goes before its start. That makes it leaf-first LRU, which others build a
radix tree for (Zheng et al., "SGLang", NeurIPS 2024, section 3).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class LRU(Generic[K]):
    """`Policy`: victims come in the order of their last use, an insert being a use.

    An `OrderedDict` and not a `dict`: deleting at a dict's front leaves holes that every later
    look at the front walks over again, which makes a steady stream of evictions quadratic.
    """

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K) -> None:
        """Hold `key` as the most recent."""
        if key in self._order:
            raise KeyError(key)
        self._order[key] = None

    def touch(self, key: K) -> None:
        """Make `key` the most recent."""
        self._order.move_to_end(key)

    def remove(self, key: K) -> None:
        """Forget `key`."""
        del self._order[key]

    def victims(self, keep: Container[K] = ()) -> Iterator[K]:
        """From the least to the most recent. Changes nothing."""
        for key in self._order:
            if key not in keep:
                yield key

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)
