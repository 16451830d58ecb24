"""Keys against a second implementation, written from the byte layout and not from the code."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvkeep.keys import KeyChain, Namespace, Placed
from kvkeep.testing.strategies import LARGEST_TOKEN, namespaces, token_lists, tokens

SRC = Path(__file__).parents[1] / "src"
MARK = 0xFFFFFFFF
FIELDS = {"model": "golden", "dtype": "bfloat16"}
TOKENS = list(range(100, 110))  # two chunks of four, and two tokens over


def embeds(start, stop):
    return bytes(range(start, stop)) if start < 4 else None


# The digests as frozen constants: a change here makes every cache that was ever kept worthless.
GOLDEN_NAMESPACE = "0f07d50131d79f79e24a1b59d89f19178daf802c69ff295fe583429b291463f9"
GOLDEN = [
    (
        {},
        "64063ce013d38fc493de3d96bf9493d8537bc6e1b45b6476559b5ec213e6899a",
        "f150b54106fdfea981dfb244be99ffb02f7ea9ff67730ffdd8c030d1bfd3c681",
    ),
    (
        {"salt": "pepper"},
        "22d496dda64de543a5675e81f6527c0c0585b14a616dfa8621126235131d4522",
        "951bfdc7a53fc5f07e5ea057f05806ede0c1704490945153a9571b6ba390a6a3",
    ),
    (
        {"salt": ""},
        "a1d2bc99b09fad1af8199f1789853b6c9b217aa3df192af720f4062638f5d1c6",
        "439eb39c93ad8159fe9f432b8b83e9f276201dc1a268e015ae5aa14c7745b617",
    ),
    (
        {"lora": ("sql", "/adapters/sql")},
        "c5cc7f5a527cfe092bdfd909f3a41cd5ab22a7f344c611fff1819d6dcd2f1d70",
        "abc50efc9dc6459b91b32a30529fe49f64f48e873431e0ce47f5b0dc0bac9a31",
    ),
    (
        {"items": [Placed(2, 5, "img-b"), Placed(6, 7, "img-a")]},
        "3bb355d4f323f412440b8fb26ce8e8ced8cc031d0b4ba8798f76d28729e3a37b",
        "051a2f607f4997d46feb716e54d890b018d1cdfc2dc7b56c6d98718311040026",
    ),
    (
        {"embeds": embeds},
        "e1291f9fec8a0a6a8b80247f245a82e085fef5f79a6e61a5439be3e957704f15",
        "b3a2fd43e75e273f67c2a01d039234031975e570bee50449d2b937762dde22e5",
    ),
    (
        {"salt": "grüße", "lora": ("a",), "items": [Placed(3, 9, "x")], "embeds": embeds},
        "9a2819efbe6b48d846cb167f6c4703817dffa8c01511f481553eddda8402ea3c",
        "d870b5f0aeee287a7f8fbb278fb4ac010d049045cf5729b28604648842de548d",
    ),
]


def words(*numbers):
    return b"".join(number.to_bytes(4, "little") for number in numbers)


def strings(*parts):
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(words(len(part)) + part for part in encoded)


def extra(kind, content):
    return words(MARK, kind, len(content)) + content + b"\0" * ((4 - len(content) % 4) % 4)


def expected(namespace, chunk_tokens, token_ids, salt=None, lora=None, items=(), embeds=None):
    """The digests, each hashed from its first byte on."""
    body = b"kvkeep key 1\0\0\0\0" + namespace.digest
    if salt is not None:
        body += extra(1, strings(salt))
    if lora is not None:
        body += extra(2, strings(*lora))
    digests = []
    for start in range(0, len(token_ids) - chunk_tokens + 1, chunk_tokens):
        stop = start + chunk_tokens
        body += words(*token_ids[start:stop])
        for first, last, identifier in sorted(items):
            if first < stop and last > start:
                body += extra(3, strings(identifier, str(first), str(last)))
        embedded = embeds(start, stop) if embeds else None
        if embedded is not None:
            body += extra(4, hashlib.sha256(embedded).digest())
        digests.append(hashlib.sha256(body).digest())
    return digests


def chain(tokens=TOKENS, chunk_tokens=4, namespace=None, **conditions):
    namespace = namespace or Namespace.of("golden", FIELDS)
    return KeyChain(namespace, chunk_tokens, **conditions).extend(tokens)


def test_golden_namespace():
    namespace = Namespace.of("meta/Llama 3", FIELDS)
    assert namespace.digest.hex() == GOLDEN_NAMESPACE
    assert namespace.name == f"meta-Llama-3-{GOLDEN_NAMESPACE[:16]}"
    assert namespace.fields == (("dtype", "bfloat16"), ("format", "1"), ("model", "golden"))


@pytest.mark.parametrize(("conditions", "first", "second"), GOLDEN)
def test_golden_digests(conditions, first, second):
    assert [digest.hex() for digest in chain(**conditions)] == [first, second]


def test_golden_digests_of_the_largest_tokens():
    assert [digest.hex() for digest in chain([0, 1, 2**31, LARGEST_TOKEN], 2)] == [
        "507414ceaaa5b309bd9a8a608807a4ecdfcb0f88b801bb406e83b4b824a78ac7",
        "181a1dec0e23717cb8e09a81f11ce3f1a1f46479b57058fdbb134bf83aff828d",
    ]


placed = st.builds(
    lambda start, length, identifier: Placed(start, start + length, identifier),
    st.integers(0, 40),
    st.integers(1, 20),
    st.text(max_size=5),
)
CONDITIONS = st.fixed_dictionaries(
    {},
    optional={
        "salt": st.text(max_size=9),
        "lora": st.lists(st.text(max_size=5), max_size=3).map(tuple),
        "items": st.lists(placed, max_size=3),
        "embeds": st.just(embeds),
    },
)


@given(namespaces, st.integers(1, 9), token_lists(), CONDITIONS)
def test_equals_the_layout_as_documented(namespace, chunk_tokens, token_ids, conditions):
    assert chain(token_ids, chunk_tokens, namespace, **conditions) == expected(
        namespace, chunk_tokens, token_ids, **conditions
    )


@given(token_lists(), CONDITIONS, st.integers(1, 9), st.lists(st.integers(0, 64), max_size=5))
def test_extending_in_steps_equals_at_once(token_ids, conditions, chunk_tokens, steps):
    grown = KeyChain(Namespace.of("golden", FIELDS), chunk_tokens, **conditions)
    at_once = chain(token_ids, chunk_tokens, **conditions)
    for step in [*sorted(steps), len(token_ids)]:
        digests = grown.extend(token_ids[:step])
        assert digests == at_once[: len(digests)]  # digests of a prefix are a prefix of them
        assert grown.num_tokens == len(digests) * chunk_tokens
        assert len(digests) == min(step, len(token_ids)) // chunk_tokens
    assert grown.digests == at_once


@given(token_lists(min_size=8), st.data())
def test_a_token_changes_its_chunk_and_all_after_and_none_before(token_ids, data):
    at = data.draw(st.integers(0, len(token_ids) - 1))
    other = list(token_ids)
    other[at] = data.draw(tokens.filter(lambda token: token != token_ids[at]))
    before, after = chain(token_ids), chain(other)
    assert before[: at // 4] == after[: at // 4]
    assert not set(before[at // 4 :]) & set(after[at // 4 :])


BASE = {
    "salt": "s",
    "lora": ("name", "path"),
    "items": [Placed(5, 7, "image")],
    "embeds": lambda start, stop: b"zeros" if start == 4 else None,
}


@pytest.mark.parametrize(
    ("change", "first_changed"),
    [
        ({"salt": "t"}, 0),
        ({"salt": ""}, 0),
        ({"salt": None}, 0),
        ({"lora": None}, 0),
        ({"lora": ("name", "htap")}, 0),
        ({"lora": ("namep", "ath")}, 0),
        ({"lora": ("path", "name")}, 0),
        ({"namespace": Namespace.of("golden", {**FIELDS, "dtype": "float16"})}, 0),
        ({"namespace": Namespace.of("golden", {**FIELDS, "tp": "2"})}, 0),
        ({"items": [Placed(5, 7, "imagf")]}, 1),
        ({"items": [Placed(4, 7, "image")]}, 1),
        ({"items": [Placed(5, 8, "image")]}, 1),
        ({"items": [Placed(5, 7, "image"), Placed(9, 10, "image")]}, 2),
        ({"items": [Placed(3, 7, "image")]}, 0),
        ({"items": []}, 1),
        ({"embeds": lambda start, stop: b"ones" if start == 4 else None}, 1),
        ({"embeds": lambda start, stop: b"zeros" if start == 8 else None}, 1),
        ({"embeds": None}, 1),
    ],
)
def test_a_condition_changes_every_digest_from_where_it_counts(change, first_changed):
    token_ids = list(range(16))
    before, after = chain(token_ids, **BASE), chain(token_ids, **{**BASE, **change})
    assert before[:first_changed] == after[:first_changed]
    assert not set(before[first_changed:]) & set(after[first_changed:])


@given(CONDITIONS, CONDITIONS, token_lists(min_size=4), token_lists(min_size=4))
def test_different_requests_have_different_digests(one, other, one_tokens, other_tokens):
    assume((one, one_tokens) != (other, other_tokens))
    assume(one_tokens[:4] != other_tokens[:4] or one.get("salt") != other.get("salt"))
    assert chain(one_tokens, **one)[0] != chain(other_tokens, **other)[0]


def test_tokens_that_spell_an_extra_are_not_one():
    spelled = extra(1, strings("pepper"))[4:]
    token_ids = [int.from_bytes(spelled[at : at + 4], "little") for at in range(0, len(spelled), 4)]
    assert chain([*token_ids, *TOKENS])[-1] != chain(salt="pepper")[-1]
    with pytest.raises(ValueError, match="reserved"):
        chain([MARK, *token_ids, *TOKENS])


@pytest.mark.parametrize("token", [-1, 2**32 - 1, 2**32, 1.0, "7", None])
def test_what_is_no_token_is_refused(token):
    with pytest.raises(ValueError, match="token id"):
        chain([1, 2, token, 4])


def test_bytes_of_the_mark_across_two_tokens_are_no_mark():
    assert len(chain([0xFFFFFF00, 0x000000FF, 0xFFFF0000, 0x0000FFFF])) == 1


@given(st.dictionaries(st.text(max_size=9), st.text(max_size=9)), st.randoms(use_true_random=False))
def test_a_namespace_does_not_depend_on_the_order_of_its_fields(fields, random):
    pairs = list(fields.items())
    random.shuffle(pairs)
    assert Namespace.of("m", dict(pairs)) == Namespace.of("m", fields)


@given(namespaces)
def test_a_namespace_has_a_name_that_is_safe_for_a_file(namespace):
    slug, _, digits = namespace.name.rpartition("-")
    assert digits == namespace.digest[:8].hex()
    assert slug
    assert not slug.startswith((".", "-"))
    assert len(namespace.name) <= 65
    assert all(c.isascii() and (c.isalnum() or c in "._-") for c in slug)


PROGRAM = """
import json
from kvkeep.keys import KeyChain, Namespace, Placed
embeds = lambda start, stop: bytes(range(start, stop)) if start < 4 else None
chain = KeyChain(
    Namespace.of("golden", {"model": "golden", "dtype": "bfloat16"}), 4,
    salt="gr\\u00fc\\u00dfe", lora=("a",), items=[Placed(3, 9, "x")], embeds=embeds,
)
print(json.dumps([digest.hex() for digest in chain.extend(list(range(100, 110)))]))
"""


def digests_in(python, **environment):
    """What `PROGRAM` says, with nothing but the standard library and our source."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), **environment}
    ended = subprocess.run(
        [python, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(ended.stdout)


@pytest.mark.parametrize("seed", ["0", "1", "4294967295"])
def test_no_seed_of_the_process_plays_a_part(seed):
    assert digests_in(sys.executable, PYTHONHASHSEED=seed) == list(GOLDEN[-1][1:])


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_interpreter_makes_the_same(version):
    roots = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = sorted(roots.glob(f"{version}.*/bin/python")) or [shutil.which(f"python{version}")]
    if found[0] is None:
        pytest.skip(f"no Python {version} on this machine")
    assert digests_in(str(found[0])) == list(GOLDEN[-1][1:])
