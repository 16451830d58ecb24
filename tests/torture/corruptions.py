"""Damage kept files under a running engine: each is a counted miss, and is kept anew."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.gate.lab import Lab, compare, kvkeep, not_less_cached
from tests.torture import kept
from tests.torture.damage import KINDS
from tests.vllm import asking

_OPTIONS: dict[str, Any] = {"block_size": 32}
_PROMPTS = 10
_PROMPT_TOKENS = 513
_A_ROUND = 60


@dataclass
class Corrupted:
    """What the corruptions came to."""

    done: Counter[str] = field(default_factory=Counter)
    """By kind."""
    counted: int = 0
    """Found and counted by the engine's kvkeep."""
    verified: int = 0
    """Of those that `kvkeep verify` was asked for, how many it named."""
    asked_of_verify: int = 0
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """How many files were damaged."""
        return self.done.total()


def corrupt_often(lab: Lab, count: int, rng: random.Random) -> Corrupted:
    """Damage `count` files in rounds; every round asks for all that was damaged."""
    found = Corrupted()
    folder = lab.new_folder()
    requests = [
        {"tokens": lab.text(number, _PROMPT_TOKENS), "sampling": {"max_tokens": 6}}
        for number in range(_PROMPTS)
    ]
    own = lab.plain([[request] for request in requests], **_OPTIONS)
    flag = kvkeep(chunk_tokens=32, memory__size="0.6", disk__paths=folder, disk__size="2")
    with lab.start(**_OPTIONS, kv_transfer_config=flag, name="corruptions") as engine:
        for request in requests:
            engine.do(asking.ask, [request])
        kinds = list(KINDS)
        while found.total < count:
            engine.do(asking.forget_memory)
            before = engine.do(asking.found_bad)
            bad = _damage_some(folder, min(_A_ROUND, count - found.total), kinds, found, rng)
            if found.total <= 2 * _A_ROUND:
                _check_verify(folder, bad, found)
            for number, request in enumerate(requests):
                answers = engine.do(asking.ask, [request])
                found.answers += 1
                found.wrong += compare(own[number], answers, logprobs=False)
            engine.do(asking.settle)
            counted = engine.do(asking.found_bad) - before
            found.counted += counted
            if counted != len(bad):
                found.damage.append(f"{len(bad)} files were damaged, {counted} were counted")
            # Every one of them is kept anew by now.
            again = kept.verify(folder)
            if again["bad"]:
                found.damage.append(f"still there: {again['bad'][:3]}")
            print(
                f"corrupted {found.total}: {found.counted} found, {len(found.wrong)} wrong",
                flush=True,
            )
        engine.do(asking.forget_memory)
        for number, request in enumerate(requests):
            answers = engine.do(asking.ask, [request])
            found.wrong += compare(own[number], answers, logprobs=False)
            found.damage += not_less_cached(answers, _PROMPT_TOKENS - 1)
    return found


def _damage_some(
    folder: str, count: int, kinds: list[str], found: Corrupted, rng: random.Random
) -> set[str]:
    files = kept.chunk_files(folder)
    chosen = rng.sample(files, min(count, len(files) // 2))
    whole = sorted(set(files) - set(chosen))
    for path in chosen:
        kind = kinds[found.total % len(kinds)]
        KINDS[kind](path, rng.choice(whole), rng)
        found.done[kind] += 1
    return {str(path) for path in chosen}


def _check_verify(folder: str, bad: set[str], found: Corrupted) -> None:
    """`kvkeep verify` names exactly what was damaged."""
    named = {one["path"] for one in kept.verify(folder)["bad"]}
    found.asked_of_verify += len(bad)
    found.verified += len(named & bad)
    if named != bad:
        found.damage.append(
            f"verify missed {sorted(bad - named)[:3]}, named {sorted(named - bad)[:3]}"
        )
