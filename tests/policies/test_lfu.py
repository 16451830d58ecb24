from hypothesis import given
from hypothesis import strategies as st

from kvkeep.policies import LFU
from kvkeep.policies.lfu import MAX_USES
from kvkeep.testing.policies import PolicyTests


class TestLFU(PolicyTests):
    def make(self, capacity: int) -> LFU[int]:
        return LFU()


def test_the_least_used_goes_first_and_equals_by_recency():
    lfu = LFU[str]()
    for key in "abcd":
        lfu.insert(key)
    for key in "abba":
        lfu.touch(key)
    lfu.touch("c")
    assert "".join(lfu.victims()) == "dcba"


def test_uses_beyond_the_cap_count_as_recency_only():
    lfu = LFU[str]()
    lfu.insert("a")
    lfu.insert("b")
    for _ in range(1000):
        lfu.touch("a")
    for _ in range(MAX_USES):
        lfu.touch("b")
    lfu.touch("a")
    assert "".join(lfu.victims()) == "ba"


def test_a_count_of_long_ago_is_overtaken():
    lfu = LFU[object]()
    lfu.insert("once hot")
    for _ in range(1000):
        lfu.touch("once hot")
    rounds = 0
    while "once hot" in lfu:  # newcomers, each used once after its insert
        rounds += 1
        lfu.insert(rounds)
        lfu.touch(rounds)
        if len(lfu) > 4:
            lfu.remove(next(lfu.victims()))
    assert rounds < 4 * MAX_USES


def test_removing_a_hot_key_ages_nobody():
    lfu = LFU[str]()
    lfu.insert("hot")
    for _ in range(MAX_USES):
        lfu.touch("hot")
    lfu.insert("a")
    lfu.touch("a")
    lfu.remove("hot")
    lfu.insert("b")
    assert "".join(lfu.victims()) == "ba"


def test_age_is_the_priority_of_the_first_offer_not_of_the_last():
    lfu = LFU[str]()
    for key in "ab":
        lfu.insert(key)
    for key in "aaa":
        lfu.touch(key)
    assert "".join(lfu.victims()) == "ba"
    lfu.insert("c")
    assert "".join(lfu.victims()) == "bca"


def test_asking_twice_does_not_age_twice():
    lfu = LFU[str]()
    for key in "ab":
        lfu.insert(key)
    lfu.touch("a")
    for _ in range(10):
        assert next(lfu.victims()) == "b"
    lfu.insert("c")  # enters at age 1 + one use, level with "a", which came to it before
    assert "".join(lfu.victims()) == "bac"


@given(st.lists(st.integers(0, 6), max_size=200), st.integers(1, 5))
def test_follows_lfu_with_dynamic_aging(trace: list[int], capacity: int):
    lfu = LFU[int]()
    uses: dict[int, int] = {}
    rank: dict[int, tuple[int, int]] = {}  # key to (priority, when it got there)
    age = 0
    for now, key in enumerate(trace):
        assert (key in lfu) == (key in rank)
        if key in rank:
            lfu.touch(key)
        else:
            if len(rank) == capacity:
                victim = min(rank, key=rank.__getitem__)
                age = rank.pop(victim)[0]
                offered = next(lfu.victims())
                assert offered == victim
                lfu.remove(offered)
            uses[key] = 0
            lfu.insert(key)
        uses[key] = min(uses[key] + 1, MAX_USES)
        rank[key] = (age + uses[key], now)
