"""The pool against a model that counts holds by hand."""

import threading
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvkeep.errors import PoolError
from kvkeep.memory.pool import ALIGNMENT, SlotPool
from kvkeep.memory.shared import SharedMemory

NUM_SLOTS = 6
OWNERS = ("memory", "write", "request-1")


@pytest.fixture
def pool():
    pool = SlotPool.create(NUM_SLOTS * ALIGNMENT, [ALIGNMENT])
    yield pool
    pool.check_integrity()
    pool.close()


class PoolMachine(RuleBasedStateMachine):
    open_leases = Bundle("open_leases")
    ended_leases = Bundle("ended_leases")

    def __init__(self):
        super().__init__()
        self.pool = SlotPool.create(NUM_SLOTS * ALIGNMENT, [ALIGNMENT])
        self.holdings = [self.pool.holding("memory"), self.pool.holding("other index")]
        self.held = {}  # the model: lease -> its slots
        self.kept = [set(), set()]  # and what each holding holds

    def free(self):
        taken = {slot for slots in (*self.held.values(), *self.kept) for slot in slots}
        return set(range(NUM_SLOTS)) - taken

    @rule(target=open_leases, count=st.integers(0, NUM_SLOTS + 2), owner=st.sampled_from(OWNERS))
    def lease(self, count, owner):
        free = self.free()
        lease = self.pool.lease(count, owner)
        if count > len(free):
            assert lease is None
            return multiple()
        assert len(set(lease.slots)) == len(lease.slots) == count
        assert set(lease.slots) <= free
        assert (lease.owner, lease.held) == (owner, True)
        self.held[lease] = lease.slots
        return lease

    @rule(
        target=open_leases,
        slots=st.lists(st.integers(0, NUM_SLOTS - 1), max_size=3, unique=True),
        owner=st.sampled_from(OWNERS),
    )
    def share(self, slots, owner):
        if set(slots) & self.free():
            with pytest.raises(PoolError):
                self.pool.share(slots, owner)
            return multiple()
        lease = self.pool.share(slots, owner)
        assert lease.slots == tuple(slots)
        self.held[lease] = lease.slots
        return lease

    @rule(target=ended_leases, lease=consumes(open_leases))
    def release(self, lease):
        lease.release()
        del self.held[lease]
        return lease

    @rule(target=ended_leases, lease=consumes(open_leases), fails=st.booleans())
    def leave_the_block(self, lease, fails):
        try:
            with lease:
                if fails:
                    raise RuntimeError
        except RuntimeError:
            assert fails
        del self.held[lease]
        return lease

    @rule(target=ended_leases, lease=consumes(open_leases), which=st.sampled_from([0, 1]))
    def take(self, lease, which):
        """Move the lease's hold into a holding, unless that holds one of its slots already."""
        holding, kept = self.holdings[which], self.kept[which]
        if kept & set(lease.slots):
            with pytest.raises(PoolError):
                holding.take(lease)
            assert lease.held
            lease.release()
        else:
            holding.take(lease)
            assert not lease.held
            kept |= set(lease.slots)
        del self.held[lease]
        return lease

    @rule(which=st.sampled_from([0, 1]), slots=st.sets(st.integers(0, NUM_SLOTS - 1), max_size=3))
    def drop(self, which, slots):
        holding, kept = self.holdings[which], self.kept[which]
        if slots <= kept:
            holding.drop(sorted(slots))
            kept -= slots
        else:
            with pytest.raises(PoolError):
                holding.drop(sorted(slots))

    @rule(lease=ended_leases)
    def end_again(self, lease):
        with pytest.raises(PoolError):
            lease.release()
        with pytest.raises(PoolError):
            self.holdings[0].take(lease)
        with lease:  # leaving a block is no second release
            pass

    @invariant()
    def agrees_with_the_model(self):
        self.pool.check_integrity()
        holds = Counter(slot for slots in (*self.held.values(), *self.kept) for slot in slots)
        assert [self.pool.num_holds(slot) for slot in range(NUM_SLOTS)] == [
            holds[slot] for slot in range(NUM_SLOTS)
        ]
        assert self.pool.free_slots == len(self.free())
        owners = Counter(
            {h.owner: len(kept) for h, kept in zip(self.holdings, self.kept, strict=True)}
        )
        for lease, slots in self.held.items():
            assert lease.held
            owners[lease.owner] += len(slots)
        assert self.pool.owners() == {owner: count for owner, count in owners.items() if count}
        assert [holding.slots for holding in self.holdings] == self.kept

    def teardown(self):
        for holding in self.holdings:
            holding.drop(list(holding.slots))
        for lease in self.held:
            lease.release()
        assert self.pool.owners() == {}
        assert self.pool.free_slots == NUM_SLOTS
        self.pool.close()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS, 1 << 40])
def test_a_slot_that_does_not_exist_can_not_be_shared(pool, slot):
    with pool.lease(NUM_SLOTS, "all"), pytest.raises(PoolError):
        pool.share([slot], "me")


def test_a_slot_named_twice_is_not_dropped_twice(pool):
    holding = pool.holding("memory")
    holding.take(pool.lease(1, "request"))
    with pool.share(list(holding.slots), "write"), pytest.raises(PoolError):
        holding.drop([*holding.slots, *holding.slots])


def test_a_slot_leased_twice_by_one_is_not_taken_as_one(pool):
    """A holding holds a slot once: the second hold would never be given back."""
    holding = pool.holding("memory")
    with pool.lease(1, "request") as lease:
        twice = pool.share([*lease.slots, *lease.slots], "load")
        try:
            with pytest.raises(PoolError):
                holding.take(twice)
        finally:
            if twice.held:
                twice.release()


def test_a_negative_count_is_refused(pool):
    with pytest.raises(PoolError):
        pool.lease(-1, "me")


@pytest.mark.parametrize(
    ("size_bytes", "slot_bytes"),
    [(4095, [4096]), (1 << 20, [4097]), (1 << 20, [0]), (1 << 20, [-4096]), (8191, [4096, 4096])],
)
def test_what_can_be_no_pool(size_bytes, slot_bytes):
    with pytest.raises(PoolError):
        SlotPool.create(size_bytes, slot_bytes)


def test_slots_must_fit_into_the_memory():
    memory = SharedMemory.create(8192)
    try:
        with pytest.raises(PoolError, match="do not fit"):
            SlotPool(memory, 3, [4096])
    finally:
        memory.close()


def test_every_rank_has_a_region_of_its_own():
    pool = SlotPool.create(3 * (4096 + 8192), [4096, 8192])
    places = [(pool.offset(slot, rank), rank) for rank in range(2) for slot in range(3)]
    assert [offset for offset, _ in places] == [0, 4096, 8192, 12288, 20480, 28672]
    for number, (offset, rank) in enumerate(places):
        view = pool.view(number % 3, rank)
        assert len(view) == pool.slot_bytes[rank]
        view[:] = bytes([number + 1]) * len(view)
        assert bytes(pool.memory.view[offset : offset + len(view)]) == bytes(view)
    for number, (_, rank) in enumerate(places):  # nobody wrote over anybody
        assert set(pool.view(number % 3, rank)) == {number + 1}
    pool.close()


def test_the_lowest_slots_go_first(pool):
    """They are the first to get pages."""
    with pool.lease(2, "one") as one, pool.lease(1, "other") as other:
        assert (one.slots, other.slots) == ((0, 1), (2,))


def test_a_released_slot_is_used_again_before_a_new_one(pool):
    first = pool.lease(1, "me")
    first.release()
    with pool.lease(1, "me") as second:
        assert second.slots == first.slots


def test_threads_hammer_lease_and_release(pool):
    """No slot is ever held by two of them, and none is lost."""
    holder = [0] * NUM_SLOTS
    clashes = []
    holdings = {name: pool.holding(f"thread-{name}") for name in range(1, 7)}

    def work(name):
        for turn in range(300):
            lease = pool.lease(turn % 3, f"thread-{name}")
            if lease is None:
                continue
            for slot in lease.slots:
                holder[slot] = name
            further = pool.share(lease.slots, "write")
            clashes.extend(slot for slot in lease.slots if holder[slot] != name)
            if turn % 2:
                holdings[name].take(lease)
                holdings[name].drop(lease.slots)
            else:
                lease.release()
            clashes.extend(slot for slot in lease.slots if holder[slot] != name)
            further.release()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert pool.owners() == {}
    assert pool.free_slots == NUM_SLOTS


def test_one_lease_released_by_many_threads_at_once_is_given_back_once(pool):
    for _ in range(50):
        lease = pool.lease(2, "me")
        outcomes = []
        start = threading.Barrier(4)

        def give_back(lease=lease, start=start, outcomes=outcomes):
            start.wait()
            try:
                lease.release()
            except PoolError:
                outcomes.append("refused")
            else:
                outcomes.append("released")

        threads = [threading.Thread(target=give_back) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["refused"] * 3 + ["released"]


def test_a_broken_count_is_noticed(pool):
    lease = pool.lease(1, "me")
    pool._holds[5] += 1
    with pytest.raises(PoolError, match="count of holds"):
        pool.check_integrity()
    pool._holds[5] -= 1
    pool._free.append(5)
    with pytest.raises(PoolError, match="free twice"):
        pool.check_integrity()
    pool._free[-1] = lease.slots[0]
    with pytest.raises(PoolError, match="free slots"):
        pool.check_integrity()
    pool._free.pop()
    lease.release()
