"""More requests than the engine has room for: it takes blocks away and computes again."""

from __future__ import annotations

from collections.abc import Iterator

from tests.gate.lab import Lab, Outcome, clean, compare, kvkeep
from tests.vllm import asking

_LONG = {"sampling": {"max_tokens": 72}}


def cases(lab: Lab) -> Iterator[Outcome]:
    for save_decode_cache in (False, True):
        for disk in (False, True):
            yield from _preempted(lab, disk=disk, save_decode_cache=save_decode_cache)


def quick_cases(lab: Lab) -> Iterator[Outcome]:
    """The hardest of them, for a short run."""
    yield from _preempted(lab, disk=True, save_decode_cache=True)


def _preempted(lab: Lab, *, disk: bool, save_decode_cache: bool) -> Iterator[Outcome]:
    options = {
        "block_size": 32,
        "num_gpu_blocks_override": 48,
        "max_model_len": 1024,
        "max_num_seqs": 8,
    }
    beginning = lab.text(30, 128)
    requests = [
        {"tokens": beginning + lab.text(31 + number, 60 + number), **_LONG} for number in range(8)
    ]
    own = lab.plain([requests], **options)
    settings = {"memory__size": "0.1", "save_decode_cache": save_decode_cache}
    if disk:
        settings |= {"disk__paths": lab.new_folder(), "disk__size": "1"}
        settings["memory__size"] = "0.02"
    title = f"preemption/disk {disk} save_decode_cache {save_decode_cache}"
    flag = kvkeep(chunk_tokens=32, **settings)
    with lab.start(**options, kv_transfer_config=flag, name="preemption") as engine:
        engine.do(asking.count_preemptions)
        for time in ("first", "again"):
            found = engine.do(asking.ask, requests)
            times = engine.do(asking.preemptions)
            none = [] if times else ["nothing was preempted"]
            yield Outcome(f"{title}: {time}", [*compare(own[0], found, logprobs=False), *none])
            engine.do(asking.settle)
        yield Outcome(f"{title}: nothing left", [*clean(engine.do(asking.state))])
