"""The order of eviction: a data structure only.

A policy holds keys, never bytes. It takes no lock, does no I/O and reads no clock; its owner
serialises all calls. One file a policy; the tests for all are `kvkeep.testing.policies`.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Policy(Protocol[K]):
    """Orders the keys of one tier by what they are worth.

    The caller guarantees that `insert` gets a key the policy does not hold, and that `touch` and
    `remove` get one it does. Breaking that raises `KeyError` and changes nothing.
    """

    def insert(self, key: K) -> None:
        """A key was stored."""
        ...

    def touch(self, key: K) -> None:
        """A key was used (a hit)."""
        ...

    def remove(self, key: K) -> None:
        """A key is gone: evicted, deleted or replaced."""
        ...

    def victims(self, keep: Container[K] = ()) -> Iterator[K]:
        """Keys in eviction order, each at most once, skipping those in `keep`.

        The caller removes those it takes, only after it stopped iterating. An iteration that is
        left early evicts nothing; a policy may use it to tidy its own queues.
        """
        ...

    def __contains__(self, key: object) -> bool: ...

    def __len__(self) -> int: ...
