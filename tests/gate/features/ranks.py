"""Tensor and pipeline parallel engines: one budget, one index, and each rank's own bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gate.features.groups import BLOCK, longer, prompt
from tests.gate.lab import Lab, Outcome, clean, compare, kvkeep, not_less_cached
from tests.vllm import asking, models
from tests.vllm.host import Engine

_MEMORY_GIB = 0.05
_RANKS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
}


def cases(lab: Lab) -> Iterator[Outcome]:
    for kind, model in (("tp", models.qwen3), ("pp", models.qwen3), ("tp", models.gemma3)):
        yield from _ranks(lab, kind, models.make_model(lab.folder / "models", model))


def quick_cases(lab: Lab) -> Iterator[Outcome]:
    """Tensor parallel alone, for a short run."""
    yield from _ranks(lab, "tp", models.make_model(lab.folder / "models", models.qwen3))


def _ranks(lab: Lab, kind: str, model: str) -> Iterator[Outcome]:
    title = f"ranks/{kind}=2 {model.rsplit('/', 1)[-1]}"
    options = {
        "model": model,
        "skip_tokenizer_init": True,
        "block_size": BLOCK,
        "distributed_executor_backend": "mp",
        # vLLM would give each rank a NUMA node of its own.
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        **_RANKS[kind],
    }
    first = prompt(11, 513)
    grown = longer(first, 12, 150)
    many = [longer(prompt(20, 129), seed, 100) for seed in range(21, 25)]
    rounds = [[first], [first], [grown], many, many, [prompt(13, 513)]]
    with _start(lab, **options, enable_prefix_caching=True) as engine:
        own = [engine.do(asking.ask, batch) for batch in rounds]
    folder = lab.new_folder()
    settings = kvkeep(
        chunk_tokens=64,
        memory__size=str(_MEMORY_GIB),
        disk__paths=folder,
        disk__size="1",
    )
    with _start(lab, **options, kv_transfer_config=settings) as engine:
        for where in ("memory", "disk"):
            answers = [engine.do(asking.ask, batch) for batch in rounds]
            yield Outcome(
                f"{title}: the same again from {where}",
                [
                    *compare(own[1], answers[1], logprobs=True),
                    *not_less_cached(answers[1], 512),
                ],
            )
            for number, what in ((0, "first"), (2, "a longer one"), (3, "several together")):
                yield Outcome(
                    f"{title}: {what}, {where}",
                    [*compare(own[number], answers[number], logprobs=False)],
                )
            engine.do(asking.forget_memory)
        state = engine.do(asking.state)
        budget = engine.do(asking.pool_nbytes)
        over = [] if budget <= _MEMORY_GIB * 2**30 else [f"the pool takes {budget} bytes"]
        yield Outcome(f"{title}: one budget for all ranks, nothing left", [*clean(state), *over])
    with _start(lab, **options, kv_transfer_config=settings) as engine:
        again = engine.do(asking.ask, [first])
        yield Outcome(
            f"{title}: after a restart",
            [*compare(own[1], again, logprobs=True), *not_less_cached(again, 512)],
        )
        engine.do(asking.forget_memory)
        # A hit counts only where every rank has its part.
        removed = engine.do(asking.remove_parts, folder, 1)
        again = engine.do(asking.ask, [first])
        problems = [] if removed else ["no rank's part was there to be removed"]
        problems += not_cached(again)
        yield Outcome(
            f"{title}: one rank's part is gone",
            [*compare(own[0], again, logprobs=False), *problems],
        )
        engine.do(asking.ask, [first])
        for rank in (0, 1):
            engine.do(asking.break_rank, rank, "scatter")
            again = engine.do(asking.ask, [first])
            # The request is computed again, as it was told: no more of it than all ranks have.
            yield Outcome(
                f"{title}: a load breaks on rank {rank}",
                [*compare(own[0], again, logprobs=False)],
            )
        other = prompt(13, 513)
        engine.do(asking.break_rank, 1, "gather")
        engine.do(asking.ask, [other])
        again = engine.do(asking.ask, [other])
        yield Outcome(
            f"{title}: a store breaks on rank 1",
            [*compare(own[5], again, logprobs=False), *not_cached(again)],
        )
        again = engine.do(asking.ask, [first])
        yield Outcome(
            f"{title}: kept again",
            [*not_less_cached(again, 512), *clean(engine.do(asking.state))],
        )


def not_cached(answers: list[dict[str, Any]]) -> list[str]:
    return [
        f"{answer['cached']} tokens from a cache that has one rank's part only"
        for answer in answers
        if answer["cached"]
    ]


def _start(lab: Lab, **options: Any) -> Engine:
    engine = lab.start(**options, name="ranks")
    engine.do(asking.make_stage_buffers)
    return engine
