"""The scheduler side, driven as vLLM drives it, by requests whose every token's KV is checked."""

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: the messages are subclasses of its own")

from scheduler_rig import BLOCK, CHUNK, FakeRequest, Rig

from kvkeep.testing.fake import FakeTier, eventually

PROMPT = range(100, 100 + 3 * CHUNK)


@pytest.fixture
def make():
    rigs = []

    def make(*tiers, **options):
        rigs.append(Rig(*tiers, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.check_nothing_left()


def ask(number, tokens=PROMPT, **conditions):
    return FakeRequest(f"request-{number}", tokens, **conditions)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_cold_prompt_is_stored_and_a_full_hit_leaves_one_token(make, num_ranks):
    rig = make(num_ranks=num_ranks)
    assert rig.serve(ask(1)) == 0
    assert rig.cache.num_chunks == 3
    assert rig.serve(ask(2)) == 3 * CHUNK - 1
    assert rig.serve(ask(3, [*PROMPT, 1, 2, 3])) == 3 * CHUNK
    assert rig.serve(ask(4, PROMPT[: 2 * CHUNK + 3])) == 2 * CHUNK
    assert rig.serve(ask(5, PROMPT[: CHUNK - 1])) == 0


def test_nothing_is_given_to_another_prefix_salt_or_adapter(make):
    rig = make()
    rig.serve(ask(1))
    lora = SimpleNamespace(lora_name="sql", lora_path="", lora_int_id=1)
    assert rig.serve(ask(2, [99, *PROMPT])) == 0
    assert rig.serve(ask(3, salt="pepper")) == 0
    assert rig.serve(ask(4, lora=lora)) == 0
    assert rig.serve(ask(5, lora=lora)) == 3 * CHUNK - 1


@pytest.mark.parametrize("local", range(0, 3 * CHUNK, BLOCK))
def test_no_block_that_the_engine_has_itself_is_written(make, local):
    """A chunk of two blocks, and a prefix of the engine that ends in the middle of one."""
    rig = make()
    rig.serve(ask(1))
    rig.pages[0].written.clear()
    request = ask(2, [*PROMPT, 1])
    assert rig.admit(request, local) == 3 * CHUNK - local
    own = set(request.block_ids[: local // BLOCK])
    rig.step()
    rig.verify(request)
    assert rig.pages[0].written == [block for block in request.block_ids if block not in own]
    rig.finish(request)


@pytest.mark.parametrize("granted", [1, BLOCK, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_the_engine_may_take_less_than_it_was_offered(make, granted):
    rig = make()
    rig.serve(ask(1))
    request = ask(2)
    assert rig.side.match(request, 0) == (3 * CHUNK - 1, True)
    assert rig.take(request, granted) == granted
    rig.step()
    assert request.num_computed_tokens == granted  # the load did not fail
    rig.step({request: request.num_tokens - granted})
    rig.verify(request)
    rig.finish(request)


def test_chunks_that_are_kept_between_those_that_are_not(make):
    rig = make()
    rig.serve(ask(1))
    middle = rig.cache.hierarchy  # the first and last go, the one between stays
    assert middle.links == ()
    digests = list(rig.cache._index)
    rig.cache._index.remove([digests[0], digests[-1]])
    assert rig.serve(ask(2)) == 0
    assert rig.serve(ask(3)) == 3 * CHUNK - 1


def test_where_the_engine_has_all_itself_nothing_is_loaded(make):
    rig = make()
    rig.serve(ask(1))
    assert rig.serve(ask(2), local=3 * CHUNK - BLOCK) == BLOCK - 1
    assert rig.serve(ask(3, [*PROMPT, 1]), local=3 * CHUNK) == 0


@pytest.mark.parametrize("per_step", [1, 3, 5, CHUNK, CHUNK + 1, 17])
def test_prefill_in_pieces_stores_each_chunk_once_it_is_whole(make, per_step):
    rig = make()
    assert rig.serve(ask(1, [*PROMPT, 1, 2]), per_step=per_step) == 0
    assert rig.cache.counters.stored_chunks == 3
    assert rig.serve(ask(2)) == 3 * CHUNK - 1


def test_a_prompt_longer_than_memory_keeps_its_beginning(make):
    """A chunk is worth nothing without those before it, also of an earlier step."""
    rig = make(num_slots=4)
    tokens = range(8 * CHUNK)
    rig.serve(ask(1, tokens), per_step=2 * CHUNK)
    assert rig.serve(ask(2, tokens)) == 4 * CHUNK


def test_requests_that_run_at_once_store_their_common_prefix_once(make):
    rig = make()
    one, other = ask(1), ask(2, [*PROMPT, *range(CHUNK)])
    assert (rig.admit(one), rig.admit(other)) == (0, 0)
    plan = rig.step({one: one.num_tokens, other: other.num_tokens})
    assert [sum(len(run.slots) for run in op.runs) for op in plan.stores] == [3, 1]
    for request in (one, other):
        rig.verify(request)
        rig.finish(request)
    assert rig.serve(ask(3, [*PROMPT, *range(CHUNK)])) == 4 * CHUNK - 1


def test_tokens_that_were_generated_are_kept_if_asked_for(make):
    for keep, hit in ((False, CHUNK), (True, 2 * CHUNK)):
        rig = make(save_decode_cache=keep)
        request = ask(1, PROMPT[: CHUNK + 2])
        rig.admit(request)
        rig.step({request: request.num_tokens})
        for token in range(CHUNK):
            request.all_token_ids.append(token)
            rig.step({request: 1})
        rig.finish(request)
        assert rig.serve(ask(2, [*request.all_token_ids, 1])) == hit


def test_a_hit_may_be_too_small_to_be_worth_it(make):
    rig = make(min_retrieve_tokens=2 * CHUNK)
    rig.serve(ask(1))
    assert rig.serve(ask(2, PROMPT[: 2 * CHUNK])) == 0
    assert rig.serve(ask(3, PROMPT[: 2 * CHUNK + 1])) == 2 * CHUNK


def test_roles(make):
    storing = make(loads=False)
    assert [storing.serve(ask(number)) for number in range(2)] == [0, 0]
    assert storing.cache.num_chunks == 3
    loading = make(stores=False)
    assert [loading.serve(ask(number)) for number in range(2)] == [0, 0]
    assert loading.cache.num_chunks == 0


def test_who_may_not_read_reads_nothing(make):
    rig = make()
    rig.serve(ask(1))
    request = ask(2)
    request.skip_reading_prefix_cache = True
    assert rig.serve(request) == 0


def test_a_hit_that_waits_for_blocks_is_asked_for_again_and_again(make):
    rig = make()
    rig.serve(ask(1))
    request = ask(2)
    for local in (0, 0, BLOCK, CHUNK, 0):
        assert rig.side.match(request, local) == (3 * CHUNK - 1 - local, True)
        assert rig.cache.pool.owners()["request-2"] == 3 - local // CHUNK
    assert rig.serve(request) == 3 * CHUNK - 1


def test_a_store_that_fails_is_forgotten_and_made_by_the_next(make):
    rig = make(num_ranks=2)
    rig.pages[1].error = OSError("copy")  # one rank is enough
    rig.serve(ask(1))
    assert rig.cache.num_chunks == 0
    rig.pages[1].error = None
    assert rig.serve(ask(2)) == 0
    assert rig.serve(ask(3)) == 3 * CHUNK - 1


def test_a_load_that_fails_ends_as_computing(make):
    rig = make(num_ranks=2)
    rig.serve(ask(1))
    request = ask(2)
    assert rig.admit(request) == 3 * CHUNK - 1
    rig.pages[1].error = OSError("copy")
    before = rig.cache.counters.memory.loaded_bytes
    rig.step()
    rig.pages[1].error = None
    rig.step({request: request.num_tokens})
    rig.verify(request)
    rig.finish(request)
    assert rig.cache.counters.memory.loaded_bytes == before


def test_reset_forgets_what_memory_holds(make):
    rig = make()
    rig.serve(ask(1))
    waiting = ask(2)
    assert rig.admit(waiting) == 3 * CHUNK - 1
    rig.side.reset()
    assert rig.serve(ask(3)) == 0
    rig.step()  # what was promised before is still kept
    rig.verify(waiting)
    rig.finish(waiting)


def test_a_slow_tier_lets_the_request_wait_and_then_hit(make):
    tier = FakeTier()
    rig = make(tier)
    rig.serve(ask(1))
    rig.settle()
    rig.cache.clear_memory()
    request = ask(2)
    with tier.held("load"):
        assert rig.admit(request) is None
        assert rig.step().pool is None  # an idle step meanwhile
        assert rig.admit(request) is None
        assert not request.block_ids
    eventually(lambda: rig.cache.num_chunks == 3)
    assert rig.serve(request) == 3 * CHUNK - 1
    assert rig.cache.tier_counters()["fake"].hit_tokens == 3 * CHUNK - 1


@pytest.mark.parametrize("looks", [1, 2])
def test_a_tier_that_is_too_slow_is_not_waited_for(make, looks):
    """Nor is it a second time, when the request has to ask again for want of blocks."""
    tier = FakeTier()
    rig = make(tier, fetch_timeout_s=0.02)
    rig.serve(ask(1))
    rig.settle()
    rig.cache.clear_memory()
    with tier.held("load"):
        request = ask(2)
        assert rig.admit(request) is None
        time.sleep(0.03)
        answers = [rig.side.match(request, 0) for _ in range(looks)]
        rig.step({request: request.num_tokens})
        rig.finish(request)
        assert answers == [(0, False)] * looks
    rig.settle()
    assert rig.serve(ask(3)) == 3 * CHUNK - 1  # what came late was kept


def test_images_that_come_later_are_in_the_keys_too(make):
    """vLLM's streaming input adds items to a request that was looked up before."""
    rig = make(save_decode_cache=True)
    for name in ("cat", "dog"):
        request = ask(name, range(CHUNK))
        request.mm_features = []
        assert rig.admit(request) in {0, CHUNK - 1}
        if rig.loading:
            rig.step()
        rig.step({request: CHUNK - request.num_computed_tokens})
        place = SimpleNamespace(offset=CHUNK, length=CHUNK)
        request.mm_features.append(SimpleNamespace(mm_position=place, identifier=name))
        request.all_token_ids += [7] * CHUNK
        rig.step({request: CHUNK})
        rig.finish(request)
    assert rig.cache.num_chunks == 1 + 2  # the common text, and an image each
