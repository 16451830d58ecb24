r"""The frame: a chunk at rest, with all that is needed to doubt it.

    offset  bytes  field (little-endian)
    0       8      magic "KVKEEP\r\n"
    8       2      version
    10      2      rank
    12      4      tokens in the chunk
    16      16     codec name, NUL-padded ASCII
    32      32     namespace digest (it covers layout, dtype, world size, chunk_tokens)
    64      32     chunk digest
    96      8      raw bytes (before encoding)
    104     8      payload bytes (as they lie here)
    112     16     XXH3-128 of the payload
    128     8      XXH3-64 of bytes 0..127
    136            zeros up to HEADER_BYTES
    4096           payload, then padding to a multiple of 4096

The header fills a page of its own, so that payload and file both start on one, and a frame is
written and read with O_DIRECT in one piece. XXH3 guards against accidents (torn writes, flipped
bits, mixed-up files), not against people: encryption at rest is what keeps those out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from kvkeep.errors import FrameError
from kvkeep.memory.pool import ALIGNMENT, HEADER_BYTES
from kvkeep.types import Digest

VERSION = 1
_MAGIC = b"KVKEEP\r\n"
_FIELDS = struct.Struct("<8sHHI16s32s32sQQ16s")
_CHECK = struct.Struct("<Q")
_CODEC_BYTES = 16
RAW = "raw"
"""The codec that changes nothing: payload and KV are the same bytes."""
_ZEROS = bytes(HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a frame says of itself."""

    codec: str
    namespace_digest: bytes
    digest: Digest
    rank: int
    num_tokens: int
    raw_nbytes: int
    payload_nbytes: int
    checksum: bytes
    version: int = VERSION


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def frame_nbytes(payload_nbytes: int) -> int:
    """How long a whole frame is: header, payload, padding."""
    return HEADER_BYTES + padded(payload_nbytes)


def payload_checksum(payload: memoryview | bytes) -> bytes:
    """16 bytes; releases the GIL while it runs."""
    return xxhash.xxh3_128_digest(payload)


def write_header(frame: memoryview, header: FrameHeader) -> None:
    """Put `header` into the first `HEADER_BYTES` of `frame` (writable, format "B").

    Raises `ValueError` for a field that does not fit its place.
    """
    if len(header.codec.encode("ascii")) > _CODEC_BYTES:
        raise ValueError(f"codec name {header.codec!r} is longer than {_CODEC_BYTES} bytes")
    for name, value, nbytes in (
        ("namespace digest", header.namespace_digest, 32),
        ("chunk digest", header.digest, 32),
        ("checksum", header.checksum, 16),
    ):
        if len(value) != nbytes:
            raise ValueError(f"a {name} has {nbytes} bytes, not {len(value)}")
    packed = _FIELDS.pack(
        _MAGIC,
        header.version,
        header.rank,
        header.num_tokens,
        header.codec.encode("ascii"),
        header.namespace_digest,
        header.digest,
        header.raw_nbytes,
        header.payload_nbytes,
        header.checksum,
    )
    checked = packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed))
    frame[:HEADER_BYTES] = checked + _ZEROS[len(checked) :]


def read_header(frame: memoryview) -> FrameHeader:
    """The header of `frame`, whose own checksum holds. Raises `FrameError` otherwise."""
    if len(frame) < HEADER_BYTES:
        raise FrameError("truncated", f"{len(frame)} bytes are no frame: the header alone has 4096")
    packed = bytes(frame[: _FIELDS.size])
    fields = _FIELDS.unpack(packed)
    magic, version, rank, num_tokens, codec, namespace, digest, raw, payload, checksum = fields
    if magic != _MAGIC:
        raise FrameError("magic", f"starts with {magic!r}, not {_MAGIC!r}: no frame of kvkeep")
    # Checked before the header's checksum: a later format may sum its header another way.
    if version != VERSION:
        raise FrameError("version", f"frame format {version}; this kvkeep reads format {VERSION}")
    (check,) = _CHECK.unpack_from(frame, _FIELDS.size)
    if check != xxhash.xxh3_64_intdigest(packed):
        raise FrameError("header", "the header's checksum does not hold")
    return FrameHeader(
        codec=codec.rstrip(b"\0").decode("ascii", "replace"),
        namespace_digest=namespace,
        digest=Digest(digest),
        rank=rank,
        num_tokens=num_tokens,
        raw_nbytes=raw,
        payload_nbytes=payload,
        checksum=checksum,
        version=version,
    )


def seal(
    frame: memoryview,
    *,
    namespace_digest: bytes,
    digest: Digest,
    rank: int,
    num_tokens: int,
    raw_nbytes: int,
    payload_nbytes: int,
    codec: str = RAW,
) -> memoryview:
    """Write the header for the payload that lies in `frame` already; the frame's whole bytes.

    `frame`: writable, format "B", at least `frame_nbytes(payload_nbytes)` long.
    """
    payload = frame[HEADER_BYTES : HEADER_BYTES + payload_nbytes]
    header = FrameHeader(
        codec=codec,
        namespace_digest=namespace_digest,
        digest=digest,
        rank=rank,
        num_tokens=num_tokens,
        raw_nbytes=raw_nbytes,
        payload_nbytes=payload_nbytes,
        checksum=payload_checksum(payload),
    )
    write_header(frame, header)
    return frame[: frame_nbytes(payload_nbytes)]


def verify(frame: memoryview) -> FrameHeader:
    """Header and payload of `frame` agree, whoever's chunk it is. Raises `FrameError`."""
    header = read_header(frame)
    if len(frame) < HEADER_BYTES + header.payload_nbytes:
        raise FrameError(
            "truncated",
            f"{len(frame)} bytes, but the header promises {header.payload_nbytes} of payload",
        )
    payload = frame[HEADER_BYTES : HEADER_BYTES + header.payload_nbytes]
    if payload_checksum(payload) != header.checksum:
        raise FrameError("checksum", "the payload's checksum does not hold")
    return header


def open_frame(
    frame: memoryview,
    *,
    namespace_digest: bytes,
    digest: Digest,
    rank: int,
    raw_nbytes: int,
    codec: str = RAW,
) -> FrameHeader:
    """The header of `frame`, which is whole and is the chunk that was asked for, in `codec`.

    Raises `FrameError` whose `reason` is one of truncated, magic, version, header, namespace,
    digest, rank, codec, length, checksum. Each is a miss to the caller.
    """
    header = read_header(frame)
    if header.namespace_digest != namespace_digest:
        raise FrameError("namespace", "kept for another model, layout or format")
    if header.digest != digest:
        raise FrameError("digest", f"holds chunk {header.digest.hex()}, not {digest.hex()}")
    if header.rank != rank:
        raise FrameError("rank", f"holds rank {header.rank}'s bytes, not rank {rank}'s")
    if header.codec != codec:
        raise FrameError("codec", f"in codec {header.codec!r}, not {codec!r}")
    if header.codec == RAW and header.payload_nbytes != header.raw_nbytes:
        raise FrameError("length", f"{header.payload_nbytes} bytes of {header.raw_nbytes} are here")
    if header.raw_nbytes != raw_nbytes:
        raise FrameError("length", f"{header.raw_nbytes} bytes of KV where {raw_nbytes} are right")
    return verify(frame)
