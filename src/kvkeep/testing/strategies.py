"""Hypothesis strategies for the values that kvkeep's parts pass to each other."""

from __future__ import annotations

from hypothesis import strategies as st

from kvkeep.codecs.frame import frame_nbytes, seal
from kvkeep.keys import Namespace
from kvkeep.types import ChunkKey, Digest

LARGEST_TOKEN = 2**32 - 2

digests: st.SearchStrategy[Digest] = st.binary(min_size=32, max_size=32).map(Digest)

namespaces: st.SearchStrategy[Namespace] = st.builds(
    Namespace.of,
    st.text(max_size=60),
    st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4),
)

chunk_keys: st.SearchStrategy[ChunkKey] = st.builds(
    ChunkKey, namespaces.map(lambda namespace: namespace.name), st.integers(0, 65535), digests
)

tokens: st.SearchStrategy[int] = st.integers(0, 200_000) | st.integers(0, LARGEST_TOKEN)


def token_lists(*, min_size: int = 0, max_size: int = 64) -> st.SearchStrategy[list[int]]:
    """A request's token ids."""
    return st.lists(tokens, min_size=min_size, max_size=max_size)


@st.composite
def frames(draw: st.DrawFn, *, max_payload_nbytes: int = 9000) -> memoryview:
    """A sealed frame, writable, with a payload of up to `max_payload_nbytes`."""
    payload = draw(st.binary(max_size=max_payload_nbytes))
    frame = memoryview(bytearray(frame_nbytes(len(payload))))
    frame[4096 : 4096 + len(payload)] = payload
    return seal(
        frame,
        namespace_digest=draw(st.binary(min_size=32, max_size=32)),
        digest=draw(digests),
        rank=draw(st.integers(0, 65535)),
        num_tokens=draw(st.integers(1, 65536)),
        raw_nbytes=draw(st.integers(0, 2**63)),
        payload_nbytes=len(payload),
        codec=draw(st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=16)),
    )
