"""What was generated becomes the next prompt's prefix; several answers to one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gate.lab import Lab, Outcome, clean, compare, kvkeep, not_less_cached
from tests.vllm import asking

CHUNK = 32
_TURN = {"sampling": {"max_tokens": 48}}


def cases(lab: Lab) -> Iterator[Outcome]:
    yield from _turns(lab)
    yield from _choices(lab)


def _turns(lab: Lab) -> Iterator[Outcome]:
    options = {"block_size": 32}
    first = {"tokens": lab.text(50, 150), **_TURN}
    own = lab.plain([[first]], **options)
    second = {
        "tokens": first["tokens"] + own[0][0]["tokens"] + lab.text(51, 30),
        **_TURN,
    }
    own += lab.plain([[second]], **options)
    third = {"tokens": second["tokens"] + own[1][0]["tokens"] + lab.text(52, 30), **_TURN}
    own += lab.plain([[third]], **options)
    turns = [first, second, third]
    for save_decode_cache in (False, True):
        for asynchronous in (False, True):
            settings = kvkeep(
                chunk_tokens=CHUNK, memory__size="0.2", save_decode_cache=save_decode_cache
            )
            title = f"conversations/save_decode_cache {save_decode_cache} async {asynchronous}"
            with lab.start(
                **options,
                async_scheduling=asynchronous,
                kv_transfer_config=settings,
                name="conversation",
            ) as engine:
                length = 0
                for number, turn in enumerate(turns):
                    found = engine.do(asking.ask, [turn])
                    yield Outcome(
                        f"{title}: turn {number + 1}",
                        [
                            *compare(own[number], found, logprobs=False),
                            *not_less_cached(found, length // CHUNK * CHUNK),
                        ],
                    )
                    length = len(turn["tokens"])
                    if save_decode_cache:
                        # The last token was generated but never computed.
                        length += len(found[0]["tokens"]) - 1
                yield Outcome(f"{title}: nothing left", [*clean(engine.do(asking.state))])


def _choices(lab: Lab) -> Iterator[Outcome]:
    """n > 1: the requests share a prompt, and start at the same moment."""
    options = {"block_size": 32}
    request: dict[str, Any] = {
        "tokens": lab.text(53, 385),
        "sampling": {"n": 3, "temperature": 1, "top_k": 1},
    }
    # Equal seeds, other random answers: what is drawn depends on the logits alone.
    drawn = {"tokens": request["tokens"], "sampling": {"n": 3, "temperature": 0.8, "seed": 11}}
    own = lab.plain([[request], [drawn]], **options)
    with lab.start(
        **options, kv_transfer_config=kvkeep(chunk_tokens=CHUNK, memory__size="0.2"), name="n"
    ) as engine:
        for time, at_least in (("first", 0), ("again", 384)):
            found = engine.do(asking.ask, [request])
            yield Outcome(
                f"conversations/n=3 {time}",
                [*compare(own[0], found, logprobs=False), *not_less_cached(found, at_least)],
            )
        found = engine.do(asking.ask, [drawn])
        yield Outcome(
            "conversations/n=3 drawn with a seed",
            [*compare(own[1], found, logprobs=False), *clean(engine.do(asking.state))],
        )


quick_cases = None
"""Left to the whole gate, for the time they take."""
