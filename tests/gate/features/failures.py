"""Loads that break half way, under both values of vLLM's kv_load_failure_policy."""

from __future__ import annotations

from collections.abc import Iterator

from tests.gate.lab import Lab, Outcome, clean, compare, kvkeep, not_less_cached
from tests.vllm import asking

OPTIONS = {"block_size": 32}


def cases(lab: Lab) -> Iterator[Outcome]:
    for policy in ("recompute", "fail"):
        for own_cache in (False, True):
            yield from _broken(lab, policy, own_cache=own_cache)


def quick_cases(lab: Lab) -> Iterator[Outcome]:
    """Both policies once, for a short run."""
    yield from _broken(lab, "recompute", own_cache=True)
    yield from _broken(lab, "fail", own_cache=False)


def _broken(lab: Lab, policy: str, *, own_cache: bool) -> Iterator[Outcome]:
    requests = [{"tokens": lab.text(80 + number, 385)} for number in range(3)]
    own = lab.plain([requests], **OPTIONS)
    settings = kvkeep(chunk_tokens=32, memory__size="0.2", policy=policy)
    title = f"failures/{policy}" + " own cache" * own_cache
    with lab.start(
        **OPTIONS,
        enable_prefix_caching=own_cache,
        kv_transfer_config=settings,
        name="failures",
    ) as engine:
        engine.do(asking.ask, requests)
        engine.do(asking.reset)
        engine.do(asking.break_loads, 1)
        found = engine.do(asking.ask, requests)
        failed = [answer["finish"] == "error" for answer in found]
        if policy == "recompute":
            problems = [*compare(own[0], found, logprobs=False)]
        else:
            problems = [] if sum(failed) == 1 else [f"{sum(failed)} requests failed"]
            pairs = [
                (mine, theirs)
                for mine, theirs, bad in zip(own[0], found, failed, strict=True)
                if not bad
            ]
            problems += compare(
                [mine for mine, _ in pairs], [theirs for _, theirs in pairs], logprobs=False
            )
        yield Outcome(f"{title}: one load of three breaks", problems)
        engine.do(asking.reset)
        found = engine.do(asking.ask, requests)
        yield Outcome(
            f"{title}: the next time",
            [
                *compare(own[0], found, logprobs=False),
                *not_less_cached(found, 384),
                *clean(engine.do(asking.state)),
            ],
        )
