"""The index: who is evicted, who never is."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvkeep.errors import PoolError
from kvkeep.memory.index import ChunkIndex
from kvkeep.memory.pool import ALIGNMENT, SlotPool
from kvkeep.policies import POLICY_NAMES, make_policy

NUM_SLOTS = 5
KEYS = "abcdefgh"


def make(num_slots=NUM_SLOTS, policy="lru"):
    pool = SlotPool.create(num_slots * ALIGNMENT, [ALIGNMENT])
    return pool, ChunkIndex(pool, make_policy(policy, num_slots))


@pytest.fixture
def parts():
    pool, index = make()
    yield pool, index
    index.check_integrity()
    pool.check_integrity()
    index.clear()
    assert pool.owners() == {}
    pool.close()


def fill(index, keys, owner="memory"):
    for key in keys:
        assert index.insert([key], index.reserve(1, owner)) == [key]


class IndexMachine(RuleBasedStateMachine):
    """The model: which keys are here, in which slot; and which slots others hold."""

    reserved = Bundle("reserved")
    shared = Bundle("shared")

    policy = "lru"

    def __init__(self):
        super().__init__()
        self.pool, self.index = make(policy=self.policy)
        self.kept = {}
        self.others = []  # leases of others, open

    def held_by_others(self, slot):
        return any(slot in lease.slots for lease in self.others)

    @rule(
        target=reserved,
        count=st.integers(1, NUM_SLOTS + 1),
        keep=st.sets(st.sampled_from(KEYS)),
    )
    def reserve(self, count, keep):
        protected = {
            key for key, slot in self.kept.items() if key in keep or self.held_by_others(slot)
        }
        free = self.pool.free_slots
        room = free + len(self.kept) - len(protected)
        lease = self.index.reserve(count, "request", keep)
        gone = self.kept.keys() - set(self.index)
        assert not gone & protected
        # As few as were needed, and as many slots as could be had.
        assert len(gone) == min(max(0, count - free), room - free)
        for key in gone:
            del self.kept[key]
        if room == 0:
            assert lease is None
            return multiple()
        assert len(lease.slots) == min(count, room)
        self.others.append(lease)
        return lease

    @rule(lease=consumes(reserved), keys=st.permutations(KEYS), shared=st.booleans())
    def insert(self, lease, keys, shared):
        """As many keys as slots, in prefix order; in one half of the cases with a write on them."""
        keys = keys[: len(lease.slots)]
        self.others.remove(lease)
        if shared:
            self.others.append(self.pool.share(lease.slots, "write"))
        new = [key for key in keys if key not in self.kept]
        assert self.index.insert(keys, lease) == new
        assert not lease.held
        for key, slot in zip(keys, lease.slots, strict=True):
            self.kept.setdefault(key, slot)

    @rule(lease=consumes(reserved) | consumes(shared))
    def give_back(self, lease):
        self.others.remove(lease)
        lease.release()

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def remove(self, keys):
        assert self.index.remove(keys) == len(self.kept.keys() & set(keys))
        for key in keys:
            self.kept.pop(key, None)

    @rule(target=shared, key=st.sampled_from(KEYS))
    def share(self, key):
        if key not in self.kept:
            return multiple()
        lease = self.pool.share([self.kept[key]], "load")
        self.others.append(lease)
        return lease

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def look(self, keys):
        run = self.index.prefix(keys)
        assert all(key in self.kept for key in keys[:run])
        assert run == len(keys) or keys[run] not in self.kept
        assert self.index.slots(keys[:run]) == [self.kept[key] for key in keys[:run]]
        self.index.touch(keys[:run])

    @rule()
    def clear(self):
        assert self.index.clear() == len(self.kept)
        self.kept.clear()

    @invariant()
    def agrees_with_the_model(self):
        self.index.check_integrity()
        self.pool.check_integrity()
        assert set(self.index) == set(self.kept)
        assert len(self.index) == len(self.kept)
        assert self.pool.free_slots == NUM_SLOTS - len(
            {slot for lease in self.others for slot in lease.slots} | set(self.kept.values())
        )

    def teardown(self):
        for lease in self.others:
            lease.release()
        self.index.clear()
        assert self.pool.owners() == {}
        self.pool.close()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_against_a_model(policy):
    machine = type("Machine", (IndexMachine,), {"policy": policy})
    case = machine.TestCase
    case.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
    case("runTest").runTest()


def test_the_start_of_a_run_outlives_its_end(parts):
    _, index = parts
    fill(index, "abcde")
    index.touch("abc")
    with index.reserve(3, "request") as lease:
        assert len(lease.slots) == 3
        assert set(index) == {"a", "b"}
        assert index.evictions == 3


def test_a_slot_that_somebody_else_holds_stays(parts):
    pool, index = parts
    fill(index, "abcde")
    with pool.share(index.slots("a"), "load"), index.reserve(5, "request") as lease:
        assert len(lease.slots) == 4
        assert set(index) == {"a"}


def test_nothing_is_evicted_where_there_is_room(parts):
    _, index = parts
    fill(index, "abc")
    with index.reserve(2, "request"):
        assert index.evictions == 0
        assert set(index) == set("abc")


def test_none_where_nothing_can_be_freed(parts):
    _, index = parts
    fill(index, "abcde")
    assert index.reserve(1, "request", keep="abcde") is None
    assert index.evictions == 0


def test_the_start_of_a_prefix_that_is_inserted_outlives_its_end(parts):
    _, index = parts
    assert index.insert("abcde", index.reserve(5, "request")) == list("abcde")
    with index.reserve(3, "request"):
        assert set(index) == {"a", "b"}


def test_inserted_twice_the_second_slot_is_free_again(parts):
    pool, index = parts
    fill(index, "b")
    assert index.insert("abc", index.reserve(3, "request")) == ["a", "c"]
    assert pool.owners() == {"memory": 3}
    assert index.insert("dd", index.reserve(2, "request")) == ["d"]
    assert pool.free_slots == 1


def test_what_the_index_holds_is_held_in_its_name(parts):
    """Whoever made the room: a chunk that is kept must not look like a store that never ended."""
    pool, index = parts
    fill(index, "a", owner="store")
    assert pool.owners() == {"memory": 1}


@pytest.mark.parametrize("keys", ["", "a", "abc"])
def test_a_chunk_has_one_slot(parts, keys):
    pool, index = parts
    with pool.lease(2, "request") as lease:
        with pytest.raises(PoolError, match="do not fit"):
            index.insert(keys, lease)
        assert lease.held
    assert len(index) == 0


def test_a_lease_that_was_given_back_is_not_inserted(parts):
    pool, index = parts
    lease = pool.lease(1, "request")
    lease.release()
    with pytest.raises(PoolError, match="given back"):
        index.insert("a", lease)
    assert len(index) == 0


def test_a_lost_hold_is_noticed(parts):
    pool, index = parts
    fill(index, "ab")
    slot = index._slots["a"]
    with pool.share([slot], "me"):
        index._holding.drop([slot])
        with pytest.raises(PoolError, match="other slots"):
            index.check_integrity()
    index._slots["a"] = index._slots["b"]
    with pytest.raises(PoolError, match="other slots"):
        index.check_integrity()
    del index._slots["a"]
    with pytest.raises(PoolError, match="policy"):
        index.check_integrity()
    index._policy.remove("a")
