from kvkeep.policies import LRU, MRU
from kvkeep.testing.policies import PolicyTests


class TestMRU(PolicyTests):
    def make(self, capacity: int) -> MRU[int]:
        return MRU()


def test_the_most_recently_used_goes_first():
    mru = MRU[str]()
    for key in "abcd":
        mru.insert(key)
    mru.touch("b")
    assert "".join(mru.victims()) == "bdca"


def test_a_loop_longer_than_the_cache_hits_where_lru_does_not():
    hits = {}
    for policy in (LRU[str](), MRU[str]()):
        hits[type(policy)] = 0
        for key in "abcd" * 5:
            if key in policy:
                hits[type(policy)] += 1
                policy.touch(key)
                continue
            if len(policy) == 3:
                policy.remove(next(policy.victims()))
            policy.insert(key)
    assert hits[LRU] == 0
    assert hits[MRU] == 11
