"""S3-FIFO: three queues, so that what is used once leaves quickly and what is used again stays.

Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023,
algorithm 1. New keys enter a *small* queue of a tenth of the tier. Those used again in time move to
the *main* queue, which gives each key one more round for each use; the others leave, and a *ghost*
queue remembers their names: one that comes back while remembered goes to main at once.

What differs from the paper, because here the owner evicts and not the policy: `victims` only
offers, and any number at a time. Moving from small to main and the rounds in main happen as the
offers pass by; what was offered keeps its place until the owner removes it. Only a key that was
offered from small and then removed becomes a ghost: a key deleted for another reason was not
evicted, and its return says nothing about the size of the small queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

SMALL_SHARE = 0.1
"""Section 5.2 of the paper: between 0.05 and 0.2 hardly matters."""
MAX_USES = 3
"""Two bits a key, as in the paper."""
PROMOTE_USES = 1
"""Uses after the insert that take a key from small to main. The paper asks for two; a chunk that
was used again once is a conversation that goes on. With `benchmarks/policies.py`, mean of Belady:
0.807 at 1, 0.793 at 2."""


class S3FIFO(Generic[K]):
    """`Policy`: victims come from small while it is over its share, else from main.

    `capacity` is the number of keys that the owner can hold, at least 1. It sizes the small and
    the ghost queue only; holding more than that is allowed.

    One iteration of `victims` at a time: a later call starts over and takes the place of an
    earlier one, which must not be resumed.
    """

    __slots__ = (
        "_ghost",
        "_ghost_max",
        "_main",
        "_main_passed",
        "_small",
        "_small_passed",
        "_small_share",
        "_uses",
    )

    def __init__(self, capacity: int) -> None:
        self._small_share = max(1, int(capacity * SMALL_SHARE))
        self._ghost_max = max(1, capacity - self._small_share)
        self._uses: dict[K, int] = {}
        # Each queue is in two parts, so that an iteration that stands still between two offers
        # needs no iterator into a queue that its own moves change: what it has passed (offered,
        # or kept), then what lies ahead. The next iteration puts the parts together again, at a
        # cost that the passing has paid for.
        self._small: OrderedDict[K, None] = OrderedDict()
        self._small_passed: OrderedDict[K, bool] = OrderedDict()  # True: offered
        self._main: OrderedDict[K, None] = OrderedDict()
        self._main_passed: OrderedDict[K, None] = OrderedDict()
        self._ghost: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K) -> None:
        """Hold `key`: in main if a ghost remembers it, else in small."""
        if key in self._uses:
            raise KeyError(key)
        self._uses[key] = 0
        if key in self._ghost:
            del self._ghost[key]
            self._main[key] = None
        else:
            self._small[key] = None

    def touch(self, key: K) -> None:
        """Count a use. Moves nothing."""
        uses = self._uses[key]
        if uses < MAX_USES:
            self._uses[key] = uses + 1

    def remove(self, key: K) -> None:
        """Forget `key`; a ghost remembers it if it was the last iteration's offer from small."""
        del self._uses[key]
        if key in self._small_passed:
            if self._small_passed.pop(key):
                self._ghost[key] = None
                if len(self._ghost) > self._ghost_max:
                    self._ghost.popitem(last=False)
        elif key in self._main_passed:
            del self._main_passed[key]
        elif key in self._main:
            del self._main[key]
        else:
            del self._small[key]

    def victims(self, keep: Container[K] = ()) -> Iterator[K]:
        """In S3-FIFO's order, as if each key that was offered before were gone.

        Ends: every step either passes a key for good or takes one use from it.
        """
        self._rewind()
        small, main, uses = self._small, self._main, self._uses
        small_kept = 0
        while small or main:
            if small and (len(small) + small_kept >= self._small_share or not main):
                while small:
                    key, _ = small.popitem(last=False)
                    if key in keep:
                        self._small_passed[key] = False
                        small_kept += 1
                    elif uses[key] >= PROMOTE_USES:
                        uses[key] = 0
                        main[key] = None
                    else:
                        self._small_passed[key] = True
                        yield key
                        break
            else:
                while main:
                    key, _ = main.popitem(last=False)
                    if key in keep:
                        self._main_passed[key] = None
                    elif uses[key]:
                        uses[key] -= 1
                        main[key] = None
                    else:
                        self._main_passed[key] = None
                        yield key
                        break

    def __contains__(self, key: object) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def _rewind(self) -> None:
        for key in reversed(self._small_passed):
            self._small[key] = None
            self._small.move_to_end(key, last=False)
        self._small_passed.clear()
        for key in reversed(self._main_passed):
            self._main[key] = None
            self._main.move_to_end(key, last=False)
        self._main_passed.clear()
