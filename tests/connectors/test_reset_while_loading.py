"""`reset` while a request's load is under way, as an engine that schedules ahead can have it.

The engine asks for it when its weights have changed. The request goes on with what it was given,
but nothing of it may be kept under a key of before, nor may it load any more of before: after a
restart the weights are the old ones again, and these keys are looked up.
"""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: the messages are subclasses of its own")

from scheduler_rig import CHUNK, FakeRequest, Rig

from kvkeep.testing.fake import FakeTier

PROMPT = range(100, 100 + 3 * CHUNK)
LONGER = [*PROMPT, *range(500, 500 + 2 * CHUNK)]


@pytest.fixture
def tier():
    return FakeTier()


@pytest.fixture
def rig(tier):
    """With the chunks of `PROMPT` in memory and in a slow tier, and a request that loads them
    while the cache is reset."""
    rig = Rig(tier, num_slots=16)
    rig.serve(FakeRequest("first", PROMPT))
    rig.settle()
    yield rig
    rig.check_nothing_left()


@pytest.fixture
def loading(rig):
    request = FakeRequest("loading", LONGER)
    assert rig.admit(request) == 3 * CHUNK
    rig.side.reset()
    rig.step()
    assert request.num_computed_tokens == 3 * CHUNK
    return request


def test_it_stores_nothing_under_a_key_of_before(rig, tier, loading):
    kept = set(tier.values)
    rig.step({loading: 2 * CHUNK})
    rig.finish(loading)
    rig.settle()
    assert set(tier.values) == kept
    assert rig.cache.num_chunks == 0


def test_preempted_it_loads_nothing_of_before(rig, loading):
    rig.preempt(loading)
    assert rig.admit(loading) == 0
    rig.step({loading: len(LONGER)})
    rig.finish(loading)


def test_the_next_request_finds_nothing_of_before(rig, loading):
    rig.step({loading: 2 * CHUNK})
    rig.finish(loading)
    assert rig.serve(FakeRequest("next", LONGER)) == 0
    assert rig.serve(FakeRequest("after", LONGER)) == 5 * CHUNK - 1


def test_its_slots_are_held_until_the_copy_has_ended(rig):
    request = FakeRequest("loading", LONGER)
    rig.admit(request)
    rig.side.reset()
    assert rig.cache.pool.owners()["loading"] == 3
    rig.step()
    assert "loading" not in rig.cache.pool.owners()
    rig.finish(request)
