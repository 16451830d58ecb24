"""Speculative decoding and structured output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gate.lab import Lab, Outcome, clean, compare, kvkeep, not_less_cached
from tests.vllm import asking

OPTIONS: dict[str, Any] = {"block_size": 32}


def cases(lab: Lab) -> Iterator[Outcome]:
    yield from _speculation(lab)
    yield from _structured(lab)


def _speculation(lab: Lab) -> Iterator[Outcome]:
    """Drafts that are rejected must not be kept: the next turn starts from what was generated."""
    options = {
        **OPTIONS,
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 2,
        },
    }
    # A text that repeats itself, so that there is something to draft from.
    first = {"tokens": lab.text(100, 80) * 4, "sampling": {"max_tokens": 64}}
    own = lab.plain([[first]], **options)
    second = {"tokens": first["tokens"] + own[0][0]["tokens"] + lab.text(101, 20)}
    own += lab.plain([[second]], **options)
    for save_decode_cache in (False, True):
        settings = kvkeep(chunk_tokens=32, memory__size="0.2", save_decode_cache=save_decode_cache)
        title = f"decoding/n-gram, save_decode_cache {save_decode_cache}"
        with lab.start(**options, kv_transfer_config=settings, name="ngram") as engine:
            for time, at_least in (("first", 0), ("again", 319)):
                found = engine.do(asking.ask, [first])
                yield Outcome(
                    f"{title}: {time}",
                    [*compare(own[0], found, logprobs=False), *not_less_cached(found, at_least)],
                )
            found = engine.do(asking.ask, [second])
            at_least = 383 // 32 * 32 if save_decode_cache else 320
            yield Outcome(
                f"{title}: the next turn",
                [
                    *compare(own[1], found, logprobs=False),
                    *not_less_cached(found, at_least),
                    *clean(engine.do(asking.state)),
                ],
            )


def _structured(lab: Lab) -> Iterator[Outcome]:
    request = {
        "tokens": lab.text(102, 321),
        "sampling": {
            "structured_outputs": {"regex": "(red|green|blue){8}"},
            "ignore_eos": False,
            "max_tokens": 24,
        },
    }
    own = lab.plain([[request]], **OPTIONS)
    with lab.start(
        **OPTIONS, kv_transfer_config=kvkeep(chunk_tokens=32, memory__size="0.2"), name="structured"
    ) as engine:
        for time, at_least in (("first", 0), ("again", 320)):
            found = engine.do(asking.ask, [request])
            yield Outcome(
                f"decoding/structured output: {time}",
                [*compare(own[0], found, logprobs=False), *not_less_cached(found, at_least)],
            )


quick_cases = None
"""Left to the whole gate, for the time they take."""
