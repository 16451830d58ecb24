from kvkeep.policies import LRU
from kvkeep.testing.policies import PolicyTests


class TestLRU(PolicyTests):
    def make(self, capacity: int) -> LRU[int]:
        return LRU()


def test_the_least_recently_used_goes_first():
    lru = LRU[str]()
    for key in "abcd":
        lru.insert(key)
    lru.touch("a")
    lru.touch("c")
    assert "".join(lru.victims()) == "bdac"


def test_touching_the_most_recent_changes_nothing():
    lru = LRU[str]()
    for key in "abc":
        lru.insert(key)
    lru.touch("c")
    assert "".join(lru.victims()) == "abc"


def test_keys_to_keep_are_skipped_and_stay_in_place():
    lru = LRU[str]()
    for key in "abcd":
        lru.insert(key)
    assert "".join(lru.victims(keep={"a", "c"})) == "bd"
    assert "".join(lru.victims()) == "abcd"


def test_chains_go_from_their_ends_when_used_deepest_first():
    # Two conversations share the system prompt "s": s-a-b and s-x-y.
    lru = LRU[str]()
    for key in reversed("sab"):
        lru.insert(key)
    lru.touch("s")
    for key in reversed("xy"):
        lru.insert(key)
    lru.touch("s")
    assert "".join(lru.victims()) == "bayxs"
