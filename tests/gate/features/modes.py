"""How the engine schedules and computes: async, in small steps, by priority, in other dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gate.lab import Lab, Outcome, clean, compare, kvkeep, not_less_cached
from tests.vllm import asking

CHUNK = 64
_MODES: dict[str, dict[str, Any]] = {
    "async scheduling": {"async_scheduling": True},
    "sync scheduling": {"async_scheduling": False},
    "steps of 48 tokens": {"max_num_batched_tokens": 48, "max_num_seqs": 4},
    "one request at a time": {"max_num_seqs": 1},
    "by priority": {"scheduling_policy": "priority"},
    "blocks of 64": {"block_size": 64},
    "blocks of 128": {"block_size": 128},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
}


def cases(lab: Lab) -> Iterator[Outcome]:
    for mode, changes in _MODES.items():
        options = {"block_size": 32, **changes}
        chunk = max(CHUNK, options["block_size"])
        length = 384
        first = {"tokens": lab.text(90, length + 1)}
        grown = {"tokens": lab.text(90, length + 90)}
        together = [
            {"tokens": lab.text(91, 256) + lab.text(92 + number, 30 + number), "priority": number}
            for number in range(4)
        ]
        if "scheduling_policy" not in options:
            for request in together:
                del request["priority"]
        rounds = [[first], [first], [grown], together]
        own = lab.plain(rounds, **options, enable_prefix_caching=True)
        # Rounding differs between a whole prompt and one from a prefix on: in these dtypes enough
        # to change a token now and then, with the engine's own prefix cache just as well.
        exact = "dtype" not in options and "kv_cache_dtype" not in options
        settings = kvkeep(chunk_tokens=chunk, memory__size="0.2")
        with lab.start(**options, kv_transfer_config=settings, name="modes") as engine:
            found = [engine.do(asking.ask, batch) for batch in rounds]
            yield Outcome(f"modes/{mode}: first", [*compare(own[0], found[0], logprobs=True)])
            for number, what in ((1, "again"), (2, "a longer one")):
                yield Outcome(
                    f"modes/{mode}: {what}",
                    [
                        *compare(own[number], found[number], logprobs=True),
                        *not_less_cached(found[number], length),
                    ],
                )
            again = engine.do(asking.ask, together)
            problems = [*not_less_cached(again, 256)]
            if exact:
                problems += compare(own[3], found[3], logprobs=False)
                problems += compare(own[3], again, logprobs=False)
            yield Outcome(
                f"modes/{mode}: four together",
                [*problems, *clean(engine.do(asking.state))],
            )


quick_cases = None
"""Left to the whole gate, for the time they take."""
