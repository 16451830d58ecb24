"""A load that fails is reported, and computed instead; one that fails for ever is not repeated so.

An engine that computes again from the first token asks for a match again, as for a new request.
"""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: the messages are subclasses of its own")

from scheduler_rig import CHUNK, FakeRequest, Rig

PROMPT = range(100, 100 + 3 * CHUNK)
HIT = 3 * CHUNK - 1


@pytest.fixture
def rig():
    """With the chunks of `PROMPT` in memory."""
    rig = Rig()
    rig.serve(FakeRequest("first", PROMPT))
    yield rig
    rig.check_nothing_left()


@pytest.fixture
def broken(rig):
    """Whether copies from slots to pages fail; they do."""
    broken = [True]
    scatter = rig.pages[0].scatter

    def maybe(runs):
        if broken[0]:
            raise OSError("made to fail")
        return scatter(runs)

    rig.pages[0].scatter = maybe
    return broken


def test_it_is_computed_instead(rig, broken):
    request = FakeRequest("a", PROMPT)
    assert rig.admit(request) == HIT
    rig.step()
    assert request.num_computed_tokens == 0
    rig._take_blocks(request)  # the engine gives them back, and looks the request up again
    assert rig.admit(request) == 0
    rig.step({request: len(PROMPT)})
    rig.verify(request)
    rig.finish(request)


def test_the_next_request_tries_again(rig, broken):
    first, second = FakeRequest("a", PROMPT), FakeRequest("b", PROMPT)
    assert rig.admit(first) == HIT
    rig.step()
    rig.finish(first)
    broken[0] = False
    assert rig.serve(second) == HIT


def test_what_it_computes_is_kept(rig, broken):
    longer = [*PROMPT, *range(500, 500 + CHUNK)]
    request = FakeRequest("a", longer)
    assert rig.admit(request) == 3 * CHUNK
    rig.step()
    rig._take_blocks(request)
    assert rig.admit(request) == 0
    rig.step({request: len(longer)})
    rig.finish(request)
    broken[0] = False
    assert rig.serve(FakeRequest("b", longer)) == 4 * CHUNK - 1
