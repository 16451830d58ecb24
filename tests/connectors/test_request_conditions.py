"""What a request's keys say of it, with vLLM's own `Request`: images, embeddings, salts, adapters.

The same conditions run on a real engine in tests/gate/features; here each is alone.
"""

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: these are its own objects")

import torch
from scheduler_rig import CHUNK, Rig
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

TEXT, IMAGE = 7, 9
"""Token ids of some text, and of an image's place."""
TOKENS = [TEXT] * CHUNK + [IMAGE] * CHUNK + [TEXT] * CHUNK


def image(name, start=CHUNK, length=CHUNK):
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=name,
        mm_position=PlaceholderRange(offset=start, length=length),
    )


def request(tokens=TOKENS, images=(), **more):
    return Request(
        request_id="",
        prompt_token_ids=list(tokens) if tokens is not None else None,
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        mm_features=list(images),
        **more,
    )


@pytest.fixture
def shared():
    """How many leading chunks of two requests have the same key, for one engine."""
    rigs = []

    def shared(one, other):
        rig = Rig()
        rigs.append(rig)
        return leading(keys(rig, one, "one"), keys(rig, other, "other"))

    yield shared
    for rig in rigs:
        rig.side.close()


def keys(rig, asked, name):
    """The digests of a request's chunks."""
    asked.request_id = name
    return list(rig.side._hash(rig.side._track(asked)))


def leading(one, other):
    same = [first == second for first, second in zip(one, other, strict=True)]
    assert same == sorted(same, reverse=True)
    return sum(same)


def test_the_same_image_shares_all(shared):
    assert shared(request(images=[image("cat")]), request(images=[image("cat")])) == 3


def test_other_images_share_the_text_before_them(shared):
    assert shared(request(images=[image("cat")]), request(images=[image("dog")])) == 1


def test_an_image_and_its_placeholders_alone_share_the_text_before(shared):
    assert shared(request(images=[image("cat")]), request()) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param([("cat", CHUNK, 4), ("dog", CHUNK + 4, 4)], None, id="order"),
        pytest.param([("cat", CHUNK, 4)], [("cat", CHUNK + 4, 4)], id="place"),
        pytest.param([("cat", CHUNK, 4)], [("cat", CHUNK, 8)], id="length"),
        pytest.param([("cat", CHUNK, 8)], [("cat", CHUNK, 4), ("cat", CHUNK + 4, 4)], id="count"),
        pytest.param([("cat", CHUNK, 8)], [("cat", CHUNK, 8), ("dog", CHUNK, 8)], id="both"),
    ],
)
def test_the_same_tokens_with_images_otherwise_placed_do_not_share(shared, one, other):
    if other is None:
        (first, *at), (second, *to) = one
        other = [(second, *at), (first, *to)]
    images, others = ([image(*where) for where in items] for items in (one, other))
    assert shared(request(images=images), request(images=others)) == 1


def test_an_image_that_begins_in_a_chunk_and_ends_in_a_later_one_is_in_both(shared):
    cat, dog = ([image(name, CHUNK - 1, CHUNK + 2)] for name in ("cat", "dog"))
    assert shared(request(images=cat), request(images=dog)) == 0


def test_an_image_after_the_last_whole_chunk_changes_nothing(shared):
    tokens = [TEXT] * CHUNK + [IMAGE] * 4
    one, other = (request(tokens, [image(name, CHUNK, 4)]) for name in ("cat", "dog"))
    assert shared(one, other) == 1


def test_an_image_that_comes_with_a_later_turn_is_in_the_keys_from_there_on():
    """vLLM's streaming input extends the request that it has."""

    def two_turns(name):
        rig = Rig()
        session = request(images=[image("first")])
        tracked = rig.side._track(session)
        before = list(rig.side._hash(tracked))
        place = replace(image(name).mm_position, offset=3 * CHUNK)
        session.mm_features.append(replace(image(name), mm_position=place))
        session.append_output_token_ids([IMAGE] * CHUNK)
        after = list(rig.side._hash(tracked))
        rig.side.close()
        assert after[:3] == before
        return after

    assert leading(two_turns("cat"), two_turns("cat")) == 4
    assert leading(two_turns("cat"), two_turns("dog")) == 3


def test_equal_keys_in_steps_and_at_once():
    """A request of which more becomes known, and one that has all from its start."""
    whole = request(TOKENS, [image("cat", CHUNK - 2, 6)])
    grown = request(TOKENS[: CHUNK + 5], [image("cat", CHUNK - 2, 6)])
    rig = Rig()
    tracked = rig.side._track(grown)
    rig.side._hash(tracked)
    grown.append_output_token_ids(TOKENS[CHUNK + 5 :])
    assert rig.side._hash(tracked) == keys(rig, whole, "whole")
    rig.side.close()


# -- embeddings ----------------------------------------------------------------------------------


def embeds(seed, rows=3 * CHUNK):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def embedded(rows, **more):
    return request(None, prompt_embeds=rows, **more)


def test_equal_embeddings_share_all_and_others_nothing(shared):
    assert shared(embedded(embeds(1)), embedded(embeds(1))) == 3
    assert shared(embedded(embeds(1)), embedded(embeds(2))) == 0


def test_embeddings_share_up_to_the_first_that_differs(shared):
    other = embeds(1)
    other[CHUNK + 3] += 1e-3
    assert shared(embedded(embeds(1)), embedded(other)) == 1


def test_embeddings_and_the_token_ids_that_stand_for_them_do_not_share(shared):
    """vLLM gives a prompt of embeddings token ids of 0."""
    zeros = [0] * (3 * CHUNK)
    assert list(embedded(embeds(1)).all_token_ids) == zeros
    assert shared(embedded(embeds(1)), request(zeros)) == 0
    assert shared(embedded(torch.zeros(3 * CHUNK, 4)), request(zeros)) == 0


def test_tokens_after_embeddings_are_tokens(shared):
    one, other = embedded(embeds(1)), embedded(embeds(1))
    one.append_output_token_ids([TEXT] * CHUNK)
    other.append_output_token_ids([TEXT] * (CHUNK - 1) + [TEXT + 1])
    assert shared(one, other) == 3


@pytest.mark.skipif(
    "prompt_is_token_ids" not in Request.__init__.__code__.co_varnames,
    reason="this vLLM has no prompts of tokens and embeddings together",
)
def test_a_row_of_embeddings_and_a_token_at_one_place_do_not_share(shared):
    """Equal in ids and rows: what is computed from at each place makes the difference."""
    zeros, rows = [0] * (2 * CHUNK), torch.zeros(2 * CHUNK, 4)
    masks = [True] * (2 * CHUNK), [True] * (CHUNK + 3) + [False] * (CHUNK - 3)
    one, other = (
        request(zeros, prompt_embeds=rows, prompt_is_token_ids=list(mask)) for mask in masks
    )
    assert list(one.all_token_ids) == list(other.all_token_ids)
    assert shared(one, other) == 1


# -- salts and adapters --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
        ({"lora_request": LoRARequest("a", 1, "/no/a")}, {}),
        (
            {"lora_request": LoRARequest("a", 1, "/no/a")},
            {"lora_request": LoRARequest("b", 2, "/no/a")},
        ),
        (
            {"lora_request": LoRARequest("a", 1, "/no/a")},
            {"lora_request": LoRARequest("a", 1, "/no/b")},
        ),
        ({"lora_request": LoRARequest("a", 1, "/no/a")}, {"cache_salt": "a"}),
    ],
)
def test_other_salts_and_adapters_share_nothing(shared, one, other):
    assert shared(request(**one), request(**other)) == 0
    assert shared(request(**one), request(**one)) == 3
