"""The engine as it is started by default: compiled, and as a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

from tests.gate.lab import Lab, Outcome, compare, kvkeep, not_less_cached
from tests.vllm import asking

OPTIONS = {"block_size": 32, "enforce_eager": False, "max_model_len": 1024}
_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def cases(lab: Lab) -> Iterator[Outcome]:
    first = {"tokens": lab.text(120, 385)}
    grown = {"tokens": lab.text(120, 480)}
    own = lab.plain([[first], [first], [grown]], **OPTIONS, enable_prefix_caching=True)
    settings = kvkeep(
        chunk_tokens=32, memory__size="0.2", disk__paths=lab.new_folder(), disk__size="1"
    )
    for time in ("first engine", "restart"):
        with lab.start(**OPTIONS, env=_ENV, kv_transfer_config=settings, name="compiled") as engine:
            for number, what in enumerate(("cold", "again", "a longer one")):
                if time == "restart" and number == 0:
                    continue
                found = engine.do(asking.ask, [first if number < 2 else grown])
                same = own[number][0]["cached"] == found[0]["cached"]
                yield Outcome(
                    f"compiled/{time}: {what}",
                    [
                        *compare(own[number], found, logprobs=same),
                        *not_less_cached(found, 384 if number else 0),
                    ],
                )


quick_cases = None
"""Compiling takes a minute: not in a short run."""
