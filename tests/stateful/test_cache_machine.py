"""KVCache against a model that only says which bytes belong to which digest.

Whatever fails, waits, or is spoiled underneath: bytes that are given are the right ones, nothing
is lost track of, and nothing is held at the end. Transfers run one by one, in an order that
Hypothesis chooses; there are no threads, so a failure can be run again.
"""

import hashlib
from concurrent.futures import Future

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvkeep.errors import TierError, TierUnavailable
from kvkeep.memory.pool import HEADER_BYTES
from kvkeep.testing.fake import FakeClock, FakeEngine, FakeTier, fake_cache
from kvkeep.tiers.wrappers import FaultRates, Faulty
from kvkeep.types import Digest

NUM_SLOTS = 5
CHAINS = [
    [Digest(hashlib.sha256(b"%d" % number).digest()) for number in numbers]
    for numbers in ((0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 10, 11), (20, 21, 22))
]
NBYTES = 256
FAULTS = [
    FaultRates(),
    FaultRates(error=0.3),
    FaultRates(miss=0.3),
    FaultRates(corrupt=0.3),
    FaultRates(truncate=0.3),
    FaultRates(drop=0.3, corrupt=0.1, error=0.1),
]

runs = st.sampled_from(CHAINS).flatmap(
    lambda chain: st.integers(1, len(chain)).map(lambda length: tuple(chain[:length]))
)


class SteppedQueue:
    """A `TransferQueue` whose jobs run when told."""

    num_threads = 2

    def __init__(self, breaker):
        self.breaker = breaker
        self.jobs = []

    def load(self, job):
        future = Future()
        if self.breaker.allows():
            self.jobs.append((future, job))
        else:
            future.set_exception(TierUnavailable("cut off"))
        return future

    def store(self, job, nbytes):
        return self.load(job) if len(self.jobs) < 6 and self.breaker.is_ready else None

    def run(self, number):
        future, job = self.jobs.pop(number % len(self.jobs))
        try:
            result = job()
        except TierError as error:
            self.breaker.failed(error)
            future.set_exception(error)
        else:
            self.breaker.succeeded()
            future.set_result(result)

    def close(self):
        assert not self.jobs


class CacheMachine(RuleBasedStateMachine):
    reservations = Bundle("reservations")
    fetches = Bundle("fetches")

    keeps_memory = True

    def __init__(self):
        super().__init__()
        self.near, self.far = FakeTier("near"), FakeTier("far")
        self.faulty = [Faulty(self.near, seed=1), Faulty(self.far, seed=2)]
        self.clock = FakeClock()
        self.cache = fake_cache(
            *self.faulty,
            num_slots=NUM_SLOTS,
            payload_nbytes=[NBYTES],
            keeps_memory=self.keeps_memory,
            clock=self.clock,
        )
        self.engine = FakeEngine(self.cache)
        for link in self.cache.hierarchy.links:
            link.queue.close()
            link.queue = SteppedQueue(link.breaker)
        self.open_fetches = []
        self.open_reservations = []
        self.known = set()  # digests whose bytes were ever written

    # -- what an engine does -------------------------------------------------------------------

    @rule(digests=runs)
    def compute(self, digests):
        """Both halves at once, and written through."""
        reservation = self.cache.reserve(digests, "computes")
        if reservation is not None:
            self.engine.write(reservation)
            self.known.update(reservation.digests)
            self.cache.publish(reservation)
        self.run_all()

    @rule(digests=runs, give_up=st.booleans())
    def read_from_tiers(self, digests, give_up):
        """As after a restart: whatever comes does not come from memory."""
        self.run_all()
        self.cache.clear_memory()
        fetch = self.cache.fetch(self.cache.match(digests), "reads")
        if give_up:
            self.run_one(0, 0)
            self.cache.give_up(fetch)
        self.run_all()
        assert fetch.done
        self.engine.check(fetch, digests[: len(fetch.slots)])
        assert sum(count for _, count in fetch.source_runs()) == len(fetch.slots)
        self.cache.release(fetch)

    @rule(target=reservations, digests=runs)
    def reserve(self, digests):
        reservation = self.cache.reserve(digests, "computes")
        if reservation is None:
            return multiple()
        assert reservation.digests == tuple(digests[at] for at in reservation.positions)
        assert len(reservation.lease.slots) == len(reservation.digests)
        self.open_reservations.append(reservation)
        return reservation

    @rule(reservation=consumes(reservations))
    def publish(self, reservation):
        self.engine.write(reservation)
        self.known.update(reservation.digests)
        self.open_reservations.remove(reservation)
        self.cache.publish(reservation)

    @rule(reservation=consumes(reservations))
    def abandon(self, reservation):
        for slot in reservation.lease.slots:  # half a copy may have been made
            self.engine.payload(slot)[:100] = b"\xa5" * 100
        self.open_reservations.remove(reservation)
        self.cache.abandon(reservation)

    @rule()
    def clear_memory(self):
        self.cache.clear_memory()

    @rule(target=fetches, digests=runs)
    def fetch(self, digests):
        match = self.cache.match(digests)
        assert match.digests == digests[: len(match.digests)]
        assert set(match.digests) <= self.known
        assert match.in_memory <= len(match.digests)
        fetch = self.cache.fetch(match, "reads")
        self.open_fetches.append((fetch, match.digests))
        return fetch, match.digests

    @rule(fetch=fetches)
    def give_up(self, fetch):
        if fetch in self.open_fetches:
            self.cache.give_up(fetch[0])
            assert fetch[0].done

    @rule(fetch=consumes(fetches))
    def release(self, fetch):
        self.cache.release(fetch[0])
        self.cache.release(fetch[0])
        self.open_fetches.remove(fetch)

    # -- what happens to it --------------------------------------------------------------------

    @rule(tier=st.sampled_from([0, 1]), rates=st.sampled_from(FAULTS))
    def change_faults(self, tier, rates):
        self.faulty[tier].rates = rates

    @rule(tier=st.sampled_from([0, 1]), at=st.integers(-NBYTES, NBYTES - 1))
    def spoil(self, tier, at):
        """One bit of every frame, in its header or its payload."""
        for key in list((self.near, self.far)[tier].values):
            (self.near, self.far)[tier].flip(key, HEADER_BYTES + at if at >= 0 else -1 - at)

    @rule(tier=st.sampled_from([0, 1]))
    def lose(self, tier):
        (self.near, self.far)[tier].values.clear()

    @rule(tier=st.sampled_from([0, 1]), number=st.integers(0, 20))
    def run_one(self, tier, number):
        """Any transfer may be the next to end."""
        queue = self.cache.hierarchy.links[tier].queue
        if queue.jobs:
            queue.run(number)

    @rule()
    def run_all(self):
        for link in self.cache.hierarchy.links:
            while link.queue.jobs:
                link.queue.run(0)
        assert all(fetch.done for fetch, _ in self.open_fetches)

    @rule(seconds=st.sampled_from([0.5, 2.0, 60.0]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def what_is_given_is_right(self):
        for fetch, digests in self.open_fetches:
            self.engine.check(fetch, digests[: len(fetch.slots)])
            assert sum(count for _, count in fetch.source_runs()) == len(fetch.slots)

    @invariant()
    def nothing_is_lost_track_of(self):
        self.cache.check_integrity()
        owners = self.cache.pool.owners()
        assert set(owners) <= {"memory", "write", "computes", "reads"}
        computing = sum(len(open_.lease.slots) for open_ in self.open_reservations)
        assert owners.get("computes", 0) == computing
        assert self.cache.num_chunks <= NUM_SLOTS

    def teardown(self):
        self.run_all()
        for fetch, _ in self.open_fetches:
            self.cache.release(fetch)
        for reservation in self.open_reservations:
            self.cache.abandon(reservation)
        owners = self.cache.pool.owners()
        assert set(owners) <= {"memory"}
        assert owners.get("memory", 0) == self.cache.num_chunks
        if not self.keeps_memory:
            assert owners == {}
        self.cache.close()
        assert self.cache.pool.owners() == {}
        assert self.cache.pool.free_slots == NUM_SLOTS


@pytest.mark.parametrize("keeps_memory", [True, False])
def test_against_a_model(keeps_memory):
    machine = type("Machine", (CacheMachine,), {"keeps_memory": keeps_memory})
    case = machine.TestCase
    case.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
    case("runTest").runTest()
