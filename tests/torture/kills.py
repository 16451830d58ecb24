"""Kill the engine at a random moment under load, see what it left, start it and ask again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from tests.gate.lab import Answer, Lab, Request, compare, kvkeep
from tests.torture import kept
from tests.vllm import asking
from tests.vllm.host import Engine, EngineDied, EngineError

_CAP_GIB = 0.12
"""Less than all questions need: files are evicted while others are written."""
_OPTIONS: dict[str, Any] = {"block_size": 32}
_LOAD_S = 4.0
_TOGETHER = 4


@dataclass
class Killed:
    """What the kills came to."""

    kills: int = 0
    terminations: int = 0
    """How many of them were SIGTERM."""
    while_writing: int = 0
    """How many left a half written file."""
    answers: int = 0
    hit_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    engine_stops: list[str] = field(default_factory=list)
    """Engines that ended, or hung, without being killed by us."""
    damage: list[str] = field(default_factory=list)
    """What was wrong in the folder after a kill."""


class Questions:
    """Batches of questions, some with a beginning in common, and their right answers."""

    def __init__(self, lab: Lab) -> None:
        beginnings = [lab.text(number, 160) for number in range(4)]
        requests = [
            {
                "tokens": beginnings[number % 4] + lab.text(10 + number, 100 + 7 * number),
                "sampling": {"max_tokens": 6},
            }
            for number in range(24)
        ]
        self.batches: list[list[Request]] = [
            requests[at : at + _TOGETHER] for at in range(0, len(requests), _TOGETHER)
        ]
        self.answers: list[list[Answer]] = lab.plain(self.batches, **_OPTIONS)


def kill_often(lab: Lab, count: int, rng: random.Random) -> Killed:
    """`count` lives of an engine on one folder."""
    found = Killed()
    questions = Questions(lab)
    folder = lab.new_folder()
    for number in range(count):
        try:
            _one_life(lab, folder, questions, found, rng)
        except (EngineDied, EngineError, TimeoutError) as error:
            found.engine_stops.append(f"life {number}: {error}")
        found.damage += [
            f"after life {number}: {line}" for line in kept.problems(folder, int(_CAP_GIB * 2**30))
        ]
        print(
            f"kill {number + 1}: {len(kept.chunk_files(folder))} files, {found.hit_tokens} tokens "
            f"hit so far, {len(found.wrong)} wrong, {found.while_writing} while writing",
            flush=True,
        )
    return found


def _settings(folder: str, rng: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "chunk_tokens": rng.choice([32, 32, 64]),
        "disk__paths": folder,
        "disk__size": str(_CAP_GIB),
        "disk__io_threads": rng.choice([1, 2, 4]),
        "save_decode_cache": rng.random() < 0.3,
    }
    if rng.random() < 0.3:
        return settings | {"memory__enabled": False, "memory__staging": "0.05"}
    return settings | {"memory__size": rng.choice(["0.03", "0.1", "0.3"])}


def _one_life(
    lab: Lab, folder: str, questions: Questions, found: Killed, rng: random.Random
) -> None:
    options = {**_OPTIONS, "enable_prefix_caching": rng.random() < 0.5}
    flag = kvkeep(**_settings(folder, rng))
    with lab.start(**options, kv_transfer_config=flag, name="life") as engine:
        # What earlier lives kept is asked for first.
        _ask(engine, questions, rng.randrange(len(questions.batches)), found)
        order = [rng.randrange(len(questions.batches)) for _ in range(20)]
        engine.send(asking.ask_rounds, [questions.batches[number] for number in order])
        _wait_for_the_moment(folder, rng)
        if not engine.is_alive:
            raise EngineDied(f"ended by itself:\n{engine.log[-4000:]}")
        found.kills += 1
        if rng.random() < 0.2:
            found.terminations += 1
            engine.terminate()
        else:
            engine.kill()
        found.while_writing += bool(kept.temporaries(folder))


def _ask(engine: Engine, questions: Questions, number: int, found: Killed) -> None:
    answers = engine.do(asking.ask, questions.batches[number])
    found.answers += len(answers)
    found.hit_tokens += sum(answer["cached"] or 0 for answer in answers)
    found.wrong += compare(questions.answers[number], answers, logprobs=False)


def _wait_for_the_moment(folder: str, rng: random.Random) -> None:
    """Any time from now on; one time in two a moment when a file is being written."""
    until = time.monotonic() + rng.uniform(0, _LOAD_S)
    if rng.random() < 0.5:
        time.sleep(max(0.0, until - time.monotonic()))
        return
    time.sleep(rng.uniform(0, 0.5))
    until = time.monotonic() + _LOAD_S
    while time.monotonic() < until and not kept.temporaries(folder):
        time.sleep(0.002)
