"""Torture: kills at random moments, and every kind of damage to what is kept.

    python -m tests.torture [--kills N] [--corruptions N] [--seed S] [--model DIR] [--results FILE]

Ends with `torture: kills=N corrupted=N wrong_tokens=0 engine_stops=0`, and with 1 where anything
is wrong. The seed is printed: the same one chooses the same again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.gate.__main__ import MODEL, text_tokens
from tests.gate.lab import Lab
from tests.torture.corruptions import Corrupted, corrupt_often
from tests.torture.kills import Killed, kill_often
from tests.vllm.host import EngineHost


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--corruptions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--results", type=Path, metavar="FILE", help="write a JSON record")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.randrange(2**31)
    print(f"seed {seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="kvkeep-torture-"))
    started = time.monotonic()
    with EngineHost(folder / "logs") as host:
        lab = Lab(host, str(args.model), folder, text_tokens(args.model))
        rng = random.Random(seed)
        corrupted = corrupt_often(lab, args.corruptions, rng) if args.corruptions else Corrupted()
        lab.remove_folders()
        killed = kill_often(lab, args.kills, rng) if args.kills else Killed()
    wrong = killed.wrong + corrupted.wrong
    other = killed.damage + corrupted.damage
    if args.kills > 5 and not (killed.hit_tokens and killed.while_writing):
        other.append("nothing was hit after a restart, or no kill fell into a write")
    for kind, count in sorted(corrupted.done.items()):
        print(f"{kind:24} {count:5} damaged")
    print(f"found and counted: {corrupted.counted} of {corrupted.total}")
    print(f"named by kvkeep verify: {corrupted.verified} of {corrupted.asked_of_verify}")
    print(
        f"kills: {killed.kills} ({killed.terminations} SIGTERM), of which {killed.while_writing} "
        f"left a half written file; after restarts {killed.answers} answers, {killed.hit_tokens} "
        "tokens of them from disk"
    )
    for line in [*wrong, *killed.engine_stops, *other]:
        print(f"WRONG: {line[:3000]}")
    is_good = not (wrong or killed.engine_stops or other)
    if args.results:
        _write(args.results, seed, killed, corrupted, time.monotonic() - started)
    if is_good:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"engine logs: {folder}/logs")
    print(
        f"torture: kills={killed.kills} corrupted={corrupted.total} wrong_tokens={len(wrong)} "
        f"engine_stops={len(killed.engine_stops)}"
    )
    return 0 if is_good else 1


def _write(path: Path, seed: int, killed: Killed, corrupted: Corrupted, seconds: float) -> None:
    import torch
    import vllm

    record = {
        "what": "kills at random moments and damaged files, under a real engine",
        "command": "python -m tests.torture " + " ".join(sys.argv[1:]),
        "machine": {"architecture": platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            "vllm": vllm.__version__,
            "torch": torch.__version__,
        },
        "seed": seed,
        "seconds": round(seconds),
        "kills": killed.kills,
        "sigterm": killed.terminations,
        "kills_while_writing": killed.while_writing,
        "answers_after_restart": killed.answers,
        "hit_tokens_after_restart": killed.hit_tokens,
        "corrupted": dict(sorted(corrupted.done.items())),
        "corrupted_counted": corrupted.counted,
        "corrupted_answers": corrupted.answers,
        "wrong_tokens": len(killed.wrong) + len(corrupted.wrong),
        "engine_stops": len(killed.engine_stops),
        "other": killed.damage + corrupted.damage,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
