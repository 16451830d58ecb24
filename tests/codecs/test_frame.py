"""Frames: what was sealed opens, and nothing else does."""

import dataclasses

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.codecs.frame import (
    VERSION,
    frame_nbytes,
    open_frame,
    padded,
    payload_checksum,
    read_header,
    seal,
    verify,
    write_header,
)
from kvkeep.errors import FrameError
from kvkeep.memory.pool import HEADER_BYTES
from kvkeep.testing.strategies import frames

NAMESPACE = bytes(range(32))
DIGEST = bytes(range(32, 64))
PAYLOAD = b"kv" * 150
FIELDS_NBYTES = 136
ASKED = {"namespace_digest": NAMESPACE, "digest": DIGEST, "rank": 258, "raw_nbytes": 300}

# Written out field by field from the table in kvkeep.codecs.frame.
GOLDEN = (
    "4b564b4545500d0a"  # magic
    "0100"  # version
    "0201"  # rank 258
    "10000000"  # 16 tokens
    "72617700000000000000000000000000"  # codec
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"  # namespace
    "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f"  # digest
    "2c01000000000000"  # raw bytes
    "2c01000000000000"  # payload bytes
    "d90186d384330e79c8c30c1ef5353927"  # XXH3-128 of the payload
    "36b154ea3de25ebe"  # XXH3-64 of the above
)


def sealed(payload=PAYLOAD, **changes):
    frame = memoryview(bytearray(frame_nbytes(len(payload))))
    frame[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    fields = {**ASKED, "num_tokens": 16, "payload_nbytes": len(payload), **changes}
    return seal(frame, **fields)


def reason_of(frame, **changes):
    with pytest.raises(FrameError) as caught:
        open_frame(frame, **{**ASKED, **changes})
    return caught.value.reason


def with_fields(frame, **changes):
    """A frame whose header says something else, its own checksum made to fit."""
    changed = memoryview(bytearray(frame))
    write_header(changed, dataclasses.replace(read_header(frame), **changes))
    return changed


def test_golden_header():
    frame = sealed()
    assert frame[:FIELDS_NBYTES].hex() == GOLDEN
    assert bytes(frame[FIELDS_NBYTES:HEADER_BYTES]) == bytes(HEADER_BYTES - FIELDS_NBYTES)
    assert bytes(frame[HEADER_BYTES : HEADER_BYTES + 300]) == PAYLOAD
    assert len(frame) == 2 * 4096
    assert open_frame(frame, **ASKED).num_tokens == 16


def test_sealing_again_changes_nothing():
    """Two tiers' jobs seal one slot at the same time."""
    frame = sealed()
    once = bytes(frame)
    seal(frame, **ASKED, num_tokens=16, payload_nbytes=300)
    assert bytes(frame) == once


@pytest.mark.parametrize(
    ("nbytes", "whole"), [(0, 4096), (1, 8192), (4096, 8192), (4097, 12288), (8192, 12288)]
)
def test_a_frame_is_whole_pages(nbytes, whole):
    assert frame_nbytes(nbytes) == whole == HEADER_BYTES + padded(nbytes)


@settings(deadline=None)
@given(frames())
def test_round_trip(frame):
    header = verify(frame)
    payload = bytes(frame[HEADER_BYTES : HEADER_BYTES + header.payload_nbytes])
    assert header.checksum == payload_checksum(payload) == xxhash.xxh3_128(payload).digest()
    assert header.version == VERSION
    opened = open_frame(
        frame.toreadonly(),
        namespace_digest=header.namespace_digest,
        digest=header.digest,
        rank=header.rank,
        raw_nbytes=header.raw_nbytes,
        codec=header.codec,
    )
    assert opened == header
    again = memoryview(bytearray(HEADER_BYTES))
    write_header(again, header)
    assert again == frame[:HEADER_BYTES]


@pytest.mark.parametrize(
    "start", [*range(0, FIELDS_NBYTES, 34), *range(HEADER_BYTES, HEADER_BYTES + 300, 75)]
)
def test_no_flipped_bit_is_accepted(start):
    """All 1088 bits of the header's fields, all 2400 of the payload; a slice of them a case."""
    stop = start + (34 if start < FIELDS_NBYTES else 75)
    frame = sealed()
    for bit in range(start * 8, stop * 8):
        frame[bit // 8] ^= 1 << bit % 8
        assert reason_of(frame) in {"magic", "version", "header", "checksum"}, f"bit {bit}"
        frame[bit // 8] ^= 1 << bit % 8
    open_frame(frame, **ASKED)


@settings(deadline=None)
@given(st.data())
def test_no_spoiled_bytes_are_accepted(data):
    frame = sealed()
    before = bytes(frame)
    starts = st.integers(0, FIELDS_NBYTES - 1) | st.integers(HEADER_BYTES, HEADER_BYTES + 299)
    start = data.draw(starts)
    junk = data.draw(st.binary(min_size=1, max_size=FIELDS_NBYTES))
    frame[start : start + len(junk)] = junk
    covered = (
        bytes(frame[:FIELDS_NBYTES]) + bytes(frame[HEADER_BYTES : HEADER_BYTES + 300]),
        before[:FIELDS_NBYTES] + before[HEADER_BYTES : HEADER_BYTES + 300],
    )
    if covered[0] != covered[1]:
        reason_of(frame)


@pytest.mark.parametrize(
    "nbytes", [0, 1, 8, 127, 128, 135, 136, 4095, 4096, 4097, HEADER_BYTES + 299]
)
def test_a_frame_that_ends_early_is_truncated(nbytes):
    assert reason_of(sealed()[:nbytes]) == "truncated"


@pytest.mark.parametrize("nbytes", [HEADER_BYTES + 300, HEADER_BYTES + 301, 8192])
def test_padding_may_be_missing(nbytes):
    assert open_frame(sealed()[:nbytes], **ASKED).payload_nbytes == 300


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"namespace_digest": bytes(32)}, "namespace"),
        ({"digest": bytes(32)}, "digest"),
        ({"rank": 0}, "rank"),
        ({"raw_nbytes": 299}, "length"),
    ],
)
def test_a_frame_of_something_else_is_refused(asked, reason):
    assert reason_of(sealed(), **asked) == reason
    # Both ways round: the frame, not the question, may be the one that is different.
    assert reason_of(sealed(**asked)) == reason


@pytest.mark.parametrize("version", [0, 2, 3, 65535])
def test_another_version_is_refused_whatever_else_it_says(version):
    assert reason_of(with_fields(sealed(), version=version)) == "version"
    later = sealed()
    later[8:10] = version.to_bytes(2, "little")
    later[20:HEADER_BYTES] = bytes(HEADER_BYTES - 20)
    assert reason_of(later) == "version"


@pytest.mark.parametrize("payload_nbytes", [301, 4097, 2**63, 2**64 - 1])
def test_a_promise_of_more_than_there_is(payload_nbytes):
    reason = reason_of(with_fields(sealed(), payload_nbytes=payload_nbytes))
    assert reason in {"length", "truncated", "checksum"}


def test_other_bytes_with_their_own_right_header_are_still_another_chunk():
    frame = with_fields(sealed(), digest=bytes(32))
    frame[HEADER_BYTES] ^= 1
    assert reason_of(frame) == "digest"


@pytest.mark.parametrize("junk", [b"", b"\0" * 8192, b"\xff" * 8192, b"PK\3\4" * 2048])
def test_junk_is_no_frame(junk):
    assert reason_of(memoryview(junk)) in {"truncated", "magic"}


def test_a_raw_frame_holds_as_many_bytes_as_it_stands_for():
    """With "raw", payload and KV are one; a shorter payload would leave old bytes in the slot."""
    short = sealed(payload=PAYLOAD[:200], raw_nbytes=300)
    assert reason_of(short) == "length"


@pytest.mark.parametrize(
    "changes", [{"codec": "c" * 17}, {"namespace_digest": bytes(31)}, {"digest": bytes(33)}]
)
def test_what_does_not_fit_its_field_is_not_cut_off_silently(changes):
    with pytest.raises(ValueError, match=r".+"):
        sealed(**changes)
