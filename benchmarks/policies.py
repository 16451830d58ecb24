"""Which order of eviction keeps most of what real chats and agents ask for again?

    python benchmarks/policies.py [--shared ../shared]

Replays three real traces through every policy at several cache sizes. A request hits up to its
first missing block (the longest-prefix rule); hit rates are hits over all blocks of all prompts.

The replay does what the owner of a policy does, in this order: find the longest prefix; touch its
blocks, deepest first; make room for the blocks that are missing, with `victims(keep=)` the blocks
of this request; insert, deepest first, as many of the leading missing blocks as there is room for.
The second table shows what the order of the caller's calls is worth.

Belady's row is the best that any policy can do under the longest-prefix rule, not an
approximation. Evicting the block whose next use is furthest away, with leave not to insert,
maximises block hits (Belady 1966, Mattson et al. 1970), so it bounds prefix hits. And it reaches
that bound: whoever asks for a block asks for all blocks before it, so no block's next use comes
before that of a block it hangs from; with ties broken deepest first, what is kept and still
needed is always whole from the front, and each block hit is a prefix hit. The replay asserts it.

The last line is `policies: best=NAME mean_of_belady=X`, the mean over traces and sizes of a
policy's hit rate over Belady's. Writes `benchmarks/results/policies.json`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import lzma
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import kvkeep
from kvkeep.policies import DEFAULT_POLICY, POLICY_NAMES, Policy, make_policy

RESULTS = Path(__file__).parent / "results" / "policies.json"
COMMAND = "python benchmarks/policies.py"
SIZES_PERCENT = (1, 2, 5, 10, 20, 40)  # of the distinct blocks of a trace
NEVER = sys.maxsize

# How the caller inserts and when it touches; the first one is the table's.
ORDERS = {
    "touch hits, then insert deepest first": (True, False),
    "touch hits, then insert front first": (False, False),
    "insert deepest first, then touch hits": (True, True),
}

Chains = list[list[int]]


@dataclass(frozen=True)
class Trace:
    """Prompts as chained block ids: equal ids mean equal blocks after equal prefixes."""

    name: str
    block_tokens: int
    chains: Chains
    published: Chains  # what the golden value was computed from
    golden: float  # hit rate of an unlimited cache, from the README beside the traces

    @property
    def total(self) -> int:
        return sum(map(len, self.chains))

    @property
    def distinct(self) -> int:
        return len({block for chain in self.chains for block in chain})


def read_traces(folder: Path) -> list[Trace]:
    def read(name: str) -> list[dict]:
        with lzma.open(folder / f"{name}.jsonl.xz", "rt") as lines:
            return [json.loads(line) for line in lines]

    rows = read("mooncake_fast25_conversation")
    # A partial last block cannot be kept, so it is dropped; the golden value counts it.
    published = [row["hash_ids"] for row in rows]
    full = [row["hash_ids"][: row["input_length"] // 512] for row in rows]
    traces = [Trace("conversation", 512, full, published, 0.3664)]
    for name, golden in (("magagent", 0.844), ("taubench", 0.857)):
        chains = [row["hash_ids"] for row in read(f"{name}_qwen3tok_blk16")]
        traces.append(Trace(name, 16, chains, chains, golden))
    for trace in traces:
        assert all(len(set(chain)) == len(chain) for chain in trace.chains), trace.name
    return traces


def prefix_blocks(chain: list[int], cache: Policy[int] | set[int] | dict) -> int:
    for number, block in enumerate(chain):
        if block not in cache:
            return number
    return len(chain)


def unlimited_hits(chains: Chains) -> int:
    hits, seen = 0, set[int]()
    for chain in chains:
        hits += prefix_blocks(chain, seen)
        seen.update(chain)
    return hits


def policy_hits(
    chains: Chains, policy: Policy[int], capacity: int, deepest_first: bool, touch_last: bool
) -> int:
    total = 0

    def touch(blocks: list[int]) -> None:
        for block in reversed(blocks):
            policy.touch(block)

    for chain in chains:
        hits = prefix_blocks(chain, policy)
        total += hits
        if not touch_last:
            touch(chain[:hits])
        missing = [block for block in chain[hits:] if block not in policy]
        wanted = len(missing) - (capacity - len(policy))
        if wanted > 0:
            victims = list(islice(policy.victims(keep=set(chain)), wanted))
            for block in victims:
                policy.remove(block)
            missing = missing[: capacity - len(policy)]
        for block in reversed(missing) if deepest_first else missing:
            policy.insert(block)
        if touch_last:
            touch(chain[:hits])
        assert len(policy) <= capacity
    return total


def belady_hits(chains: Chains, capacity: int) -> int:
    following: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for number in range(len(chains) - 1, -1, -1):
        next_uses.append([following.get(block, NEVER) for block in chains[number]])
        following.update(dict.fromkeys(chains[number], number))
    next_uses.reverse()

    total = 0
    cache: dict[int, tuple[int, int]] = {}  # block to (next use, depth)
    furthest: list[tuple[int, int, int]] = []  # heap of (-next use, -depth, block), some stale
    for chain, uses in zip(chains, next_uses, strict=True):
        hits = prefix_blocks(chain, cache)
        assert hits == sum(block in cache for block in chain)
        total += hits
        for depth, (block, use) in enumerate(zip(chain, uses, strict=True)):
            if use == NEVER:
                cache.pop(block, None)
            else:
                cache[block] = (use, depth)
                heapq.heappush(furthest, (-use, -depth, block))
        while len(cache) > capacity:
            use, depth, block = heapq.heappop(furthest)
            if cache.get(block) == (-use, -depth):
                del cache[block]
    return total


def call_ns(name: str, held: int = 65_536, run: int = 64, repeats: int = 15) -> dict[str, float]:
    """CPU nanoseconds of one call, its share of the loop included, with 32-byte keys.

    Touches come as an owner makes them: chains of `run` keys, each deepest first, in random order.
    """
    chance = random.Random(0)
    keys = [chance.randbytes(32) for _ in range(2 * held)]
    starts = chance.sample(range(0, held, run), held // run)
    used = [key for start in starts for key in reversed(keys[start : start + run])]

    def timed(work: Callable[[Policy[bytes], Iterable[bytes]], None], with_: list[bytes]) -> list:
        spans = []
        for _ in range(repeats):
            policy: Policy[bytes] = make_policy(name, held)
            for key in keys[:held]:
                policy.insert(key)
            start = time.thread_time_ns()  # the load of the machine counts less than by the clock
            work(policy, with_)
            spans.append((time.thread_time_ns() - start) / len(with_))
        return spans

    def touch_all(policy: Policy[bytes], with_: Iterable[bytes]) -> None:
        touch = policy.touch
        for key in with_:
            touch(key)

    def replace_all(policy: Policy[bytes], with_: Iterable[bytes]) -> None:
        for key in with_:
            policy.remove(next(policy.victims()))
            policy.insert(key)

    touches, replaces = timed(touch_all, used), timed(replace_all, keys[held:])
    return {
        "touch_ns_median": round(statistics.median(touches), 1),
        "touch_ns_min": round(min(touches), 1),
        "insert_evict_ns_median": round(statistics.median(replaces), 1),
        "insert_evict_ns_min": round(min(replaces), 1),
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "")


def check_golden(trace: Trace) -> None:
    rate = unlimited_hits(trace.published) / sum(map(len, trace.published))
    if abs(rate - trace.golden) > 0.0005:
        sys.exit(f"{trace.name}: unlimited cache hits {rate:.4f}, not the golden {trace.golden}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    beside = Path(__file__).resolve().parents[2] / "shared"
    parser.add_argument("--shared", type=Path, default=beside, help="default: ../shared")
    folder = parser.parse_args().shared / "data" / "traces"
    if not folder.is_dir():
        sys.exit(f"no traces at {folder}: this benchmark needs the shared data, see --shared")

    table: list[dict] = []
    shares = {order: {name: [] for name in POLICY_NAMES} for order in ORDERS}
    print(f"{'trace':<13}{'size':>5}{'blocks':>8}{'belady':>8}", end="")
    print("".join(f"{name:>8}" for name in POLICY_NAMES))
    for trace in read_traces(folder):
        check_golden(trace)
        total, distinct = trace.total, trace.distinct
        unlimited = unlimited_hits(trace.chains)
        print(f"{trace.name:<13}{'all':>5}{distinct:>8}{unlimited / total:>8.4f}")
        row = {"trace": trace.name, "block_tokens": trace.block_tokens, "blocks": total}
        table.append(row | {"capacity": distinct, "unlimited": round(unlimited / total, 4)})
        for percent in SIZES_PERCENT:
            capacity = max(1, distinct * percent // 100)
            best = belady_hits(trace.chains, capacity)
            rates = {"belady": round(best / total, 4)}
            for order, (deepest_first, touch_last) in ORDERS.items():
                for name in POLICY_NAMES:
                    policy: Policy[int] = make_policy(name, capacity)
                    hits = policy_hits(trace.chains, policy, capacity, deepest_first, touch_last)
                    assert hits <= best <= unlimited
                    shares[order][name].append(hits / best)
                    rates.setdefault(name, round(hits / total, 4))  # the first order's
            print(f"{trace.name:<13}{percent:>4}%{capacity:>8}", end="")
            print("".join(f"{rate:>8.4f}" for rate in rates.values()), flush=True)
            table.append(row | {"size_percent": percent, "capacity": capacity, **rates})

    means = {
        order: {name: round(statistics.mean(values), 4) for name, values in of_order.items()}
        for order, of_order in shares.items()
    }
    print(f"\n{'mean of Belady, by order of calls':<39}", end="")
    print("".join(f"{name:>8}" for name in POLICY_NAMES))
    for order, by_name in means.items():
        print(f"{order:<39}" + "".join(f"{mean:>8.4f}" for mean in by_name.values()))

    costs = {name: call_ns(name) for name in POLICY_NAMES}
    print("\nns a call, median (best)        touch   insert + evict")
    for name, cost in costs.items():
        touch = f"{cost['touch_ns_median']:.0f} ({cost['touch_ns_min']:.0f})"
        replace = f"{cost['insert_evict_ns_median']:.0f} ({cost['insert_evict_ns_min']:.0f})"
        print(f"{name:<24}{touch:>13}{replace:>17}")

    ours = means[next(iter(ORDERS))]
    best_name = max(ours, key=ours.__getitem__)
    result = {
        "question": __doc__.splitlines()[0],
        "command": COMMAND,
        "kvkeep": kvkeep.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "load_average": os.getloadavg()[0],  # bears on the costs only
        "default": DEFAULT_POLICY,
        "best": best_name,
        "mean_of_belady": means,
        "call_ns": costs,
        "table": table,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\npolicies: best={best_name} mean_of_belady={ours[best_name]:.2f}")


if __name__ == "__main__":
    main()
