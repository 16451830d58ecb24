"""Values that cross modules. They hold no behaviour beyond naming themselves."""

from __future__ import annotations

from typing import NamedTuple, NewType

Digest = NewType("Digest", bytes)
"""32 bytes: SHA-256 over (namespace, salt, LoRA, all tokens up to and including this chunk)."""


class ChunkKey(NamedTuple):
    """What a tier keeps a chunk under: one rank's part of one chunk.

    `digest` alone decides equality of content across the ranks of one namespace (it covers the
    namespace); `namespace` and `rank` are there so that a person can read where a file belongs.
    """

    namespace: str
    """File-name-safe: the model's short name, then 16 hex digits of the namespace's digest."""
    rank: int
    """The engine rank whose heads and layers these bytes are, counted over PP and TP."""
    digest: Digest

    @property
    def name(self) -> str:
        """The key's full readable name, `namespace/r<rank>/<64 hex digits>`."""
        return f"{self.namespace}/r{self.rank}/{self.digest.hex()}"
