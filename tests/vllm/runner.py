"""Runs one scenario on a real engine in this process; started by the tests as a program.

Reads a JSON scenario from standard input and writes one JSON line that starts with RESULT.
A process of its own for each engine: vLLM does not unload cleanly, and a restart is the point.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)


def main() -> None:
    scenario: dict[str, Any] = json.load(sys.stdin)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    options: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 4096,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 1024,
        **scenario.get("engine", {}),
    }
    if "connector" in scenario:
        options["kv_transfer_config"] = KVTransferConfig(**scenario["connector"])
    llm = LLM(model=scenario["model"], **options)
    sampling = SamplingParams(
        temperature=0, max_tokens=scenario.get("max_tokens", 16), logprobs=1, ignore_eos=True
    )
    rounds = []
    for batch in scenario["rounds"]:
        if batch == "reset":
            llm.reset_prefix_cache()
            continue
        if isinstance(batch, dict):
            _abort(llm, batch, sampling)
            continue
        prompts = [_prompt(prompt) for prompt in batch]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        rounds.append([_answer(output) for output in outputs])
    result = {"rounds": rounds, "cache": _cache_state(llm)}
    print("RESULT " + json.dumps(result), flush=True)
    llm.llm_engine.engine_core.shutdown()


def _abort(llm: Any, case: dict[str, Any], sampling: Any) -> None:
    """Start a request, go on for some steps, and abort it; then let the engine come to rest."""
    engine = llm.llm_engine
    engine.add_request("to-abort", _prompt(case["abort"]), sampling)
    for _ in range(case["after_steps"]):
        engine.step()
    engine.abort_request(["to-abort"])
    for _ in range(20):
        engine.step()


def _prompt(prompt: dict[str, Any]) -> Any:
    made: dict[str, Any] = {"prompt_token_ids": prompt["tokens"]}
    if prompt.get("salt"):
        made["cache_salt"] = prompt["salt"]
    return made


def _answer(output: Any) -> dict[str, Any]:
    choice = output.outputs[0]
    logprobs = [
        step[token].logprob for step, token in zip(choice.logprobs, choice.token_ids, strict=True)
    ]
    return {
        "tokens": list(choice.token_ids),
        "logprobs": logprobs,
        "cached": output.num_cached_tokens,
    }


def _cache_state(llm: Any) -> dict[str, Any] | None:
    """Who holds slots after the last request, and whether all is as it should be."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.get_kv_connector()
    if connector is None:
        return None
    state: dict[str, Any] = {"off_because": connector.off_because, "name": type(connector).__name__}
    if connector._scheduler is not None:
        cache = connector._scheduler.cache
        cache.hierarchy.flush(30)
        cache.check_integrity()
        state["owners"] = cache.pool.owners()
        state["chunks"] = cache.num_chunks
        state["chunk_tokens"] = cache.shape.num_tokens
        state["tracked"] = len(connector._scheduler._tracked)
    return state


if __name__ == "__main__":
    main()
