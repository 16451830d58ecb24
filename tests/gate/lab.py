"""What every case of the gate works with: a host of engines, a model, texts, and comparing.

A case asks an engine with the cache and one without, and yields an `Outcome`. Computation on a
CPU depends on how a prompt is cut into steps and on what else is in the batch, so a case compares
like with like: the engine without the cache is asked in the same way, and where the cached answer
starts from a prefix, with the engine's own prefix cache at the same length.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.vllm import asking
from tests.vllm.host import Engine, EngineHost

Answer = dict[str, Any]
Request = dict[str, Any]


class Outcome(NamedTuple):
    """One case: what it was, and how its answers differ from those without a cache."""

    name: str
    differences: list[str]
    """Empty where all is as it should be; else one line for each difference."""


Cases = Callable[["Lab"], Iterator[Outcome]]
"""A group of cases; `tests/gate/features/` has one file for each."""


class Lab:
    """Belongs to one run of the gate."""

    def __init__(self, host: EngineHost, model: str, folder: Path, tokens: Sequence[int]) -> None:
        """`tokens`: a long real text. `folder`: room for what is kept on disk."""
        self.host = host
        self.model = model
        self.folder = folder
        self._tokens = tokens
        self._folders = itertools.count()
        self._plain: dict[str, list[list[Answer]]] = {}

    def text(self, number: int, num_tokens: int) -> list[int]:
        """A piece of real text, of at most 8,000 tokens. One number is one piece, however long."""
        start = number * 2000 % max(1, len(self._tokens) - 8000)
        return list(self._tokens[start : start + num_tokens])

    def new_folder(self) -> str:
        """An empty folder of its own."""
        path = self.folder / f"kept-{next(self._folders)}"
        path.mkdir(parents=True)
        return str(path)

    def remove_folders(self) -> None:
        """Give back the room of all that was kept on disk so far."""
        for path in self.folder.glob("kept-*"):
            shutil.rmtree(path, ignore_errors=True)

    def start(self, **options: Any) -> Engine:
        """An engine of the model with these options of `vllm.LLM`."""
        return self.host.start(**{"model": self.model, **options})

    def plain(self, rounds: Sequence[Sequence[Request]], **options: Any) -> list[list[Answer]]:
        """The answers of an engine without kvkeep, round by round; asked once for equal questions.

        Between rounds nothing is reset: with `enable_prefix_caching` a later round starts from
        what an earlier one left.
        """
        name = json.dumps([rounds, options], sort_keys=True, default=repr)
        if name not in self._plain:
            with self.start(name="plain", **options) as engine:
                self._plain[name] = [engine.do(asking.ask, list(batch)) for batch in rounds]
        return self._plain[name]


def kvkeep(**settings: Any) -> Any:
    """The one flag, as `vllm.LLM` takes it; `memory__size="1GiB"` stands for memory.size.

    `role` and `policy` are vLLM's `kv_role` and `kv_load_failure_policy`.
    """
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="KVKeepConnector",
        kv_role=settings.pop("role", "kv_both"),
        kv_load_failure_policy=settings.pop("policy", "recompute"),
        kv_connector_extra_config={
            name.replace("__", "."): value for name, value in settings.items()
        },
    )


def compare(
    expected: Sequence[Answer], found: Sequence[Answer], *, logprobs: bool
) -> Iterator[str]:
    """Every difference in tokens, and with `logprobs` in their logprobs, bit for bit."""
    if len(expected) != len(found):
        yield f"{len(found)} answers to {len(expected)} requests"
    for number, (one, other) in enumerate(zip(expected, found, strict=False)):
        pairs = zip([one, *one["others"]], [other, *other["others"]], strict=True)
        for choice, (before, after) in enumerate(pairs):
            where = f"request {number} choice {choice}"
            if before["tokens"] != after["tokens"]:
                yield f"{where}: tokens {before['tokens']} became {after['tokens']}"
            elif logprobs and before["logprobs"] != after["logprobs"]:
                yield f"{where}: logprobs {before['logprobs']} became {after['logprobs']}"


def not_less_cached(found: Sequence[Answer], num_tokens: int) -> Iterator[str]:
    """A case that hits nothing shows nothing: each answer must have started from `num_tokens`."""
    for number, answer in enumerate(found):
        if answer["cached"] < num_tokens:
            yield f"request {number}: {answer['cached']} tokens from a cache, not {num_tokens}"


def clean(state: dict[str, Any] | None) -> Iterator[str]:
    """After all requests have ended nothing is held but by memory, and kvkeep is on."""
    if state is None or "owners" not in state:
        yield f"kvkeep is not on: {state}"
        return
    if state["off_because"]:
        yield f"kvkeep went off: {state['off_because']}"
    if set(state["owners"]) - {"memory"} or state["tracked"]:
        yield f"left over: {state['owners']}, {state['tracked']} requests"
