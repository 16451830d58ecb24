"""Equal tokens, other conditions: salts, adapters and embeddings never share, equal ones do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gate.lab import Answer, Lab, Outcome, Request, clean, compare, kvkeep, not_less_cached
from tests.vllm import asking
from tests.vllm.host import Engine

OPTIONS: dict[str, Any] = {"block_size": 32}


def cases(lab: Lab) -> Iterator[Outcome]:
    yield from _salts(lab)
    yield from _embeds(lab)
    yield from _adapters(lab)


def _settings(**more: Any) -> Any:
    return kvkeep(chunk_tokens=32, memory__size="0.2", **more)


def _unshared(found: list[Answer]) -> list[str]:
    return [f"{answer['cached']} tokens of another's" for answer in found if answer["cached"]]


def _ask_each(
    engine: Engine, title: str, own: dict[str, list[Answer]], asked: dict[str, Request]
) -> Iterator[Outcome]:
    """The first time nobody gets another's; the second time each gets its own."""
    for name, request in asked.items():
        found = engine.do(asking.ask, [request])
        yield Outcome(
            f"{title}: {name}, first",
            [*compare(own[name], found, logprobs=False), *_unshared(found)],
        )
    for name, request in asked.items():
        found = engine.do(asking.ask, [request])
        yield Outcome(
            f"{title}: {name}, again",
            [*compare(own[name], found, logprobs=False), *not_less_cached(found, 320)],
        )


def _salts(lab: Lab) -> Iterator[Outcome]:
    tokens = lab.text(60, 330)
    asked = {
        "no salt": {"tokens": tokens},
        "salt a": {"tokens": tokens, "salt": "a"},
        "salt b": {"tokens": tokens, "salt": "b"},
    }
    own = dict.fromkeys(asked, lab.plain([[asked["no salt"]]], **OPTIONS)[0])
    with lab.start(**OPTIONS, kv_transfer_config=_settings(), name="salts") as engine:
        yield from _ask_each(engine, "conditions/salts", own, asked)
        yield Outcome("conditions/salts: nothing left", [*clean(engine.do(asking.state))])


def _embeds(lab: Lab) -> Iterator[Outcome]:
    import torch

    random = torch.Generator().manual_seed(5)
    hidden = json.loads((Path(lab.model) / "config.json").read_text())["hidden_size"]
    one, two = (torch.randn(330, hidden, generator=random) * 0.1 for _ in range(2))
    # Different in the last chunk only, and only a little.
    close = one.clone()
    close[325] += 0.05
    asked = {"one": {"embeds": one}, "two": {"embeds": two}}
    options = {**OPTIONS, "enable_prompt_embeds": True}
    with lab.start(**options, name="plain") as engine:
        own = {name: engine.do(asking.ask, [request]) for name, request in asked.items()}
        own_close = engine.do(asking.ask, [{"embeds": close}])
    with lab.start(**options, kv_transfer_config=_settings(), name="embeds") as engine:
        yield from _ask_each(engine, "conditions/embeddings", own, asked)
        found = engine.do(asking.ask, [{"embeds": close}])
        yield Outcome(
            "conditions/embeddings: other in the last token but four",
            [
                *compare(own_close, found, logprobs=False),
                *not_less_cached(found, 320),
                *clean(engine.do(asking.state)),
            ],
        )


def _adapters(lab: Lab) -> Iterator[Outcome]:
    tokens = lab.text(61, 330)
    folders = [make_adapter(lab, f"adapter-{seed}", seed) for seed in (1, 2)]
    asked = {
        "no adapter": {"tokens": tokens},
        "adapter a": {"tokens": tokens, "lora": ("a", 1, folders[0])},
        "adapter b": {"tokens": tokens, "lora": ("b", 2, folders[1])},
    }
    options = {**OPTIONS, "enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with lab.start(**options, name="plain") as engine:
        own = {name: engine.do(asking.ask, [request]) for name, request in asked.items()}
    alike = [
        f"{name} changes nothing"
        for name in ("adapter a", "adapter b")
        if own[name][0]["tokens"] == own["no adapter"][0]["tokens"]
    ]
    yield Outcome("conditions/adapters: they do something", alike)
    settings = _settings(disk__paths=lab.new_folder(), disk__size="1")
    with lab.start(**options, kv_transfer_config=settings, name="adapters") as engine:
        yield from _ask_each(engine, "conditions/adapters", own, asked)
        yield Outcome("conditions/adapters: nothing left", [*clean(engine.do(asking.state))])
    # Trained again under its old name: another adapter.
    again = make_adapter(lab, "adapter-1", 3)
    request = {"tokens": tokens, "lora": ("a", 1, again)}
    with lab.start(**options, name="plain") as engine:
        own_again = engine.do(asking.ask, [request])
    with lab.start(**options, kv_transfer_config=settings, name="adapters") as engine:
        found = engine.do(asking.ask, [request])
        yield Outcome(
            "conditions/adapters: trained again, after a restart",
            [*compare(own_again, found, logprobs=False), *_unshared(found)],
        )
        found = engine.do(asking.ask, [asked["adapter b"]])
        yield Outcome(
            "conditions/adapters: the other one, after a restart",
            [*compare(own["adapter b"], found, logprobs=False), *not_less_cached(found, 320)],
        )


def make_adapter(lab: Lab, name: str, seed: int) -> str:
    """An adapter of rank 8 on the queries and values, with random weights."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((Path(lab.model) / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    sizes = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head}
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for part, size in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(8, hidden, generator=random) * 0.1
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, 8, generator=random) * 0.1
    folder = lab.folder / name
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(sizes),
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return str(folder)


quick_cases = None
"""Left to the whole gate, for the time they take."""
