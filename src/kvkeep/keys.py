r"""Keys: which KV may stand for which tokens.

A chunk's digest is SHA-256 over everything that its KV depends on: the namespace (model, layout,
dtype and so on), the request's own conditions (salt, LoRA), and every token up to and including
the chunk. The hash runs on over the request, so a growing request hashes each token once, and
chunk i's digest commits to chunks 0..i without being computed from i digests.

What is hashed, as 32-bit little-endian words (golden vectors: `tests/test_keys.py`):

    "kvkeep key 1\0\0\0\0"  namespace digest (32 bytes)
    extras of the request        each: MARK, kind, byte length, bytes padded to a word
    then for each chunk:         its token ids
                                 extras of the chunk (multimodal items, prompt embeddings)

MARK is 0xFFFFFFFF, which is no token id, so extras and tokens can't be taken for one another.
Kinds: 1 salt, 2 LoRA, 3 multimodal item, 4 prompt embeddings, 5 epoch, in this order. The content
of 1, 2, 3 and 5 is a list of strings, each a 4-byte length and UTF-8: (salt), (what names the
adapter), (identifier, first position, one past the last; both in decimal), (epoch). That of 4 is
the SHA-256 of the embeddings' bytes at the chunk's positions.
No process-wide seed, no environment variable, no Python `hash()`: the same digests everywhere.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvkeep.types import Digest

FORMAT_VERSION = 1
"""Raised whenever the bytes of a kept chunk or the rules of this module change."""

_PREAMBLE = b"kvkeep key 1\0\0\0\0"
_MARK = 0xFFFFFFFF
_SALT, _LORA, _MULTIMODAL, _EMBEDS, _EPOCH = 1, 2, 3, 4, 5
_SLUG_CHARS = 48


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides tokens that must be equal for KV to be reusable.

    `fields` holds it as names and values that a person can read; `digest` commits to all of
    them, and `name` is what directories and remote keys are called.
    """

    label: str
    """The model's short name, for people only."""
    fields: tuple[tuple[str, str], ...]
    """Sorted (name, value) pairs."""
    digest: bytes
    """32 bytes: SHA-256 of the fields as canonical JSON."""
    name: str
    """`<label as file name>-<first 16 hex digits of digest>`."""

    @classmethod
    def of(cls, label: str, fields: Mapping[str, str]) -> Namespace:
        """Make one; `fields` may come in any order, `format` is added here."""
        complete = {**fields, "format": str(FORMAT_VERSION)}
        pairs = tuple(sorted(complete.items()))
        canonical = json.dumps(pairs, ensure_ascii=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode("ascii")).digest()
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", label).strip("-.")[:_SLUG_CHARS] or "model"
        return cls(label=label, fields=pairs, digest=digest, name=f"{slug}-{digest[:8].hex()}")


class Placed(NamedTuple):
    """A multimodal item: its content's identifier and the prompt positions it stands for."""

    start: int
    """First token position."""
    stop: int
    """One past the last token position."""
    identifier: str
    """Content hash, as the engine made it."""


def _extra(kind: int, content: bytes) -> bytes:
    padding = b"\0" * (-len(content) % 4)
    return struct.pack("<III", _MARK, kind, len(content)) + content + padding


def _joined(*parts: str) -> bytes:
    """Several strings as one, so that no two different lists give the same bytes."""
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(struct.pack("<I", len(part)) + part for part in encoded)


class KeyChain:
    """The digests of one request's chunks, made as its tokens become known.

    Not thread-safe: one request belongs to one scheduler.
    """

    __slots__ = ("chunk_tokens", "digests", "items", "_hasher", "_embeds")

    def __init__(
        self,
        namespace: Namespace,
        chunk_tokens: int,
        *,
        salt: str | None = None,
        lora: tuple[str, ...] | None = None,
        epoch: str | None = None,
        items: Sequence[Placed] = (),
        embeds: Callable[[int, int], bytes | None] | None = None,
    ) -> None:
        """`lora`: what names the adapter (name, path or id), in a fixed order.

        `epoch`: set anew where all that was kept before must not be given any more.
        `items`: the prompt's multimodal items. `embeds(start, stop)`: the bytes of the prompt
        embeddings that stand in for the tokens at these positions, or None where tokens do.
        """
        self.chunk_tokens = chunk_tokens
        self.digests: list[Digest] = []
        self.items = items
        """May be replaced by a longer list before an `extend`: a session adds items as it goes."""
        self._embeds = embeds
        self._hasher = hashlib.sha256(_PREAMBLE + namespace.digest)
        if salt is not None:
            self._hasher.update(_extra(_SALT, _joined(salt)))
        if lora is not None:
            self._hasher.update(_extra(_LORA, _joined(*lora)))
        if epoch is not None:
            self._hasher.update(_extra(_EPOCH, _joined(epoch)))

    @property
    def num_tokens(self) -> int:
        """How many tokens the digests cover: a whole number of chunks."""
        return len(self.digests) * self.chunk_tokens

    def extend(self, tokens: Sequence[int]) -> list[Digest]:
        """Hash the chunks that `tokens` (the whole request so far) completes; all digests.

        Only tokens past `num_tokens` are read. Raises `ValueError` for a token id that does not
        fit 32 bits or equals 0xFFFFFFFF; the chain is then unusable.
        """
        start = self.num_tokens
        stop = len(tokens) - len(tokens) % self.chunk_tokens
        if stop <= start:
            return self.digests
        try:
            words = array("I", tokens[start:stop])
        except (OverflowError, TypeError) as error:
            raise ValueError(f"token ids must be integers from 0 to 2**32 - 2: {error}") from error
        if sys.byteorder == "big":
            words.byteswap()
        raw = memoryview(words).cast("B")
        # The mark may only stand before an extra; a vocabulary never gets near it.
        if b"\xff\xff\xff\xff" in words.tobytes() and _MARK in words:
            raise ValueError(f"token id {_MARK} is reserved")
        if self.items or self._embeds is not None:
            self._extend_with_extras(raw, start, stop)
            return self.digests
        step = self.chunk_tokens * 4
        update, digest, append = self._hasher.update, self._hasher.digest, self.digests.append
        for at in range(0, len(raw), step):
            update(raw[at : at + step])
            append(Digest(digest()))
        return self.digests

    def _extend_with_extras(self, raw: memoryview, start: int, stop: int) -> None:
        items = sorted(self.items)
        for first in range(start, stop, self.chunk_tokens):
            last = first + self.chunk_tokens
            self._hasher.update(raw[(first - start) * 4 : (last - start) * 4])
            for item in items:
                if item.start < last and item.stop > first:
                    placed = _joined(item.identifier, str(item.start), str(item.stop))
                    self._hasher.update(_extra(_MULTIMODAL, placed))
            embedded = self._embeds(first, last) if self._embeds is not None else None
            if embedded is not None:
                self._hasher.update(_extra(_EMBEDS, hashlib.sha256(embedded).digest()))
            self.digests.append(Digest(self._hasher.digest()))
