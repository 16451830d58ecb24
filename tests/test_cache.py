"""KVCache over tiers that wait when told: what is matched, fetched, kept, let go."""

import hashlib
import time

import pytest

from kvkeep.errors import PoolError
from kvkeep.testing.fake import PATIENCE_S, FakeClock, FakeEngine, FakeTier, eventually, fake_cache
from kvkeep.types import Digest

CHAIN = tuple(Digest(hashlib.sha256(b"%d" % number).digest()) for number in range(12))


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


def test_what_was_put_is_matched_and_fetched_at_once(make):
    cache, engine = make()
    assert cache.match(CHAIN).digests == ()
    assert engine.put(CHAIN[:3]) == CHAIN[:3]
    assert cache.match(CHAIN) == (CHAIN[:3], 3)
    assert cache.match(CHAIN[1:]) == (CHAIN[1:3], 2)
    fetch = cache.fetch(cache.match(CHAIN), "request")
    assert fetch.done
    engine.check(fetch, CHAIN[:3])
    assert cache.pool.owners() == {"memory": 3, "request": 3}
    cache.release(fetch)


def test_a_match_changes_nothing(make):
    cache, engine = make(FakeTier())
    engine.put(CHAIN[:3])
    before = cache.pool.owners(), cache.generation, cache.usage()
    for _ in range(3):
        cache.match(CHAIN)
    assert (cache.pool.owners(), cache.generation, cache.usage()) == before


def test_nothing_asked_is_nothing_held(make):
    cache, _ = make()
    fetch = cache.fetch(cache.match([]), "request")
    assert (fetch.done, fetch.slots, fetch.source_runs()) == (True, (), [])
    assert cache.reserve([], "request") is None
    cache.release(fetch)


def test_the_longest_prefix_runs_over_all_tiers(make):
    near, far = FakeTier("near"), FakeTier("far")
    cache, engine = make(near, far)
    engine.put(CHAIN[:6])
    cache.clear_memory()
    for digest in CHAIN[2:4]:
        near.delete(cache.hierarchy.keys(digest))
    far.delete(cache.hierarchy.keys(CHAIN[5]))
    near.delete(cache.hierarchy.keys(CHAIN[5]))
    engine.put(CHAIN[7:8])  # behind the gap: of no use
    assert cache.match(CHAIN) == (CHAIN[:5], 0)
    assert engine.get(CHAIN) == [("near", 2), ("far", 2), ("near", 1)]
    assert engine.get(CHAIN) == [("memory", 5)]  # promoted


def test_memory_may_lie_between_chunks_of_a_tier(make):
    tier = FakeTier()
    cache, engine = make(tier)
    engine.put(CHAIN[:4])
    cache.clear_memory()
    assert engine.get(CHAIN[1:2]) == [("fake", 1)]
    assert cache.match(CHAIN) == (CHAIN[:4], 0)
    assert engine.get(CHAIN) == [("fake", 1), ("memory", 1), ("fake", 2)]


def test_a_chunk_that_two_requests_want_is_loaded_once(make):
    tier = FakeTier()
    cache, engine = make(tier)
    engine.put(CHAIN[:2])
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
    engine.check(other, CHAIN[:2])
    cache.release(other)


def test_a_chunk_that_two_requests_compute_is_kept_once(make):
    cache, engine = make()
    one = cache.reserve(CHAIN[:3], "one")
    assert cache.reserve(CHAIN[:3], "other") is None
    other = cache.reserve(CHAIN[:5], "other")
    assert (other.positions, other.digests) == ((3, 4), CHAIN[3:5])
    for reservation in (other, one):
        engine.write(reservation)
        cache.publish(reservation)
    assert engine.get(CHAIN) == [("memory", 5)]
    assert cache.counters.stored_chunks == 5


def test_what_is_abandoned_can_be_stored_by_the_next(make):
    cache, engine = make()
    cache.abandon(cache.reserve(CHAIN[:3], "one"))
    assert cache.match(CHAIN).digests == ()
    assert cache.pool.owners() == {}
    assert engine.put(CHAIN[:3]) == CHAIN[:3]


def test_a_chunk_loaded_and_computed_at_once_is_kept_once(make):
    tier = FakeTier()
    cache, engine = make(tier)
    engine.put(CHAIN[:1])
    cache.clear_memory()
    computed = cache.reserve(CHAIN[:1], "computes")
    with tier.held("load"):
        fetch = cache.fetch(cache.match(CHAIN), "waits")
        assert cache.reserve(CHAIN[:1], "third") is None
        engine.write(computed)
        cache.publish(computed)
    eventually(lambda: fetch.done)
    engine.check(fetch, CHAIN[:1])
    cache.release(fetch)
    assert cache.num_chunks == 1


def test_wait_ends_with_a_transfer_and_at_once_without_one(make):
    tier = FakeTier()
    cache, engine = make(tier)
    engine.put(CHAIN[:1])
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
    cache, _ = make()
    reservation = cache.reserve(CHAIN[:1], "request")
    cache.publish(reservation)
    for end in (cache.publish, cache.abandon):
        with pytest.raises(PoolError):
            end(reservation)
