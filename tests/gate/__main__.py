"""The gate: greedy output with the cache is token-exact to output without it.

    python -m tests.gate [--only PATTERN] [--list] [--quick] [--model DIR] [--results FILE]

Prints a line for each case, and at the end `gate: cases=N differences=D`. Ends with 1 where
anything differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gate import features, matrix
from tests.gate.lab import Cases, Lab, Outcome
from tests.vllm.host import EngineHost

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".demo" / "SmolLM2-135M-Instruct"
RESULTS = ROOT / "benchmarks" / "results" / "gate.json"


def groups(*, quick: bool = False) -> dict[str, Cases]:
    """Name -> cases: the matrix, and every module of `features`."""
    found: dict[str, Cases] = {"matrix": matrix.quick_cases if quick else matrix.cases}
    for path in sorted(Path(features.__file__).parent.glob("*.py")):
        if path.stem == "__init__":
            continue
        module = importlib.import_module(f"{features.__name__}.{path.stem}")
        cases = getattr(module, "quick_cases", module.cases) if quick else module.cases
        if cases is not None:
            found[path.stem] = cases
    return found


def outcomes(group: Cases, lab: Lab) -> Iterator[Outcome]:
    """The group's outcomes; that it broke off is one more, and a difference."""
    try:
        yield from group(lab)
    except Exception:
        yield Outcome("broke off", [traceback.format_exc()])


def text_tokens(model: Path) -> list[int]:
    """Token ids of a long real text: Python's language reference."""
    import pydoc_data.topics

    from tokenizers import Tokenizer

    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return Tokenizer.from_file(str(model / "tokenizer.json")).encode(text[:250_000]).ids


def run(args: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="kvkeep-gate-"))
    wanted = {
        name: group
        for name, group in groups(quick=args.quick).items()
        if re.search(args.only or "", name)
    }
    if args.list:
        print("\n".join(wanted))
        return 0
    results: dict[str, dict[str, Any]] = {}
    with EngineHost(folder / "logs") as host:
        lab = Lab(host, str(args.model), folder, text_tokens(args.model))
        for name, group in wanted.items():
            started, found = time.monotonic(), []
            for outcome in outcomes(group, lab):
                found.append(outcome)
                show(name, outcome)
            results[name] = {
                "cases": len(found),
                "differences": sum(bool(outcome.differences) for outcome in found),
                "seconds": round(time.monotonic() - started),
            }
            lab.remove_folders()
    total = sum(result["cases"] for result in results.values())
    differences = sum(result["differences"] for result in results.values())
    if differences:
        print(f"engine logs: {folder}/logs")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if args.results:
        write_results(args.results, results)
    for name, result in results.items():
        print(f"{name:24} {result['cases']:4} cases {result['seconds']:5} s")
    print(f"gate: cases={total} differences={differences}")
    return 1 if differences or not total else 0


def show(group: str, outcome: Outcome) -> None:
    name = outcome.name if outcome.name.startswith(f"{group}/") else f"{group}/{outcome.name}"
    print(f"{'DIFFERS' if outcome.differences else 'ok':8}{name}", flush=True)
    for line in outcome.differences:
        print(f"        {line[:4000]}", flush=True)


def write_results(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Add this run's groups to the record, which may have been begun by another run."""
    import torch
    import vllm

    versions = {
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
    }
    before = json.loads(path.read_text()) if path.exists() else {}
    groups = before["groups"] if before.get("versions") == versions else {}
    groups |= {name: {**result, "command": _command()} for name, result in results.items()}
    record = {
        "what": "greedy output with the cache against output without it, on a real engine",
        "machine": {"architecture": platform.machine(), "cores": os.cpu_count()},
        "versions": versions,
        "cases": sum(result["cases"] for result in groups.values()),
        "differences": sum(result["differences"] for result in groups.values()),
        "groups": groups,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")


def _command() -> str:
    return " ".join(["python -m tests.gate", *sys.argv[1:]])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gate", description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", help="groups whose name matches")
    parser.add_argument("--list", action="store_true", help="name the groups and end")
    parser.add_argument("--quick", action="store_true", help="the part that fits CI")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--results", type=Path, metavar="FILE", help="write a JSON record")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
