"""KVCache when memory is short, frames are bad, and tiers fail or are late."""

import hashlib

import pytest

from kvkeep.memory.pool import HEADER_BYTES
from kvkeep.testing.fake import FakeClock, FakeEngine, FakeTier, eventually, fake_cache
from kvkeep.types import Digest

CHAIN = tuple(Digest(hashlib.sha256(b"%d" % number).digest()) for number in range(12))
OTHER = Digest(b"other".ljust(32))


@pytest.fixture
def make():
    engines = []

    def make(*tiers, **options):
        cache = fake_cache(*tiers, clock=FakeClock(), **options)
        engines.append(FakeEngine(cache))
        return cache, engines[-1]

    yield make
    for engine in engines:
        cache = engine.cache
        engine.settle()
        eventually(lambda c=cache: set(c.pool.owners()) <= {"memory"})
        cache.check_integrity()
        assert cache.pool.owners().get("memory", 0) == cache.num_chunks
        cache.close()
        assert cache.pool.owners() == {}


@pytest.mark.parametrize("bad", [0, 2, 5])
def test_a_corrupt_frame_ends_the_run_there(make, bad):
    tier = FakeTier()
    cache, engine = make(tier)
    engine.put(CHAIN[:6])
    cache.clear_memory()
    (key,) = cache.hierarchy.keys(CHAIN[bad])
    tier.flip(key, HEADER_BYTES + 7)
    assert engine.get(CHAIN) == ([("fake", bad)] if bad else [])
    assert cache.tier_counters()["fake"].corrupt == 1
    assert key not in tier.values
    assert cache.match(CHAIN).digests == CHAIN[:bad]
    assert cache.num_chunks == 5  # those behind it came and are kept
    assert engine.put(CHAIN[:6]) == (CHAIN[bad],)
    assert engine.get(CHAIN) == [("memory", 6)]


def test_a_tier_that_fails_half_way_gives_a_shorter_run(make):
    near, far = FakeTier("near"), FakeTier("far")
    cache, engine = make(near, far)
    engine.put(CHAIN[:5])
    cache.clear_memory()
    for digest in CHAIN[3:5]:
        near.delete(cache.hierarchy.keys(digest))
    far.failing = {"load"}
    assert engine.get(CHAIN) == [("near", 3)]
    assert cache.tier_counters()["far"].failures > 0
    far.failing = set()
    assert engine.get(CHAIN) == [("memory", 3), ("far", 2)]


def test_who_gives_up_goes_on_with_what_is_there_and_the_rest_is_kept(make):
    tier = FakeTier()
    cache, engine = make(tier)
    engine.put(CHAIN[:4])
    cache.clear_memory()
    engine.get(CHAIN[:2])
    with tier.held("load"):
        fetch = cache.fetch(cache.match(CHAIN), "request")
        assert not fetch.done
        cache.give_up(fetch)
        engine.check(fetch, CHAIN[:2])
        assert cache.pool.owners() == {"memory": 4, "request": 2}
        waits = cache.fetch(cache.match(CHAIN), "other")
    eventually(lambda: waits.done)
    assert len(fetch.slots) == 2
    engine.check(waits, CHAIN[:4])
    for ended in (fetch, waits):
        cache.release(ended)
    assert engine.get(CHAIN) == [("memory", 4)]


def test_released_while_under_way_it_holds_nothing_and_what_comes_is_kept(make):
    tier = FakeTier()
    cache, engine = make(tier)
    engine.put(CHAIN[:2])
    cache.clear_memory()
    with tier.held("load"):
        fetch = cache.fetch(cache.match(CHAIN), "request")
        cache.release(fetch)
        assert cache.pool.owners() == {"memory": 2}
    eventually(lambda: fetch.done)
    assert engine.get(CHAIN) == [("memory", 2)]


def test_under_pressure_the_end_of_a_chain_goes_before_its_start(make):
    cache, engine = make(num_slots=6)
    engine.put(CHAIN[:6])
    engine.put([OTHER])
    assert cache.match(CHAIN).digests == CHAIN[:5]


def test_after_a_hit_the_end_of_a_chain_goes_before_its_start(make):
    cache, engine = make(num_slots=6)
    engine.put(CHAIN[:6])
    engine.get(CHAIN)
    engine.put([OTHER])
    assert cache.match(CHAIN).digests == CHAIN[:5]


def test_a_chain_loaded_from_tiers_also_goes_from_its_end(make):
    """Also where its end came last: a fetch is spread over batches, which end in any order."""
    near, far = FakeTier("near"), FakeTier("far")
    cache, engine = make(near, far, num_slots=6)
    engine.put(CHAIN[:6])
    cache.clear_memory()
    near.delete([key for digest in CHAIN[3:6] for key in cache.hierarchy.keys(digest)])
    with far.held("load"):
        fetch = cache.fetch(cache.match(CHAIN), "request")
        eventually(lambda: cache.num_chunks == 3)
    eventually(lambda: fetch.done)
    cache.release(fetch)
    engine.put([OTHER])
    assert cache.match(CHAIN).in_memory == 5


def test_what_does_not_fit_is_dropped_from_the_tail(make):
    cache, engine = make(num_slots=4)
    assert engine.put(CHAIN[:7]) == CHAIN[:4]
    assert cache.counters.dropped_chunks == 3
    assert engine.get(CHAIN) == [("memory", 4)]


def test_what_is_held_is_neither_evicted_nor_waited_for(make):
    cache, engine = make(num_slots=4)
    engine.put(CHAIN[:3])
    fetch = cache.fetch(cache.match(CHAIN), "request")
    assert engine.put(CHAIN[6:9]) == CHAIN[6:7]
    engine.check(fetch, CHAIN[:3])
    cache.release(fetch)
    assert engine.put(CHAIN[7:9]) == CHAIN[7:9]


def test_a_fetch_is_as_long_as_there_is_room(make):
    tier = FakeTier()
    cache, engine = make(tier, num_slots=4)
    for start in (0, 3):
        engine.put(CHAIN[start : start + 3])
    cache.clear_memory()
    held = cache.fetch(cache.match(CHAIN[:2]), "other")
    eventually(lambda: held.done)
    assert engine.get(CHAIN[2:]) == [("fake", 2)]
    cache.release(held)


def test_as_a_staging_buffer_it_keeps_nothing_once_written(make):
    tier = FakeTier()
    cache, engine = make(tier, keeps_memory=False)
    with tier.held("store"):
        reservation = cache.reserve(CHAIN[:2], "request")
        engine.write(reservation)
        cache.publish(reservation)
        assert cache.match(CHAIN) == (CHAIN[:2], 2)  # until it is written
    eventually(lambda: cache.pool.owners() == {})
    assert cache.num_chunks == 0
    assert engine.get(CHAIN) == [("fake", 2)]
    assert cache.num_chunks == 0


def test_a_staging_buffer_is_empty_also_where_the_write_fails(make):
    tier = FakeTier()
    cache, engine = make(tier, keeps_memory=False)
    tier.failing = {"store"}
    engine.put(CHAIN[:2])
    eventually(lambda: cache.pool.owners() == {})
    assert cache.match(CHAIN).digests == ()
