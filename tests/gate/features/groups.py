"""Models whose KV is not one group of full attention: sliding windows, MLA; and what is refused.

Small models with random weights: what counts is which blocks the engine looks at.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gate.lab import Lab, Outcome, clean, compare, kvkeep, not_less_cached
from tests.vllm import asking, models

BLOCK = 32


def cases(lab: Lab) -> Iterator[Outcome]:
    folder = lab.folder / "models"
    for name in ("gemma3", "mistral"):
        model = models.make_model(folder, getattr(models, name))
        # Less than the windows of 160 and 96 tokens, equal to one, and more than both.
        for chunk_tokens in (32, 96, 256):
            yield from hits(lab, model, name, chunk_tokens)
        # Steps shorter than a chunk: the engine takes blocks away while a chunk is computed.
        yield from hits(lab, model, name, 256, max_num_batched_tokens=64)
        yield from beside_local_hits(lab, model, name)
        yield from failed_load(lab, model, name)
    yield from _real(lab)
    mla = models.make_model(folder, models.deepseek_v2)
    if _has_amx():
        for chunk_tokens in (32, 256):
            yield from hits(lab, mla, "deepseek_v2 amx", chunk_tokens, dtype="bfloat16")
    # vLLM's reference backend for a CPU gives other answers from a prefix on, and has no prefix
    # cache of its own for that reason.
    cpu_mla = {"attention_config": {"backend": "CPU_MLA"}, "max_num_batched_tokens": 4096}
    yield from refused(lab, mla, "CPU_MLA", **cpu_mla)
    hybrid = models.make_model(folder, models.granite_hybrid)
    yield from refused(lab, hybrid, "MambaSpec", block_size=BLOCK)


def quick_cases(lab: Lab) -> Iterator[Outcome]:
    """One of each kind, for a short run."""
    folder = lab.folder / "models"
    gemma = models.make_model(folder, models.gemma3)
    yield from hits(lab, gemma, "gemma3", 96)
    mistral = models.make_model(folder, models.mistral)
    yield from hits(lab, mistral, "mistral", 256, max_num_batched_tokens=64)
    yield from failed_load(lab, mistral, "mistral")
    hybrid = models.make_model(folder, models.granite_hybrid)
    yield from refused(lab, hybrid, "MambaSpec", block_size=BLOCK)


def prompt(seed: int, num_tokens: int) -> dict[str, Any]:
    """Tokens that no two seeds share."""
    rng = random.Random(seed)
    tokens = [rng.randrange(3, models.VOCABULARY) for _ in range(num_tokens)]
    return {"tokens": tokens}


def longer(request: dict[str, Any], seed: int, num_tokens: int) -> dict[str, Any]:
    return {"tokens": request["tokens"] + prompt(seed, num_tokens)["tokens"]}


def hits(lab: Lab, model: str, name: str, chunk_tokens: int, **more: Any) -> Iterator[Outcome]:
    """Memory, disk, disk after a restart; each hit against the engine's own at that length."""
    options = {"model": model, "skip_tokenizer_init": True, "block_size": BLOCK, **more}
    length = 4 * max(chunk_tokens, 64) // chunk_tokens * chunk_tokens
    # One more than a hit can hold, so that the engine's own prefix cache hits as much.
    first = prompt(1, length + 1)
    grown = longer(first, 2, 200)
    rounds = [[first], [first], [grown]]
    own = lab.plain(rounds, **options, enable_prefix_caching=True)
    folder = lab.new_folder()
    title = f"groups/{name} chunk {chunk_tokens}" + "".join(f" {k}={v}" for k, v in more.items())
    settings = {
        "chunk_tokens": chunk_tokens,
        "memory__size": "0.2",
        "disk__paths": folder,
        "disk__size": "1",
    }
    with lab.start(**options, kv_transfer_config=kvkeep(**settings), name=name) as engine:
        for where in ("memory", "disk"):
            answers = [engine.do(asking.ask, batch) for batch in rounds]
            if where == "memory":
                yield Outcome(f"{title}: cold", [*compare(own[0], answers[0], logprobs=True)])
            yield Outcome(
                f"{title}: the same again from {where}",
                [
                    *compare(own[1], answers[1], logprobs=True),
                    *not_less_cached(answers[1], length),
                ],
            )
            if where == "memory":
                yield Outcome(
                    f"{title}: a longer one from {where}",
                    [
                        *compare(own[2], answers[2], logprobs=True),
                        *not_less_cached(answers[2], length),
                    ],
                )
            engine.do(asking.forget_memory)
        yield Outcome(f"{title}: nothing left", [*clean(engine.do(asking.state))])
    with lab.start(**options, kv_transfer_config=kvkeep(**settings), name=name) as engine:
        answers = [engine.do(asking.ask, [first])]
        yield Outcome(
            f"{title}: after a restart",
            [*compare(own[1], answers[0], logprobs=True), *not_less_cached(answers[0], length)],
        )


def beside_local_hits(lab: Lab, model: str, name: str, **more: Any) -> Iterator[Outcome]:
    """A beginning from the engine's own cache, and what follows from ours."""
    options = {"model": model, "skip_tokenizer_init": True, "block_size": BLOCK, **more}
    options["enable_prefix_caching"] = True
    beginning = prompt(3, 257)
    whole = longer(beginning, 4, 255)
    whole["tokens"] += [5]
    own = lab.plain([[whole], [whole]], **options)
    settings = {"chunk_tokens": 64, "memory__size": "0.2"}
    with lab.start(**options, kv_transfer_config=kvkeep(**settings), name=name) as engine:
        engine.do(asking.ask, [whole])
        engine.do(asking.reset)
        engine.do(asking.ask, [beginning])  # from ours into the engine's own
        again = engine.do(asking.ask, [whole])
        yield Outcome(
            f"groups/{name}: local beginning, the rest kept",
            [*compare(own[1], again, logprobs=True), *not_less_cached(again, 512)],
        )
        # The engine has the beginning, kvkeep has nothing: what the engine took away can't be
        # stored, and what is stored must be right.
        engine.do(asking.forget)
        engine.do(asking.ask, [longer(whole, 5, 200)])
        engine.do(asking.reset)
        again = engine.do(asking.ask, [whole])
        yield Outcome(
            f"groups/{name}: stored beside a local beginning",
            [*compare(own[0], again, logprobs=False)],
        )
        yield Outcome(f"groups/{name}: nothing left", [*clean(engine.do(asking.state))])


def _real(lab: Lab) -> Iterator[Outcome]:
    """Gemma 3 270M, where `make gemma` has made it: real weights, a window of 512 tokens."""
    model = Path(lab.model).parent / "gemma-3-270m"
    if not model.exists():
        return
    text = _gemma_text(model)
    options: dict[str, Any] = {"model": str(model), "block_size": BLOCK, "max_model_len": 2048}
    # A hit can hold 1,280 tokens of it: more than two windows.
    first = {"tokens": text[:1281]}
    grown = {"tokens": text[:1400]}
    short = {"tokens": text[:257]}
    rounds = [[first], [first], [grown], [short]]
    own = lab.plain(rounds, **options, enable_prefix_caching=True)
    for chunk_tokens in (32, 256):
        title = f"groups/gemma-3-270m chunk {chunk_tokens}"
        settings = kvkeep(
            chunk_tokens=chunk_tokens,
            memory__size="1",
            disk__paths=lab.new_folder(),
            disk__size="4",
        )
        with lab.start(**options, kv_transfer_config=settings, name="gemma") as engine:
            for where in ("memory", "disk"):
                answers = [engine.do(asking.ask, batch) for batch in rounds]
                kept = (1280, 1280 if where == "memory" else 1376 // chunk_tokens * chunk_tokens)
                for number, at_least in ((1, kept[0]), (2, kept[1]), (3, 256)):
                    # The second time around more of the longest one is kept than the engine kept.
                    same = answers[number][0]["cached"] == own[number][0]["cached"]
                    yield Outcome(
                        f"{title}: {len(rounds[number][0]['tokens'])} tokens from {where}",
                        [
                            *compare(own[number], answers[number], logprobs=same),
                            *not_less_cached(answers[number], at_least),
                        ],
                    )
                engine.do(asking.forget_memory)
            yield Outcome(f"{title}: nothing left", [*clean(engine.do(asking.state))])


def _gemma_text(model: Path) -> list[int]:
    import pydoc_data.topics

    from tokenizers import Tokenizer

    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    begin = json.loads((model / "config.json").read_text())["bos_token_id"]
    return [begin, *tokenizer.encode(text[:20_000], add_special_tokens=False).ids]


def _has_amx() -> bool:
    """Whether vLLM's MLA backend for such processors, which has a prefix cache, can run."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


def failed_load(lab: Lab, model: str, name: str, **more: Any) -> Iterator[Outcome]:
    """A load that breaks: the request is computed again, with the right answer."""
    options = {"model": model, "skip_tokenizer_init": True, "block_size": BLOCK, **more}
    request = prompt(6, 513)
    own = lab.plain([[request]], **options)
    with lab.start(**options, kv_transfer_config=kvkeep(memory__size="0.2"), name=name) as engine:
        engine.do(asking.ask, [request])
        engine.do(asking.break_loads, 1)
        for what in ("a load that breaks", "the load after it"):
            again = engine.do(asking.ask, [request])
            yield Outcome(f"groups/{name}: {what}", [*compare(own[0], again, logprobs=False)])
        yield Outcome(
            f"groups/{name}: hits again",
            [*not_less_cached(again, 512), *clean(engine.do(asking.state))],
        )


def refused(lab: Lab, model: str, reason: str, **more: Any) -> Iterator[Outcome]:
    """kvkeep says why it is off, and the engine answers without it."""
    options: dict[str, Any] = {"model": model, "skip_tokenizer_init": True, **more}
    request = prompt(7, 300)
    own = lab.plain([[request], [request]], **options)
    with lab.start(**options, kv_transfer_config=kvkeep(memory__size="0.2")) as engine:
        answers = [engine.do(asking.ask, [request]) for _ in range(2)]
        said = engine.do(asking.state)["off_because"]
    problems = [] if reason in said else [f"off because {said!r}"]
    for mine, theirs in zip(own, answers, strict=True):
        problems += compare(mine, theirs, logprobs=True)
    yield Outcome(f"groups/{Path(model).name}: refused with a reason ({reason})", problems)
