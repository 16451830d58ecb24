"""What tests have an engine do: functions that run in the engine's process, given its `LLM`."""

from __future__ import annotations

import os
import time
from typing import Any

GREEDY = {"temperature": 0, "max_tokens": 16, "logprobs": 1, "ignore_eos": True}


def ask(llm: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answer all `requests` together; what each produced.

    A request: `tokens`, and perhaps `salt`, `lora` (name, number, folder), `embeds` (a tensor, in
    place of tokens), `priority`, `sampling` (added to greedy).
    """
    from vllm.lora.request import LoRARequest

    prompts = [_prompt(request) for request in requests]
    sampling = [_sampling(request) for request in requests]
    options: dict[str, Any] = {}
    if any("lora" in request for request in requests):
        options["lora_request"] = [
            LoRARequest(*request["lora"]) if request.get("lora") else None for request in requests
        ]
    if any("priority" in request for request in requests):
        options["priority"] = [request.get("priority", 0) for request in requests]
    outputs = llm.generate(prompts, sampling, use_tqdm=False, **options)
    return [_answer(output) for output in outputs]


def _sampling(request: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    options = {**GREEDY, **request.get("sampling", {})}
    if "structured_outputs" in options:
        options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
    return SamplingParams(**options)


def _prompt(request: dict[str, Any]) -> Any:
    made: dict[str, Any] = (
        {"prompt_embeds": request["embeds"]}
        if "embeds" in request
        else {"prompt_token_ids": request["tokens"]}
    )
    if request.get("salt"):
        made["cache_salt"] = request["salt"]
    return made


def _answer(output: Any) -> dict[str, Any]:
    """Of the first choice, and `others`: tokens and logprobs of the rest."""
    choices = [
        {
            "tokens": list(choice.token_ids),
            "logprobs": [
                step[token].logprob
                for step, token in zip(choice.logprobs or (), choice.token_ids, strict=False)
            ],
            "finish": choice.finish_reason,
        }
        for choice in output.outputs
    ]
    return {**choices[0], "others": choices[1:], "cached": output.num_cached_tokens}


def reset(llm: Any, *, connector: bool = False) -> bool:
    """Empty the engine's own prefix cache, and with `connector` kvkeep as well."""
    return llm.reset_prefix_cache(reset_connector=connector)


def connector_of(llm: Any) -> Any:
    """The scheduler's connector; None where the engine has none."""
    return llm.llm_engine.engine_core.engine_core.scheduler.get_kv_connector()


def settle(llm: Any) -> None:
    """Let the engine take steps until nothing is left to do, and all writes be written."""
    engine = llm.llm_engine
    for _ in range(20):
        engine.step()
    connector = connector_of(llm)
    if connector is not None and connector._scheduler is not None:
        connector._scheduler.cache.hierarchy.flush(60)


def forget_memory(llm: Any) -> None:
    """Have kvkeep forget what memory holds, once all of it is on disk; the engine as well."""
    settle(llm)
    connector_of(llm)._scheduler.cache.clear_memory()
    llm.reset_prefix_cache()


def state(llm: Any) -> dict[str, Any] | None:
    """Who holds slots now, and what was counted; checks that the cache is as it should be."""
    connector = connector_of(llm)
    if connector is None:
        return None
    found: dict[str, Any] = {"off_because": connector.off_because, "name": type(connector).__name__}
    side = connector._scheduler
    if side is not None:
        settle(llm)
        cache = side.cache
        cache.check_integrity()
        found["owners"] = cache.pool.owners()
        found["chunks"] = cache.num_chunks
        found["chunk_tokens"] = cache.shape.num_tokens
        found["tracked"] = len(side._tracked)
        found["counters"] = {
            name: {field: getattr(counters, field) for field in ("hit_tokens", "corrupt")}
            for name, counters in cache.tier_counters().items()
        }
        found["dropped_chunks"] = cache.counters.dropped_chunks
        found["evictions"] = cache.evictions
    return found


def abort(llm: Any, request: dict[str, Any], after_steps: int) -> None:
    """Start a request, go on for some steps, and abort it; then let the engine come to rest."""
    engine = llm.llm_engine
    engine.add_request("to-abort", _prompt(request), _sampling(request))
    for _ in range(after_steps):
        engine.step()
    engine.abort_request(["to-abort"])
    settle(llm)


def forget(llm: Any) -> None:
    """Have kvkeep forget what memory holds; the engine keeps its own."""
    settle(llm)
    connector_of(llm)._scheduler.cache.clear_memory()


def break_loads(llm: Any, count: int) -> None:
    """Make the next `count` copies from slots to pages fail, on the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    copier = get_kv_transfer_group()._worker._copier
    scatter, left = copier.scatter, [count]

    def broken(runs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError("broken by the test")
        return scatter(runs)

    copier.scatter = broken


def pool_nbytes(llm: Any) -> int:
    """Bytes of memory that kvkeep's pool takes, over all ranks."""
    return connector_of(llm)._scheduler.cache.pool.memory.nbytes


def remove_parts(llm: Any, folder: str, rank: int) -> int:
    """Remove one rank's files of all chunks on disk, behind kvkeep's back; how many."""
    from kvkeep.tiers.disk_layout import chunk_path

    disk = connector_of(llm)._scheduler.cache.hierarchy.links[0].tier
    paths = [chunk_path(folder, key) for key in list(disk.keys()) if key.rank == rank]
    for path in paths:
        os.unlink(path)
    return len(paths)


def make_stage_buffers(llm: Any) -> None:
    """Have each pipeline stage make the buffers it receives into.

    vLLM makes them in its warm-up run, which it leaves out on a CPU in eager mode: without them
    the second stage stops at the first request, with or without a cache.
    """
    llm.collective_rpc(_make_stage_buffers)


def _make_stage_buffers(worker: Any) -> None:
    runner = worker.model_runner
    if runner.intermediate_tensors is None and hasattr(
        runner.model, "make_empty_intermediate_tensors"
    ):
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )


def break_rank(llm: Any, rank: int, copy: str) -> None:
    """Make the next copy of one rank fail: "scatter" (slots to pages) or "gather"."""
    llm.collective_rpc(_break_rank, args=(rank, copy))


def _break_rank(worker: Any, rank: int, copy: str) -> None:
    if worker.rank != rank:
        return
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    copier = get_kv_transfer_group()._worker._copier
    whole = getattr(copier, copy)

    def broken(runs: Any) -> Any:
        setattr(copier, copy, whole)
        raise OSError("broken by the test")

    setattr(copier, copy, broken)


def count_preemptions(llm: Any) -> None:
    """From now on count how often the engine takes a running request's blocks away."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    scheduler.preemptions = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        scheduler.preemptions += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted


def preemptions(llm: Any) -> int:
    """How often that was, since `count_preemptions`."""
    return llm.llm_engine.engine_core.engine_core.scheduler.preemptions


def disk_link(llm: Any) -> Any:
    """kvkeep's link to its disk tier."""
    return connector_of(llm)._scheduler.cache.hierarchy.links[0]


def slow_disk(llm: Any, seconds: float) -> None:
    """Every load and store of the disk takes that much longer; 0 makes it fast again."""
    from kvkeep.tiers.wrappers import Delayed

    class Slow(Delayed):
        """Knows at once what it holds."""

        def contains(self, keys: Any) -> list[bool]:
            return self.inner.contains(keys)

    link = disk_link(llm)
    whole = getattr(link.tier, "inner", link.tier)
    link.tier = Slow(whole, seconds) if seconds else whole


def faulty_disk(llm: Any, **rates: float) -> None:
    """The disk fails at these rates (`FaultRates`); without any it works again."""
    from kvkeep.tiers.wrappers import FaultRates, Faulty

    link = disk_link(llm)
    whole = getattr(link.tier, "inner", link.tier)
    link.tier = Faulty(whole, FaultRates(**rates), seed=1) if rates else whole


def breaker_is_open(llm: Any) -> bool:
    """Whether the disk is cut off at the moment."""
    return disk_link(llm).breaker.is_open


def start(llm: Any, name: str, request: dict[str, Any], steps: int) -> None:
    """Start a request of this name, and go on for some steps."""
    llm.llm_engine.add_request(name, _prompt(request), _sampling(request))
    for _ in range(steps):
        llm.llm_engine.step()


def stop(llm: Any, name: str) -> None:
    """Abort a request that `start` started; takes no step."""
    llm.llm_engine.abort_request([name])


def finish(llm: Any, names: list[str]) -> dict[str, dict[str, Any]]:
    """Go on until these requests have ended; what they produced."""
    done: dict[str, dict[str, Any]] = {}
    while len(done) < len(names):
        for output in llm.llm_engine.step():
            if output.finished and output.request_id in names:
                done[output.request_id] = _answer(output)
    return done


def wait_for_breaker(llm: Any) -> None:
    """Return once the disk may be tried again."""
    deadline = time.monotonic() + 60
    while not disk_link(llm).breaker.is_ready and time.monotonic() < deadline:
        time.sleep(0.05)


def look_around(llm: Any) -> None:
    """Have the disk tier see what other processes kept, rather than wait until it does."""
    tier = disk_link(llm).tier
    tier._look_around(tier._opened())


def change_weights(llm: Any) -> None:
    """Change the model's weights in place, the same way each time."""
    llm.collective_rpc(_change_weights)


def _change_weights(worker: Any) -> None:
    import torch

    with torch.no_grad():
        for name, weight in worker.model_runner.model.named_parameters():
            # Not the matrices: on a CPU they are used as they were packed at start.
            if "input_layernorm" in name:
                weight[::2] *= 2


def ask_rounds(llm: Any, rounds: list[list[dict[str, Any]]]) -> None:
    """Answer batch after batch, for the work's sake."""
    for batch in rounds:
        ask(llm, batch)


def found_bad(llm: Any) -> int:
    """How many kept files kvkeep has found to be bad so far."""
    link = disk_link(llm)
    return int(link.counters.corrupt) + link.tier.stats().failed_reads
