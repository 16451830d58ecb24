"""What the scheduler side costs by itself: no engine, no bytes moved, requests made by hand."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvkeep.cache import KVCache
from kvkeep.config import KVKeepConfig
from kvkeep.connectors.vllm.messages import Outcome, StepReport
from kvkeep.connectors.vllm.scheduler import Roles, SchedulerSide
from kvkeep.device.groups import GroupPart
from kvkeep.hierarchy import ChunkShape, Hierarchy
from kvkeep.keys import Namespace
from kvkeep.memory.pool import SlotPool
from kvkeep.policies import make_policy

NUM_TOKENS = 8192
REPEATS = 31


@dataclass
class FakeRequest:
    """What the scheduler side reads of vLLM's `Request`."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    lora_request: Any = None
    num_computed_tokens: int = 0
    mm_features: list[Any] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    num_prompt_tokens = num_tokens

    def is_finished(self) -> bool:
        return True


def step_of(request: FakeRequest, num_scheduled: int) -> Any:
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    return SimpleNamespace(
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={request.request_id: num_scheduled},
        total_num_scheduled_tokens=num_scheduled,
    )


def one_request(side: SchedulerSide, request: FakeRequest, block_tokens: int) -> dict[str, float]:
    """One request from first sight to its end; microseconds for each part."""
    blocks = list(range(-(-request.num_tokens // block_tokens)))
    clock = time.perf_counter
    at = [clock()]
    num_hits, _ = side.match(request, 0)  # type: ignore[arg-type]
    at.append(clock())
    side.match(request, 0)  # type: ignore[arg-type]
    at.append(clock())
    assert num_hits is not None
    side.allocated(request, (blocks,), num_hits)  # type: ignore[arg-type]
    request.num_computed_tokens = num_hits
    plan = side.plan_step(step_of(request, request.num_tokens - num_hits))
    report = StepReport(
        loads={op.request_id: Outcome(1) for op in plan.loads},
        stores={op.number: Outcome(1) for op in plan.stores},
    )
    at.append(clock())
    side.take_results(report, {op.request_id for op in plan.loads})
    side.finished(request)  # type: ignore[arg-type]
    at.append(clock())
    look_up, again, plan_s, results = (at[n + 1] - at[n] for n in range(4))
    return {
        "first_sight_us": (look_up + plan_s + results) * 1e6,
        "look_up_us": look_up * 1e6,
        "again_us": again * 1e6,
        "hit_tokens": num_hits,
    }


def scheduler_costs() -> dict[str, dict[str, float]]:
    """Chunk tokens -> medians over requests that miss, and that hit in full."""
    costs: dict[str, dict[str, float]] = {}
    for chunk_tokens in (16, 64, 128, 256):
        shape = ChunkShape(chunk_tokens, (4096,))
        pool = SlotPool.create(
            NUM_TOKENS // chunk_tokens * 4 * sum(shape.slot_bytes), shape.slot_bytes
        )
        namespace = Namespace.of("bench", {})
        cache = KVCache(
            pool,
            make_policy("slru", pool.num_slots),
            Hierarchy([], pool, namespace, shape),
            shape,
        )
        side = SchedulerSide(
            cache,
            namespace,
            KVKeepConfig(),
            Roles(stores=True, loads=True),
            groups=[GroupPart.of(chunk_tokens, chunk_tokens, None)],
            num_ranks=1,
        )
        rng = random.Random(chunk_tokens)
        misses: list[dict[str, float]] = []
        hits: list[dict[str, float]] = []
        for number in range(REPEATS):
            tokens = [rng.randrange(150_000) for _ in range(NUM_TOKENS)]
            misses.append(one_request(side, FakeRequest(f"m{number}", tokens), chunk_tokens))
            hits.append(one_request(side, FakeRequest(f"h{number}", tokens), chunk_tokens))
            assert misses[-1]["hit_tokens"] == 0
            assert hits[-1]["hit_tokens"] == NUM_TOKENS - 1
        cache.close()
        costs[str(chunk_tokens)] = {
            "first_sight_us": _median(misses, "first_sight_us"),
            "look_up_us": _median(misses, "look_up_us"),
            "again_us": _median(misses, "again_us"),
            "full_hit_us": _median(hits, "first_sight_us"),
            "hit_again_us": _median(hits, "again_us"),
        }
    return costs


def _median(rows: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(row[name] for row in rows), 1)


if __name__ == "__main__":
    for tokens, row in scheduler_costs().items():
        print(f"chunk_tokens {tokens:>4}, {NUM_TOKENS} prompt tokens: {row}")
