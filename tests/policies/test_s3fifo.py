from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from kvkeep.policies import S3FIFO
from kvkeep.policies.s3fifo import MAX_USES, PROMOTE_USES
from kvkeep.testing.policies import PolicyTests


class TestS3FIFO(PolicyTests):
    def make(self, capacity: int) -> S3FIFO[int]:
        return S3FIFO(capacity)


def evict(policy: S3FIFO[str], count: int = 1) -> str:
    taken = list(islice(policy.victims(), count))
    for key in taken:
        policy.remove(key)
    return "".join(taken)


def held(keys: str, capacity: int = 10) -> S3FIFO[str]:
    policy = S3FIFO[str](capacity)
    for key in keys:
        policy.insert(key)
    return policy


def test_one_hit_wonders_go_before_what_was_used_again():
    policy = held("abcdef")
    policy.touch("a")
    policy.touch("c")
    assert "".join(policy.victims()) == "bdef" + "ac"


def test_a_ghost_that_comes_back_goes_to_main():
    policy = held("abc")
    assert evict(policy) == "a"
    policy.insert("a")
    policy.insert("d")
    assert "".join(policy.victims()) == "bcd" + "a"


def test_a_deleted_key_leaves_no_ghost():
    policy = held("abc")
    policy.remove("a")
    policy.insert("a")
    policy.insert("d")
    assert "".join(policy.victims()) == "bcad"  # from main, "a" would come last


def test_a_key_that_was_kept_leaves_no_ghost():
    policy = held("abc")
    assert "".join(policy.victims(keep="a")) == "bc"
    policy.remove("a")
    policy.insert("a")
    policy.insert("d")
    assert "".join(policy.victims()) == "bcad"  # from main, "a" would come last


def test_a_ghost_is_forgotten_after_as_many_evictions_as_main_holds():
    policy = held("0123456789")
    assert evict(policy, 10) == "0123456789"
    policy.insert("0")  # nine are remembered: the first is not
    policy.insert("1")
    policy.insert("x")
    assert "".join(policy.victims()) == "0x" + "1"


def test_main_gives_one_more_round_for_each_use():
    policy = held("abc")
    assert evict(policy, 3) == "abc"
    for key in "abc":  # ghosts: all to main
        policy.insert(key)
    policy.touch("a")
    policy.touch("a")
    policy.touch("b")
    assert "".join(policy.victims()) == "cba"


def test_main_is_evicted_while_small_is_below_its_share():
    policy = held("abcd", capacity=40)  # small's share is 4
    assert evict(policy, 2) == "ab"
    policy.insert("a")
    policy.insert("b")  # main: a b, small: c d
    assert "".join(policy.victims()) == "ab" + "cd"


def test_kept_keys_count_as_part_of_small():
    policy = held("abcdefg", capacity=40)
    assert evict(policy, 2) == "ab"
    policy.insert("a")
    policy.insert("b")  # main: a b, small: c d e f g
    assert "".join(policy.victims(keep="c")) == "de" + "ab" + "fg"


def test_kept_keys_of_main_stay_where_they_were():
    policy = held("abc")
    assert evict(policy, 3) == "abc"
    for key in "abc":
        policy.insert(key)
    assert "".join(policy.victims(keep="ab")) == "c"
    assert "".join(policy.victims()) == "abc"


def test_keys_that_were_offered_or_kept_stay_where_they_were():
    policy = held("abcdef")
    policy.touch("b")
    assert list(islice(policy.victims(keep="c"), 2)) == ["a", "d"]
    policy.insert("g")
    assert "".join(policy.victims()) == "acdefg" + "b"


def test_queues_are_as_long_as_what_they_hold():
    policy = S3FIFO[str](10)
    for number in range(1000):
        if len(policy) == 10:
            policy.remove(next(policy.victims()))
        policy.insert(str(number))
    assert len(policy._ghost) == 9
    assert len(policy._uses) == len(policy) == 10


class Algorithm1:
    """The paper's algorithm 1 as it stands, on lists whose head is the last element."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.share = max(1, capacity // 10)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.freq: dict[int, int] = {}

    def read(self, key: int) -> None:
        if key in self.freq:
            self.freq[key] = min(self.freq[key] + 1, MAX_USES)
            return
        while len(self.freq) >= self.capacity:
            self.evict()
        if key in self.ghost:
            self.ghost.remove(key)
            self.main.append(key)
        else:
            self.small.append(key)
        self.freq[key] = 0

    def evict(self) -> None:
        if len(self.small) >= self.share or not self.main:
            while self.small:
                tail = self.small.pop(0)
                if self.freq[tail] < PROMOTE_USES:
                    self.ghost = [*self.ghost, tail][-max(1, self.capacity - self.share) :]
                    del self.freq[tail]
                    return
                self.freq[tail] = 0
                self.main.append(tail)
        while self.main:
            tail = self.main.pop(0)
            if self.freq[tail] == 0:
                del self.freq[tail]
                return
            self.freq[tail] -= 1
            self.main.append(tail)


@given(st.lists(st.integers(0, 30), max_size=300), st.integers(1, 25))
def test_follows_the_paper_when_one_key_is_evicted_at_a_time(trace: list[int], capacity: int):
    policy, paper = S3FIFO[int](capacity), Algorithm1(capacity)
    for key in trace:
        if key in policy:
            policy.touch(key)
        else:
            if len(policy) == capacity:
                policy.remove(next(policy.victims()))
            policy.insert(key)
        paper.read(key)
        assert {key for key in range(31) if key in policy} == set(paper.freq)
