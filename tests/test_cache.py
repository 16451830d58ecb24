"""KVCache over tiers that wait when told: what is matched, fetched, kept, let go."""

import time

import pytest
from cache_helpers import CHAIN, caches, check, eventually, get, put, write

from kvkeep.errors import PoolError
from kvkeep.testing.fake import PATIENCE_S, FakeTier


@pytest.fixture
def make():
    with caches() as make:
        yield make


def test_what_was_put_is_matched_and_fetched_at_once(make):
    cache = make()
    assert cache.match(CHAIN).digests == ()
    assert put(cache, CHAIN[:3]) == CHAIN[:3]
    assert cache.match(CHAIN) == (CHAIN[:3], 3)
    assert cache.match(CHAIN[1:]) == (CHAIN[1:3], 2)
    fetch = cache.fetch(cache.match(CHAIN), "request")
    assert fetch.done
    check(cache, fetch, CHAIN[:3])
    assert cache.pool.owners() == {"memory": 3, "request": 3}
    cache.release(fetch)


def test_a_match_changes_nothing(make):
    cache = make(FakeTier())
    put(cache, CHAIN[:3])
    before = cache.pool.owners(), cache.generation, cache.usage()
    for _ in range(3):
        cache.match(CHAIN)
    assert (cache.pool.owners(), cache.generation, cache.usage()) == before


def test_nothing_asked_is_nothing_held(make):
    cache = make()
    fetch = cache.fetch(cache.match([]), "request")
    assert (fetch.done, fetch.slots, fetch.source_runs()) == (True, (), [])
    assert cache.reserve([], "request") is None
    cache.release(fetch)


def test_the_longest_prefix_runs_over_all_tiers(make):
    near, far = FakeTier("near"), FakeTier("far")
    cache = make(near, far)
    put(cache, CHAIN[:6])
    cache.clear_memory()
    for digest in CHAIN[2:4]:
        near.delete(cache.hierarchy.keys(digest))
    far.delete(cache.hierarchy.keys(CHAIN[5]))
    near.delete(cache.hierarchy.keys(CHAIN[5]))
    put(cache, CHAIN[7:8])  # behind the gap: of no use
    assert cache.match(CHAIN) == (CHAIN[:5], 0)
    assert get(cache) == [("near", 2), ("far", 2), ("near", 1)]
    assert get(cache) == [("memory", 5)]  # promoted


def test_memory_may_lie_between_chunks_of_a_tier(make):
    tier = FakeTier()
    cache = make(tier)
    put(cache, CHAIN[:4])
    cache.clear_memory()
    assert get(cache, CHAIN[1:2]) == [("fake", 1)]
    assert cache.match(CHAIN) == (CHAIN[:4], 0)
    assert get(cache) == [("fake", 1), ("memory", 1), ("fake", 2)]


def test_a_chunk_that_two_requests_want_is_loaded_once(make):
    tier = FakeTier()
    cache = make(tier)
    put(cache, CHAIN[:2])
    cache.clear_memory()
    with tier.held("load"):
        one = cache.fetch(cache.match(CHAIN), "one")
        other = cache.fetch(cache.match(CHAIN), "other")
        assert not one.done
        assert one.slots == other.slots == ()
    eventually(lambda: one.done and other.done)
    loaded = [key for operation, keys in tier.calls if operation == "load" for key in keys]
    assert len(loaded) == 2
    cache.release(one)
    check(cache, other, CHAIN[:2])
    cache.release(other)


def test_a_chunk_that_two_requests_compute_is_kept_once(make):
    cache = make()
    one = cache.reserve(CHAIN[:3], "one")
    assert cache.reserve(CHAIN[:3], "other") is None
    other = cache.reserve(CHAIN[:5], "other")
    assert (other.positions, other.digests) == ((3, 4), CHAIN[3:5])
    for reservation in (other, one):
        write(cache, reservation)
        cache.publish(reservation)
    assert get(cache) == [("memory", 5)]
    assert cache.counters.stored_chunks == 5


def test_what_is_abandoned_can_be_stored_by_the_next(make):
    cache = make()
    cache.abandon(cache.reserve(CHAIN[:3], "one"))
    assert cache.match(CHAIN).digests == ()
    assert cache.pool.owners() == {}
    assert put(cache, CHAIN[:3]) == CHAIN[:3]


def test_a_chunk_loaded_and_computed_at_once_is_kept_once(make):
    tier = FakeTier()
    cache = make(tier)
    put(cache, CHAIN[:1])
    cache.clear_memory()
    computed = cache.reserve(CHAIN[:1], "computes")
    with tier.held("load"):
        fetch = cache.fetch(cache.match(CHAIN), "waits")
        assert cache.reserve(CHAIN[:1], "third") is None
        write(cache, computed)
        cache.publish(computed)
    eventually(lambda: fetch.done)
    check(cache, fetch, CHAIN[:1])
    cache.release(fetch)
    assert cache.num_chunks == 1


def test_wait_ends_with_a_transfer_and_at_once_without_one(make):
    tier = FakeTier()
    cache = make(tier)
    put(cache, CHAIN[:1])
    cache.clear_memory()
    started = time.monotonic()
    cache.wait(PATIENCE_S)
    with tier.held("load"):
        fetch = cache.fetch(cache.match(CHAIN), "request")
        cache.wait(0.02)
        assert not fetch.done
    cache.wait(PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S
    eventually(lambda: fetch.done)
    cache.release(fetch)


def test_ended_twice_is_an_error(make):
    cache = make()
    reservation = cache.reserve(CHAIN[:1], "request")
    cache.publish(reservation)
    for end in (cache.publish, cache.abandon):
        with pytest.raises(PoolError):
            end(reservation)
