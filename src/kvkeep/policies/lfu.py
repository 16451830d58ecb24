"""Least frequently used first, with counts that grow old: LFU with dynamic aging (LFU-DA).

Plain LFU never forgets: a key that was hot last week outlives everything that came since. LFU-DA
(Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating content management techniques for Web
proxy caches", Performance Evaluation Review 27(4), 2000) orders by uses plus *age*, where the age
is the priority of the last victim: newcomers start level with what is about to go, and a key that
is used no more is overtaken. No counter is ever swept, so there is no pause.

Counts also stop early (`MAX_USES`), as the short counters of TinyLFU do (Einziger, Friedman and
Manes, ACM Transactions on Storage 13(4), 2017): how far a key can run ahead is bounded, and so is
the number of buckets that the O(1) scheme of Shah, Mitra and Matani (2010) keeps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_USES = 4
"""With `benchmarks/policies.py`, mean of Belady: 0.813 at 2, 0.816 at 4, 0.814 at 7, 0.803 at 15.
A few uses tell a shared prefix from the rest; more only make it harder to forget."""


class LFU(Generic[K]):
    """`Policy`: victims come by rising priority, which is uses (an insert is one) plus age.

    Equals go in the order in which they reached their priority, least recent first.
    """

    __slots__ = ("_age", "_buckets", "_priority", "_uses")

    def __init__(self) -> None:
        self._age = 0
        self._uses: dict[K, int] = {}
        self._priority: dict[K, int] = {}
        # No bucket is empty. At most MAX_USES + 1 of them lie above the age; what is below was
        # passed over because its owner asked to keep it.
        self._buckets: dict[int, OrderedDict[K, None]] = {}

    def insert(self, key: K) -> None:
        """Hold `key` with one use, counted from the present age."""
        if key in self._uses:
            raise KeyError(key)
        self._uses[key] = 1
        self._enter(key, self._age + 1)

    def touch(self, key: K) -> None:
        """Count a use, and lift `key` to the present age."""
        uses = self._uses[key]
        if uses < MAX_USES:
            uses += 1
            self._uses[key] = uses
        old, new = self._priority[key], self._age + uses
        if new == old:
            self._buckets[old].move_to_end(key)
        else:
            self._leave(key)
            self._enter(key, new)

    def remove(self, key: K) -> None:
        """Forget `key` and its count."""
        del self._uses[key]
        self._leave(key)

    def victims(self, keep: Container[K] = ()) -> Iterator[K]:
        """By rising priority. The age rises to the priority of the first key that comes.

        Rising here and not in `remove` keeps a deleted hot key from ageing all others, and
        asking twice without evicting changes nothing more.
        """
        first = True
        for priority in sorted(self._buckets):
            for key in self._buckets[priority]:
                if key in keep:
                    continue
                if first:
                    self._age = max(self._age, priority)
                    first = False
                yield key

    def __contains__(self, key: object) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def _enter(self, key: K, priority: int) -> None:
        self._priority[key] = priority
        bucket = self._buckets.get(priority)
        if bucket is None:
            bucket = self._buckets[priority] = OrderedDict()
        bucket[key] = None

    def _leave(self, key: K) -> None:
        priority = self._priority.pop(key)
        bucket = self._buckets[priority]
        del bucket[key]
        if not bucket:
            del self._buckets[priority]
