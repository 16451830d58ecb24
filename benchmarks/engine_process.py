"""A vLLM engine that serves batches from standard input; `tax.py` starts two of them."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)

HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
    "get_block_ids_with_load_errors",
)


class HookTimes:
    """Sums the time spent inside a connector's hooks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


def main() -> None:
    start = json.loads(sys.stdin.readline())
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    options: dict[str, Any] = {}
    if start["connector"] is not None:
        options["kv_transfer_config"] = KVTransferConfig(**start["connector"])
    llm = LLM(
        model=start["model"],
        enforce_eager=True,
        max_model_len=4096,
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
        **options,
    )
    times = HookTimes()
    connectors = [llm.llm_engine.engine_core.engine_core.scheduler.get_kv_connector()]
    if has_kv_transfer_group():
        connectors.append(get_kv_transfer_group())
    for connector in connectors:
        for hook in HOOKS if connector is not None else ():
            setattr(connector, hook, times.wrap(getattr(connector, hook)))
    answer({"ready": True})
    for line in sys.stdin:
        message = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in message["prompts"]]
        sampling = SamplingParams(
            temperature=0, max_tokens=message["output_tokens"], ignore_eos=True
        )
        times.seconds = 0.0
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        answer(
            {
                "seconds": seconds,
                "hook_seconds": times.seconds,
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "hit_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
            }
        )
    llm.llm_engine.engine_core.shutdown()


def answer(message: dict[str, Any]) -> None:
    print("ANSWER " + json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
