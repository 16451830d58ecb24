"""A disk that fails, lies, is slow or goes away under a running engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.gate.lab import Lab, Outcome, clean, compare, kvkeep, not_less_cached
from tests.vllm import asking

OPTIONS = {"block_size": 32}
_RATES = {
    "loads and stores fail": {"error": 1.0},
    "every second call fails": {"error": 0.5},
    "it does not find what it has": {"miss": 0.5},
    "what it gives has one byte wrong": {"corrupt": 1.0},
    "some of what it gives has one byte wrong": {"corrupt": 0.2},
}


def cases(lab: Lab) -> Iterator[Outcome]:
    kept = [{"tokens": lab.text(85 + number, 385)} for number in range(2)]
    other = {"tokens": lab.text(88, 300)}
    own = lab.plain([kept, [other]], **OPTIONS)
    folder = lab.new_folder()
    settings = kvkeep(
        chunk_tokens=32,
        memory__size="0.2",
        disk__paths=folder,
        disk__size="1",
        fetch_timeout_s=0.4,
        self_test=True,
    )
    with lab.start(**OPTIONS, kv_transfer_config=settings, name="tiers") as engine:
        engine.do(asking.ask, kept)
        for what, rates in _RATES.items():
            engine.do(asking.forget_memory)
            engine.do(asking.faulty_disk, **rates)
            found = engine.do(asking.ask, kept)
            fresh = engine.do(asking.ask, [other])
            yield Outcome(
                f"tiers/{what}",
                [
                    *compare(own[0], found, logprobs=False),
                    *compare(own[1], fresh, logprobs=False),
                    *clean(engine.do(asking.state)),
                ],
            )
            engine.do(asking.faulty_disk)
            yield from _recovers(lab, engine, what, own, kept)
        engine.do(asking.forget_memory)
        engine.do(asking.slow_disk, 1.0)
        found = engine.do(asking.ask, kept)
        yield Outcome(
            "tiers/slower than fetch_timeout_s", [*compare(own[0], found, logprobs=False)]
        )
        engine.do(asking.slow_disk, 0)
        yield from _recovers(lab, engine, "slow", own, kept)
        engine.do(asking.forget_memory)
        # As when a disk is unmounted: the folder itself is gone.
        aside = Path(f"{folder}-aside")
        shutil.move(folder, aside)
        found = engine.do(asking.ask, kept)
        yield Outcome(
            "tiers/the folder is gone",
            [*compare(own[0], found, logprobs=False), *clean(engine.do(asking.state))],
        )
        shutil.move(aside, folder)
        yield from _recovers(lab, engine, "the folder is gone", own, kept)


def _recovers(lab: Lab, engine, what, own, kept) -> Iterator[Outcome]:
    """Without a restart: stored again where need be, and hits from disk."""
    engine.do(asking.wait_for_breaker)
    # From memory at first, then one chunk to see whether the disk works, then all.
    for _ in range(3):
        found = engine.do(asking.ask, kept)
        engine.do(asking.forget_memory)
    yield Outcome(f"tiers/{what}: works again", [*compare(own[0], found, logprobs=False)])
    found = engine.do(asking.ask, kept)
    yield Outcome(
        f"tiers/{what}: hits from disk again",
        [*compare(own[0], found, logprobs=False), *not_less_cached(found, 384)],
    )
