"""Tiers in their order: found, loaded, checked, written through."""

import hashlib

import pytest

from kvkeep.codecs.frame import frame_nbytes, seal
from kvkeep.errors import TierError, TierUnavailable
from kvkeep.hierarchy import Hierarchy
from kvkeep.memory.pool import HEADER_BYTES
from kvkeep.testing.fake import PATIENCE_S, FakeClock, FakeTier, fake_cache, fake_namespace
from kvkeep.types import Digest

PAYLOAD_NBYTES = (256, 512)  # two ranks of different size
DIGESTS = [Digest(hashlib.sha256(b"%d" % number).digest()) for number in range(6)]


def content(digest, rank):
    return hashlib.shake_128(digest + bytes([rank])).digest(PAYLOAD_NBYTES[rank])


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def make(clock):
    caches = []

    def make(*tiers, **options):
        cache = fake_cache(*tiers, payload_nbytes=PAYLOAD_NBYTES, clock=clock, **options)
        caches.append(cache)
        return cache.hierarchy, cache.pool

    yield make
    for cache in caches:
        assert cache.pool.owners() == {}
        cache.close()
        cache.pool.check_integrity()


def store(hierarchy, pool, digest):
    """Write one chunk through and wait for it."""
    with pool.lease(1, "test") as lease:
        for rank in range(2):
            fill(pool, lease.slots[0], digest, rank)
        hierarchy.store(digest, lease.slots[0]).result(PATIENCE_S)


def fill(pool, slot, digest, rank):
    payload = pool.view(slot, rank)[HEADER_BYTES:]
    payload[: PAYLOAD_NBYTES[rank]] = content(digest, rank)


def load(hierarchy, pool, link, digests):
    """Which of `digests` came, each compared with what it must be."""
    with pool.lease(len(digests), "test") as lease:
        came = []
        for batch, size in hierarchy.load(link, digests, lease.slots):
            came += [False] * size if batch.exception(PATIENCE_S) else batch.result()
        for digest, slot, there in zip(digests, lease.slots, came, strict=True):
            if there:
                for rank in range(2):
                    payload = pool.view(slot, rank)[HEADER_BYTES:]
                    assert payload[: PAYLOAD_NBYTES[rank]] == content(digest, rank)
        return came


def test_what_was_stored_comes_back_for_every_rank(make):
    tier = FakeTier()
    hierarchy, pool = make(tier)
    for digest in DIGESTS:
        store(hierarchy, pool, digest)
    link = hierarchy.find(DIGESTS[0])
    assert link.tier is tier
    assert sorted(key.rank for key in tier.values) == [0] * 6 + [1] * 6
    assert load(hierarchy, pool, link, DIGESTS) == [True] * 6
    assert link.counters.loaded_bytes == link.counters.stored_bytes == 6 * sum(PAYLOAD_NBYTES)


def test_a_chunk_is_found_in_the_first_tier_that_has_all_of_it(make):
    first, second = FakeTier("first"), FakeTier("second")
    hierarchy, pool = make(first, second)
    store(hierarchy, pool, DIGESTS[0])
    assert hierarchy.find(DIGESTS[0]).name == "first"
    del first.values[hierarchy.keys(DIGESTS[0])[1]]  # rank 1's part only
    assert hierarchy.find(DIGESTS[0]).name == "second"
    second.values.clear()
    assert hierarchy.find(DIGESTS[0]) is None


def test_nothing_is_asked_that_would_keep_the_scheduler_waiting(make):
    far = FakeTier("far", answers_at_once=False)
    hierarchy, pool = make(far)
    store(hierarchy, pool, DIGESTS[0])
    assert hierarchy.find(DIGESTS[0]) is None
    assert far.count("contains") == 0


def test_a_chunk_that_is_there_is_not_written_again(make):
    tier = FakeTier()
    hierarchy, pool = make(tier)
    store(hierarchy, pool, DIGESTS[0])
    store(hierarchy, pool, DIGESTS[0])
    assert tier.count("store") == 1


@pytest.mark.parametrize("at", [0, 8, 100, 135, HEADER_BYTES, HEADER_BYTES + 255])
def test_a_spoiled_frame_is_a_miss_counted_and_deleted(make, at):
    tier = FakeTier()
    hierarchy, pool = make(tier)
    for digest in DIGESTS[:3]:
        store(hierarchy, pool, digest)
    spoiled = hierarchy.keys(DIGESTS[1])[0]
    tier.flip(spoiled, at)
    (link,) = hierarchy.links
    assert load(hierarchy, pool, link, DIGESTS[:3]) == [True, False, True]
    assert spoiled not in tier.values
    assert link.counters.corrupt == 1
    assert hierarchy.find(DIGESTS[1]) is None
    store(hierarchy, pool, DIGESTS[1])
    assert load(hierarchy, pool, link, DIGESTS[:3]) == [True] * 3


def test_the_rest_of_a_batch_is_right_also_where_a_bad_frame_can_not_be_deleted(make):
    tier = FakeTier()
    hierarchy, pool = make(tier, num_threads=1)
    for digest in DIGESTS[:2]:
        store(hierarchy, pool, digest)
    tier.flip(hierarchy.keys(DIGESTS[0])[0], HEADER_BYTES)
    tier.failing = {"delete"}
    assert load(hierarchy, pool, hierarchy.links[0], DIGESTS[:2]) == [False, True]


def other_frame(namespace=None, digest=DIGESTS[0], rank=0, **changes):
    """A frame that is whole, as another engine or another version of kvkeep might have kept it."""
    payload_nbytes = changes.get("payload_nbytes", PAYLOAD_NBYTES[0])
    frame = memoryview(bytearray(frame_nbytes(payload_nbytes)))
    fields = {"num_tokens": 4, "raw_nbytes": PAYLOAD_NBYTES[0], "payload_nbytes": payload_nbytes}
    namespace = namespace or fake_namespace()
    return bytes(
        seal(
            frame,
            namespace_digest=namespace.digest,
            digest=digest,
            rank=rank,
            **{**fields, **changes},
        )
    )


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": fake_namespace(dtype="float16")},
        {"digest": DIGESTS[1]},
        {"rank": 1},
        {"raw_nbytes": 128},
        {"codec": "lossless"},
        {"codec": "lossless", "payload_nbytes": 100},
        {"payload_nbytes": 100},
    ],
)
def test_a_whole_frame_of_something_else_is_a_miss(make, change):
    tier = FakeTier()
    hierarchy, pool = make(tier)
    store(hierarchy, pool, DIGESTS[0])
    key = hierarchy.keys(DIGESTS[0])[0]
    tier.values[key] = other_frame()
    (link,) = hierarchy.links
    with pool.lease(1, "test") as lease:  # the control: unchanged it does open
        ((batch, _),) = hierarchy.load(link, DIGESTS[:1], lease.slots)
        assert batch.result(PATIENCE_S) == [True]
    tier.values[key] = other_frame(**change)
    assert load(hierarchy, pool, link, DIGESTS[:1]) == [False]
    assert link.counters.corrupt == 1
    assert key not in tier.values


@pytest.mark.parametrize("nbytes", [0, 100, HEADER_BYTES, HEADER_BYTES + 255])
def test_a_short_frame_is_a_miss(make, nbytes):
    tier = FakeTier()
    hierarchy, pool = make(tier)
    store(hierarchy, pool, DIGESTS[0])
    key = hierarchy.keys(DIGESTS[0])[0]
    tier.values[key] = tier.values[key][:nbytes]
    assert load(hierarchy, pool, hierarchy.links[0], DIGESTS[:1]) == [False]
    assert hierarchy.links[0].counters.corrupt == 1


def test_a_value_that_is_gone_is_a_miss_and_not_corrupt(make):
    tier = FakeTier()
    hierarchy, pool = make(tier)
    store(hierarchy, pool, DIGESTS[0])
    tier.values.clear()
    assert load(hierarchy, pool, hierarchy.links[0], DIGESTS[:2]) == [False, False]
    assert hierarchy.links[0].counters.corrupt == 0


def test_a_failing_tier_is_skipped_and_comes_back(make, clock):
    first, second = FakeTier("first"), FakeTier("second")
    hierarchy, pool = make(first, second)
    store(hierarchy, pool, DIGESTS[0])
    first.failing = {"contains"}
    assert [hierarchy.find(DIGESTS[0]).name for _ in range(5)] == ["second"] * 5
    assert first.count("contains") == 1 + 3  # one by the store; cut off after three failures
    assert hierarchy.links[0].usage().is_cut_off
    first.failing = set()
    clock.advance(60)
    link = hierarchy.find(DIGESTS[0])
    assert link.name == "first"
    assert load(hierarchy, pool, link, DIGESTS[:1]) == [True]
    assert not link.usage().is_cut_off


def test_a_fault_of_ours_in_a_tier_does_not_reach_who_asks(make):
    """What is no `TierError` breaks the tier's contract; the engine must not pay for that."""
    tier = FakeTier()
    hierarchy, pool = make(tier)
    store(hierarchy, pool, DIGESTS[0])
    tier.error, tier.failing = OSError("directory gone"), {"contains"}
    assert hierarchy.find(DIGESTS[0]) is None


@pytest.mark.parametrize("error", [TierUnavailable("gone"), OSError("gone")])
def test_a_store_that_fails_is_counted_and_reaches_the_next_tier(make, error):
    first, second = FakeTier("first"), FakeTier("second")
    hierarchy, pool = make(first, second)
    first.error, first.failing = error, {"store"}
    store(hierarchy, pool, DIGESTS[0])
    assert hierarchy.find(DIGESTS[0]).name == "second"
    assert [link.counters.failures for link in hierarchy.links] == [1, 0]


def test_a_store_is_dropped_where_too_much_waits(make):
    tier = FakeTier()
    slot_bytes = sum(frame_nbytes(nbytes) for nbytes in PAYLOAD_NBYTES)
    hierarchy, pool = make(tier, max_store_bytes=slot_bytes)
    with pool.lease(2, "test") as lease:
        with tier.held("store"):
            first = hierarchy.store(DIGESTS[0], lease.slots[0])
            tier.wait_for_call("store")
            assert hierarchy.store(DIGESTS[1], lease.slots[1]).done()
            assert hierarchy.links[0].counters.dropped == 1
            assert not first.done()
        first.result(PATIENCE_S)
    assert hierarchy.find(DIGESTS[1]) is None


def test_a_hit_is_spread_over_all_threads(make):
    tier = FakeTier()
    hierarchy, pool = make(tier, num_threads=1)
    for digest in DIGESTS:
        store(hierarchy, pool, digest)
    assert load(hierarchy, pool, hierarchy.links[0], DIGESTS) == [True] * 6
    loads = [keys for operation, keys in tier.calls if operation == "load"]
    assert sorted(len(keys) for keys in loads) == [6, 6]  # three chunks of two ranks each


def test_a_tier_that_can_not_be_opened_is_left_out(make, caplog):
    broken, good = FakeTier("broken"), FakeTier("good")
    broken.failing = {"contains"}
    hierarchy, pool = make(broken, good)
    assert [link.name for link in hierarchy.links] == ["good"]
    assert "broken tier is left out" in caplog.text
    store(hierarchy, pool, DIGESTS[0])
    assert hierarchy.find(DIGESTS[0]).name == "good"
    assert not broken.values


def test_without_tiers_a_store_is_over_at_once(make):
    hierarchy, _ = make()
    assert isinstance(hierarchy, Hierarchy)
    assert hierarchy.store(DIGESTS[0], 0).done()
    assert hierarchy.flush(0)


def test_flush_waits_for_what_is_queued(make):
    tier = FakeTier()
    hierarchy, pool = make(tier)
    with pool.lease(1, "test") as lease:
        with tier.held("store"):
            written = hierarchy.store(DIGESTS[0], lease.slots[0])
            assert not hierarchy.flush(0.05)
        assert hierarchy.flush(PATIENCE_S)
        written.result(PATIENCE_S)
    assert isinstance(tier.error, TierError)
