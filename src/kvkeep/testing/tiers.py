"""The conformance suite for a `Tier`: subclass `TierTests`, say how to make one, done.

    class TestMine(TierTests):
        def make(self, where: Path) -> Tier:
            return Mine(where)

The one under test never checks itself alone: where the tier's bytes can be reached from behind its
back, override `raw_get` and `raw_put` too. Needs pytest and Hypothesis, which kvkeep itself does
not.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from kvkeep.testing.tier_model import check_against_model
from kvkeep.tiers.base import BoundedTier, Tier
from kvkeep.types import ChunkKey, Digest

NAMESPACE = "model-0123456789abcdef"
GUARD = 0xA5
SIZES = (1, 4095, 4096, 4097, 1 << 20)


def key_of(number: int, *, namespace: str = NAMESPACE, rank: int = 0) -> ChunkKey:
    """A key for each number; its digest depends on the number alone."""
    return ChunkKey(namespace, rank, Digest(hashlib.sha256(b"%d" % number).digest()))


def value_of(seed: int, nbytes: int) -> bytes:
    """Bytes that look like nothing else, the same for the same arguments."""
    return random.Random(seed).randbytes(nbytes)


def aligned(content: bytes) -> memoryview:
    """`content` in a writable buffer at a page's start."""
    pages = mmap.mmap(-1, max(1, len(content)))
    pages[: len(content)] = content
    return memoryview(pages)[: len(content)]


def within(content: bytes, offset: int) -> tuple[bytearray, memoryview]:
    """`content` as a slice, `offset` bytes in, of a bigger buffer that is else all `GUARD`."""
    whole = bytearray([GUARD]) * (offset + len(content) + 4096)
    whole[offset : offset + len(content)] = content
    return whole, memoryview(whole)[offset : offset + len(content)]


def load_one(tier: Tier, key: ChunkKey, nbytes: int = 1 << 20) -> bytes | None:
    """The value of `key`, with a buffer of `nbytes` for it."""
    buffer = aligned(bytes(nbytes))
    (count,) = tier.load([key], [buffer])
    return None if count is None else bytes(buffer[:count])


class TierTests:
    """What every tier promises."""

    keeps_after_close: ClassVar[bool] = False
    """True where a new tier at the same place finds what an old one kept."""

    def make(self, where: Path) -> Tier:
        """A tier, not yet open, that keeps its bytes in the directory `where` if it needs one.

        It must hold 32 values of up to 1 MiB without eviction. Override this.
        """
        raise NotImplementedError

    def raw_get(self, where: Path, key: ChunkKey) -> bytes | None:
        """What is kept under `key`, without the tier's help."""
        del where, key
        pytest.skip("this tier has no back door to read")

    def raw_put(self, where: Path, key: ChunkKey, value: bytes) -> None:
        """Keep `value` under `key` before the tier is opened, without its help."""
        del where, key, value
        pytest.skip("this tier has no back door to write")

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """An open tier at `tmp_path`."""
        tier = self.make(tmp_path)
        tier.open()
        yield tier
        tier.close()

    def test_is_a_tier(self, tier: Tier) -> None:
        assert isinstance(tier, Tier)
        assert tier.name

    def test_empty_batches_do_nothing(self, tier: Tier) -> None:
        assert tier.contains([]) == []
        assert tier.load([], []) == []
        tier.store([], [])
        tier.delete([])

    @pytest.mark.parametrize("nbytes", SIZES)
    @pytest.mark.parametrize("offset", [None, 0, 1, 512])
    def test_gives_back_what_it_got(self, tier: Tier, nbytes: int, offset: int | None) -> None:
        content = value_of(1, nbytes)
        if offset is None:
            value, into = aligned(content), aligned(bytes(nbytes))
        else:
            value, into = within(content, offset)[1], within(bytes(nbytes), offset)[1]
        tier.store([key_of(1)], [value])
        assert tier.contains([key_of(1)]) == [True]
        assert tier.load([key_of(1)], [into]) == [nbytes]
        assert into == content

    def test_an_empty_value_is_kept_or_not_but_fails_nothing(self, tier: Tier) -> None:
        """No chunk is empty, so a tier may take an empty value for a broken one."""
        tier.store([key_of(0), key_of(1)], [memoryview(b""), memoryview(b"x")])
        assert load_one(tier, key_of(0)) in {b"", None}
        assert load_one(tier, key_of(1)) == b"x"

    def test_a_miss_is_a_value_and_leaves_the_others_alone(self, tier: Tier) -> None:
        tier.store([key_of(1), key_of(3)], [memoryview(b"one"), memoryview(b"three")])
        keys = [key_of(number) for number in range(5)]
        into = [memoryview(bytearray(8)) for _ in keys]
        assert tier.contains(keys) == [False, True, False, True, False]
        assert tier.load(keys, into) == [None, 3, None, 5, None]
        assert bytes(into[1][:3]) == b"one"
        assert bytes(into[3][:5]) == b"three"

    @pytest.mark.parametrize("nbytes", [4096, 8192, 10_000])
    def test_too_small_a_buffer_is_a_miss(self, tier: Tier, nbytes: int) -> None:
        tier.store([key_of(1)], [aligned(value_of(1, nbytes))])
        for short in (0, 1, 4095, nbytes - 1):
            whole, into = within(bytes(short), 512)
            assert tier.load([key_of(1)], [into]) == [None]
            assert set(whole[:512]) == set(whole[512 + short :]) == {GUARD}
        assert load_one(tier, key_of(1)) == value_of(1, nbytes)

    @pytest.mark.parametrize("nbytes", [1, 4096, 5000])
    def test_nothing_is_written_beside_the_buffer(self, tier: Tier, nbytes: int) -> None:
        tier.store([key_of(1)], [memoryview(value_of(1, nbytes))])
        for room in (nbytes, nbytes + 1, nbytes + 4096):
            whole, into = within(bytes(room), 4096)
            assert tier.load([key_of(1)], [into]) == [nbytes]
            assert into[:nbytes] == value_of(1, nbytes)
            assert set(whole[:4096]) == set(whole[4096 + room :]) == {GUARD}

    def test_takes_read_only_values_and_leaves_them_as_they_are(self, tier: Tier) -> None:
        content = value_of(1, 8192)
        value = aligned(content)
        tier.store([key_of(1), key_of(2)], [value.toreadonly(), memoryview(content)])
        assert value == content
        assert load_one(tier, key_of(1)) == load_one(tier, key_of(2)) == content

    def test_needs_the_value_no_longer_once_store_returns(self, tier: Tier) -> None:
        content = value_of(1, 8192)
        value = aligned(content)
        tier.store([key_of(1)], [value])
        value[:] = bytes(8192)
        assert load_one(tier, key_of(1)) == content

    def test_forgets_what_is_deleted(self, tier: Tier) -> None:
        tier.store([key_of(1), key_of(2)], [memoryview(b"one"), memoryview(b"two")])
        tier.delete([key_of(1), key_of(1), key_of(9)])
        assert tier.contains([key_of(1), key_of(2)]) == [False, True]
        assert load_one(tier, key_of(1)) is None
        assert load_one(tier, key_of(2)) == b"two"
        tier.store([key_of(1)], [memoryview(b"again")])
        assert load_one(tier, key_of(1)) == b"again"

    def test_stored_again_is_the_old_or_the_new_but_whole(self, tier: Tier) -> None:
        old = value_of(1, 8192)
        tier.store([key_of(1)], [memoryview(old)])
        for new in (old, value_of(2, 8192), value_of(3, 100), value_of(4, 12_288)):
            tier.store([key_of(1)], [memoryview(new)])
            found = load_one(tier, key_of(1))
            assert found in {old, new}
            old = found or b""

    def test_the_same_key_twice_in_a_batch(self, tier: Tier) -> None:
        value = memoryview(b"same")
        tier.store([key_of(1), key_of(1)], [value, value])
        into = [memoryview(bytearray(4)) for _ in range(2)]
        assert tier.load([key_of(1), key_of(1)], into) == [4, 4]
        assert into[0] == into[1] == b"same"

    def test_every_part_of_the_key_counts(self, tier: Tier) -> None:
        keys = [
            key_of(1),
            key_of(1, rank=1),
            key_of(1, rank=11),
            key_of(1, namespace="other-0123456789abcdef"),
            key_of(2),
        ]
        tier.store(keys[1:], [memoryview(b"%d" % place) for place in range(1, 5)])
        assert load_one(tier, keys[0]) is None
        tier.delete([keys[1]])
        expected = [None, None, b"2", b"3", b"4"]
        assert [load_one(tier, key) for key in keys] == expected

    def test_contains_is_only_a_question(self, tier: Tier) -> None:
        keys = [key_of(number) for number in range(4)]
        tier.store(keys[:2], [memoryview(b"a"), memoryview(b"b")])
        for _ in range(3):
            assert tier.contains(keys) == [True, True, False, False]
        assert [load_one(tier, key) for key in keys] == [b"a", b"b", None, None]

    def test_says_how_full_it_is(self, tier: Tier) -> None:
        if not isinstance(tier, BoundedTier) or not tier.occupancy().cap_bytes:
            pytest.skip("this tier has no cap of its own")
        before = tier.occupancy()
        tier.store([key_of(1)], [memoryview(value_of(1, 8192))])
        after = tier.occupancy()
        assert before.used_bytes + 8192 <= after.used_bytes <= after.cap_bytes
        tier.delete([key_of(1)])
        assert tier.occupancy() == before

    def test_closes_twice(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        tier.open()
        tier.close()
        tier.close()

    def test_keeps_over_a_restart(self, tmp_path: Path) -> None:
        if not self.keeps_after_close:
            pytest.skip("this tier ends with its process")
        content = value_of(1, 8192)
        tier = self.make(tmp_path)
        tier.open()
        tier.store([key_of(1), key_of(2)], [memoryview(content), memoryview(b"two")])
        tier.delete([key_of(2)])
        tier.close()
        tier = self.make(tmp_path)
        tier.open()
        assert tier.contains([key_of(1), key_of(2)]) == [True, False]
        assert load_one(tier, key_of(1)) == content
        tier.close()

    def test_what_it_keeps_is_there_for_others_to_see(self, tier: Tier, tmp_path: Path) -> None:
        content = value_of(1, 8192)
        tier.store([key_of(1)], [memoryview(content)])
        assert self.raw_get(tmp_path, key_of(1)) == content
        tier.delete([key_of(1)])
        assert self.raw_get(tmp_path, key_of(1)) is None

    def test_finds_what_others_put_there(self, tmp_path: Path) -> None:
        content = value_of(1, 8192)
        self.raw_put(tmp_path, key_of(1), content)
        tier = self.make(tmp_path)
        tier.open()
        assert load_one(tier, key_of(1)) == content
        tier.close()

    def test_many_threads_never_see_a_torn_value(self, tier: Tier) -> None:
        """Each version of a value is one byte, repeated as often as only that version is long."""
        sizes = [4096 * 3, 4096 * 5, 4096 * 4 + 1, 100]
        keys = [key_of(number) for number in range(6)]

        def work(seed: int) -> None:
            chance = random.Random(seed)
            buffers = [aligned(bytes(4096 * 5)) for _ in range(2)]
            for _ in range(60):
                batch = chance.sample(keys, 2)
                deed = chance.random()
                if deed < 0.4:
                    version = chance.randrange(len(sizes))
                    value = memoryview(bytes([version + 1]) * sizes[version])
                    tier.store(batch, [value, value])
                elif deed < 0.5:
                    tier.delete(batch)
                else:
                    for count, buffer in zip(tier.load(batch, buffers), buffers, strict=True):
                        if count is not None:
                            assert sizes[buffer[0] - 1] == count
                            assert bytes(buffer[:count]) == bytes(buffer[:1]) * count

        with ThreadPoolExecutor(8) as threads:
            for done in [threads.submit(work, seed) for seed in range(8)]:
                done.result()
        for key in keys:
            tier.store([key], [memoryview(b"last")])
        assert all(tier.contains(keys))

    def test_against_a_dict(self, tmp_path: Path) -> None:
        check_against_model(_maker(self.make, tmp_path), forgets=False)


def _maker(make: Callable[[Path], Tier], where: Path) -> Callable[[], Tier]:
    """Makes tiers, each in a directory of its own below `where`."""
    numbers = itertools.count()

    def fresh() -> Tier:
        directory = where / str(next(numbers))
        directory.mkdir()
        return make(directory)

    return fresh
