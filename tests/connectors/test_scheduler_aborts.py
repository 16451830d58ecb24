"""Requests that end, start again or change at the worst moment."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: the messages are subclasses of its own")

from scheduler_rig import CHUNK, FakeRequest, Rig

from kvkeep.testing.fake import FakeTier

PROMPT = range(100, 100 + 3 * CHUNK)
HIT = 3 * CHUNK - 1


@pytest.fixture
def rig():
    """With the chunks of `PROMPT` in memory."""
    rig = Rig()
    rig.serve(ask("first"))
    yield rig
    rig.check_nothing_left()


def ask(name, tokens=PROMPT):
    return FakeRequest(name, tokens)


def test_aborted_before_it_got_blocks(rig):
    request = ask("a")
    assert rig.side.match(request, 0) == (HIT, True)
    rig.finish(request)
    assert rig.step().loads == []


def test_aborted_before_its_first_look_up(rig):
    rig.finish(ask("a"))


def test_aborted_while_a_slow_tier_brings_its_chunks():
    tier = FakeTier()
    rig = Rig(tier)
    rig.serve(ask("first"))
    rig.settle()
    rig.cache.clear_memory()
    with tier.held("load"):
        request = ask("a")
        assert rig.admit(request) is None
        rig.finish(request)
        assert "a" not in rig.cache.pool.owners()
    rig.settle()
    assert rig.serve(ask("b")) == HIT
    rig.check_nothing_left()


def test_aborted_while_it_is_loading_its_slots_are_held_until_the_copy_has_ended(rig):
    request = ask("a")
    assert rig.admit(request) == HIT
    rig.finish(request)
    assert rig.cache.pool.owners()["a"] == 3
    assert len(rig.step().loads) == 1
    assert "a" not in rig.cache.pool.owners()


def test_aborted_after_its_load(rig):
    request = ask("a")
    rig.admit(request)
    rig.step()
    rig.finish(request)


def test_aborted_in_the_middle_of_its_prompt(rig):
    request = ask("a", range(3 * CHUNK))
    assert rig.admit(request) == 0
    rig.step({request: CHUNK + 1})
    rig.finish(request)
    assert rig.step().stores == []
    assert rig.serve(ask("b", range(3 * CHUNK))) == CHUNK


def test_ended_twice(rig):
    request = ask("a")
    rig.serve(request)
    rig.side.finished(request)


def test_ended_before_the_report_of_its_last_store(rig):
    """Aborted between a step's start and its results: what was copied is kept."""
    request = ask("a", range(CHUNK))
    rig.admit(request)
    results = rig.side.take_results

    def abort_first(report, received):
        rig.finish(request)
        results(report, received)

    rig.side.take_results = abort_first
    rig.step({request: CHUNK})
    rig.side.take_results = results
    assert rig.serve(ask("b", range(CHUNK))) == CHUNK - 1


@pytest.mark.parametrize("computed", [3, CHUNK, CHUNK + 3, 2 * CHUNK + 1])
def test_preempted_and_resumed_it_has_its_chunks_again(rig, computed):
    tokens = [*range(3 * CHUNK), 1]
    request = ask("a", tokens)
    assert rig.admit(request) == 0
    rig.step({request: computed})
    rig.preempt(request)
    rig.free.reverse()  # other blocks than before
    stored = computed // CHUNK * CHUNK
    assert rig.admit(request) == stored
    if stored:
        rig.step()
    rig.step({request: CHUNK - 1})
    rig.step({request: len(tokens) - request.num_computed_tokens})
    rig.verify(request)
    rig.finish(request)
    assert rig.serve(ask("b", tokens)) == 3 * CHUNK


def test_preempted_after_its_prompt_was_stored(rig):
    request = ask("a", range(2 * CHUNK))
    rig.admit(request)
    rig.step({request: 2 * CHUNK})
    request.all_token_ids.append(7)
    rig.preempt(request)
    assert rig.admit(request) == 2 * CHUNK
    rig.step()
    rig.step({request: 1})
    rig.verify(request)
    rig.finish(request)


def test_an_id_used_again_while_the_first_is_loading_does_not_get_its_chunks(rig):
    """vLLM 0.32 refuses an id while its load is under way; nothing says that others will."""
    first, second = ask("a"), ask("a", range(2 * CHUNK))
    assert rig.admit(first) == HIT
    rig.finish(first)
    rig.admit(second)
    rig.step()
    rig.verify(second)
    rig.finish(second)


def test_closed_with_requests_under_way():
    rig = Rig()
    rig.serve(ask("first"))
    loading, storing = ask("a"), ask("b", range(2 * CHUNK))
    rig.admit(loading)
    rig.admit(storing)
    rig.side.take_results = lambda *_: None  # the engine stops before it hears of them
    rig._loaded = lambda *_: None
    rig.step({storing: 2 * CHUNK})
    rig.side.close()
    assert rig.cache.pool.owners() == {}
