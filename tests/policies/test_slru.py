from kvkeep.policies import LRU, SLRU
from kvkeep.testing.policies import PolicyTests


class TestSLRU(PolicyTests):
    def make(self, capacity: int) -> SLRU[int]:
        return SLRU(capacity)


def test_what_was_never_used_goes_before_what_was():
    slru = SLRU[str](capacity=10)  # protected holds 2
    slru.insert("a")
    slru.touch("a")
    for key in "bcd":
        slru.insert(key)
    assert "".join(slru.victims()) == "bcda"


def test_protected_overflows_into_the_recent_end_of_probation():
    slru = SLRU[str](capacity=10)
    for key in "abcd":
        slru.insert(key)
    for key in "abc":
        slru.touch(key)
    assert "".join(slru.victims()) == "da" + "bc"
    slru.touch("b")
    slru.touch("a")
    assert "".join(slru.victims()) == "dc" + "ba"


def test_a_long_scan_does_not_wash_out_what_is_used():
    slru, lru = SLRU[object](capacity=10), LRU[object]()
    for policy in (slru, lru):
        policy.insert("hot")
        policy.touch("hot")
        for key in range(100):
            if len(policy) == 10:
                policy.remove(next(policy.victims()))
            policy.insert(key)
    assert "hot" in slru
    assert "hot" not in lru


def test_a_tiny_tier_is_plain_lru():
    slru = SLRU[str](capacity=4)
    for key in "abcd":
        slru.insert(key)
    slru.touch("a")
    slru.touch("c")
    assert "".join(slru.victims()) == "bdac"


def test_chains_go_from_their_ends_when_used_deepest_first():
    slru = SLRU[str](capacity=10)
    for key in reversed("abcd"):
        slru.insert(key)
    for key in reversed("abcd"):  # more than protected holds: the deepest fall back
        slru.touch(key)
    assert "".join(slru.victims()) == "dcba"
