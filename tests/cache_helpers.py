"""What the tests of the cache share: to put, to get, to look whether it is all let go."""

import hashlib
import time
from contextlib import contextmanager

from kvkeep.memory.pool import HEADER_BYTES
from kvkeep.testing.fake import PATIENCE_S, FakeClock, fake_cache
from kvkeep.types import Digest

NBYTES = 256
CHAIN = tuple(Digest(hashlib.sha256(b"%d" % number).digest()) for number in range(12))
OTHER = Digest(b"other".ljust(32))


@contextmanager
def caches():
    """Makes caches; at the end each is whole, holds nothing but what it keeps, and is closed."""
    made = []

    def make(*tiers, **options):
        made.append(fake_cache(*tiers, payload_nbytes=[NBYTES], clock=FakeClock(), **options))
        return made[-1]

    yield make
    for cache in made:
        settle(cache)
        cache.check_integrity()
        assert cache.pool.owners().get("memory", 0) == cache.num_chunks
        cache.close()
        assert cache.pool.owners() == {}


def settle(cache):
    """Wait for all transfers; nobody but memory holds anything then."""
    cache.hierarchy.flush(PATIENCE_S)
    eventually(lambda: not cache._loading and set(cache.pool.owners()) <= {"memory"})


def eventually(holds):
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "did not come about"
        time.sleep(0.001)


def content(digest):
    return hashlib.shake_128(digest).digest(NBYTES)


def write(cache, reservation):
    for digest, slot in zip(reservation.digests, reservation.lease.slots, strict=True):
        cache.pool.view(slot)[HEADER_BYTES : HEADER_BYTES + NBYTES] = content(digest)


def put(cache, digests, owner="request"):
    """Keep `digests`; which of them were new and had room."""
    reservation = cache.reserve(digests, owner)
    if reservation is None:
        return ()
    write(cache, reservation)
    cache.publish(reservation)
    cache.hierarchy.flush(PATIENCE_S)
    eventually(lambda: "write" not in cache.pool.owners())
    return reservation.digests


def check(cache, fetch, digests):
    """`fetch` holds exactly `digests`, and their bytes are theirs."""
    assert len(fetch.slots) == len(digests)
    for digest, slot in zip(digests, fetch.slots, strict=True):
        assert cache.pool.view(slot)[HEADER_BYTES : HEADER_BYTES + NBYTES] == content(digest)


def get(cache, digests=CHAIN):
    """Match and fetch; the (tier, chunks) runs that came, checked and let go."""
    fetch = cache.fetch(cache.match(digests), "request")
    eventually(lambda: fetch.done)
    check(cache, fetch, digests[: len(fetch.slots)])
    cache.release(fetch)
    cache.release(fetch)
    return fetch.source_runs()
