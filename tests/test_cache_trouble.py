"""KVCache when memory is short, frames are bad, and tiers fail or are late."""

import pytest
from cache_helpers import CHAIN, OTHER, caches, check, eventually, get, put, write

from kvkeep.memory.pool import HEADER_BYTES
from kvkeep.testing.fake import FakeTier


@pytest.fixture
def make():
    with caches() as make:
        yield make


@pytest.mark.parametrize("bad", [0, 2, 5])
def test_a_corrupt_frame_ends_the_run_there(make, bad):
    tier = FakeTier()
    cache = make(tier)
    put(cache, CHAIN[:6])
    cache.clear_memory()
    (key,) = cache.hierarchy.keys(CHAIN[bad])
    tier.flip(key, HEADER_BYTES + 7)
    assert get(cache) == ([("fake", bad)] if bad else [])
    assert cache.tier_counters()["fake"].corrupt == 1
    assert key not in tier.values
    assert cache.match(CHAIN).digests == CHAIN[:bad]
    assert cache.num_chunks == 5  # those behind it came and are kept
    assert put(cache, CHAIN[:6]) == (CHAIN[bad],)
    assert get(cache) == [("memory", 6)]


def test_a_tier_that_fails_half_way_gives_a_shorter_run(make):
    near, far = FakeTier("near"), FakeTier("far")
    cache = make(near, far)
    put(cache, CHAIN[:5])
    cache.clear_memory()
    for digest in CHAIN[3:5]:
        near.delete(cache.hierarchy.keys(digest))
    far.failing = {"load"}
    assert get(cache) == [("near", 3)]
    assert cache.tier_counters()["far"].failures > 0
    far.failing = set()
    assert get(cache) == [("memory", 3), ("far", 2)]


def test_who_gives_up_goes_on_with_what_is_there_and_the_rest_is_kept(make):
    tier = FakeTier()
    cache = make(tier)
    put(cache, CHAIN[:4])
    cache.clear_memory()
    get(cache, CHAIN[:2])
    with tier.held("load"):
        fetch = cache.fetch(cache.match(CHAIN), "request")
        assert not fetch.done
        cache.give_up(fetch)
        check(cache, fetch, CHAIN[:2])
        assert cache.pool.owners() == {"memory": 4, "request": 2}
        waits = cache.fetch(cache.match(CHAIN), "other")
    eventually(lambda: waits.done)
    assert len(fetch.slots) == 2
    check(cache, waits, CHAIN[:4])
    for ended in (fetch, waits):
        cache.release(ended)
    assert get(cache) == [("memory", 4)]


def test_released_while_under_way_it_holds_nothing_and_what_comes_is_kept(make):
    tier = FakeTier()
    cache = make(tier)
    put(cache, CHAIN[:2])
    cache.clear_memory()
    with tier.held("load"):
        fetch = cache.fetch(cache.match(CHAIN), "request")
        cache.release(fetch)
        assert cache.pool.owners() == {"memory": 2}
    eventually(lambda: fetch.done)
    assert get(cache) == [("memory", 2)]


def test_under_pressure_the_end_of_a_chain_goes_before_its_start(make):
    cache = make(num_slots=6)
    put(cache, CHAIN[:6])
    put(cache, [OTHER])
    assert cache.match(CHAIN).digests == CHAIN[:5]


def test_after_a_hit_the_end_of_a_chain_goes_before_its_start(make):
    cache = make(num_slots=6)
    put(cache, CHAIN[:6])
    get(cache)
    put(cache, [OTHER])
    assert cache.match(CHAIN).digests == CHAIN[:5]


def test_a_chain_loaded_from_a_tier_also_goes_from_its_end(make):
    tier = FakeTier()
    cache = make(tier, num_slots=6)
    put(cache, CHAIN[:6])
    cache.clear_memory()
    get(cache)
    put(cache, [OTHER])
    assert cache.match(CHAIN).in_memory == 5


def test_what_does_not_fit_is_dropped_from_the_tail(make):
    cache = make(num_slots=4)
    assert put(cache, CHAIN[:7]) == CHAIN[:4]
    assert cache.counters.dropped_chunks == 3
    assert get(cache) == [("memory", 4)]


def test_what_is_held_is_neither_evicted_nor_waited_for(make):
    cache = make(num_slots=4)
    put(cache, CHAIN[:3])
    fetch = cache.fetch(cache.match(CHAIN), "request")
    assert put(cache, CHAIN[6:9]) == CHAIN[6:7]
    check(cache, fetch, CHAIN[:3])
    cache.release(fetch)
    assert put(cache, CHAIN[7:9]) == CHAIN[7:9]


def test_a_fetch_is_as_long_as_there_is_room(make):
    tier = FakeTier()
    cache = make(tier, num_slots=4)
    for start in (0, 3):
        put(cache, CHAIN[start : start + 3])
    cache.clear_memory()
    held = cache.fetch(cache.match(CHAIN[:2]), "other")
    eventually(lambda: held.done)
    assert get(cache, CHAIN[2:]) == [("fake", 2)]
    cache.release(held)


def test_as_a_staging_buffer_it_keeps_nothing_once_written(make):
    tier = FakeTier()
    cache = make(tier, keeps_memory=False)
    with tier.held("store"):
        reservation = cache.reserve(CHAIN[:2], "request")
        write(cache, reservation)
        cache.publish(reservation)
        assert cache.match(CHAIN) == (CHAIN[:2], 2)  # until it is written
    eventually(lambda: cache.pool.owners() == {})
    assert cache.num_chunks == 0
    assert get(cache) == [("fake", 2)]
    assert cache.num_chunks == 0


def test_a_staging_buffer_is_empty_also_where_the_write_fails(make):
    tier = FakeTier()
    cache = make(tier, keeps_memory=False)
    tier.failing = {"store"}
    put(cache, CHAIN[:2])
    eventually(lambda: cache.pool.owners() == {})
    assert cache.match(CHAIN).digests == ()
