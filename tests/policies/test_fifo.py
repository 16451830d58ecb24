from kvkeep.policies import FIFO
from kvkeep.testing.policies import PolicyTests


class TestFIFO(PolicyTests):
    def make(self, capacity: int) -> FIFO[int]:
        return FIFO()


def test_the_oldest_goes_first_whatever_was_used():
    fifo = FIFO[str]()
    for key in "abcd":
        fifo.insert(key)
    fifo.touch("a")
    fifo.touch("b")
    assert "".join(fifo.victims()) == "abcd"


def test_a_key_that_comes_back_is_new():
    fifo = FIFO[str]()
    for key in "abc":
        fifo.insert(key)
    fifo.remove("a")
    fifo.insert("a")
    assert "".join(fifo.victims()) == "bca"
