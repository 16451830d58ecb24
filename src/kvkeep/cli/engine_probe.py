"""Imports torch, vLLM and the connector in a process of their own, and says what came of it.

A process of its own, because such an import can take many seconds, write to stdout and, with a
driver or a library that does not fit, end the process. No engine is started.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

PARTS = ("torch", "vllm", "connector")
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of one of `PARTS`."""

    part: str
    is_missing: bool = False
    """It is not installed."""
    error: str | None = None
    """Why it cannot be imported."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the function of its name below returns."""


def ask_engine() -> Iterator[Answer]:
    """Ask another process, part by part. One that ends early is an `error` of the rest."""
    # Given the very path of this process: not the working directory, where a checkout may lie.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from {__name__} import answer_parent; answer_parent()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        clock = threading.Timer(_TIMEOUT_S, process.kill)
        clock.daemon = True
        clock.start()
        answered = 0
        try:
            for line in process.stdout or ():
                if not line.startswith("{"):
                    continue  # what a .pth file or sitecustomize says before we are asked
                answered += 1
                yield Answer(**json.loads(line))
            status = process.wait()
        finally:
            clock.cancel()
            process.kill()
    for part in PARTS[answered:]:
        yield Answer(part, error=f"the process that imported it ended ({_ending(status)})")


def answer_parent() -> None:
    """The other process: a line of JSON for each part on what was stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for part, ask in zip(PARTS, (torch_facts, vllm_facts, connector_facts), strict=True):
        answers.write(json.dumps(_answer(part, ask)) + "\n")
        answers.flush()
    # Not through the interpreter's end, where libraries' clean-up may hang or crash.
    os._exit(0)


def _answer(part: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"part": part, "facts": ask()}
    except ModuleNotFoundError as error:
        if error.name == part:
            return {"part": part, "is_missing": True}
        return {"part": part, "error": str(error)}
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is what we were to find
        first_line = next(iter(str(error).splitlines()), "")
        return {"part": part, "error": f"{type(error).__name__}: {first_line}"}


def torch_facts() -> dict[str, Any]:
    """Version, the CUDA it was built for, and the GPUs it sees."""
    torch: Any = importlib.import_module("torch")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "gpu_name": torch.cuda.get_device_name(0) if gpus else None,
    }


def vllm_facts() -> dict[str, Any]:
    """Version."""
    vllm: Any = importlib.import_module("vllm")
    return {"version": str(vllm.__version__)}


def connector_facts() -> dict[str, Any]:
    """What this vLLM asks of a connector that ours does not have."""
    importlib.import_module("vllm")
    importlib.import_module("kvkeep.connectors.vllm.plugin").register()
    module: Any = importlib.import_module("kvkeep.connectors.vllm.connector")
    return {"lacks": sorted(module.KVKeepConnector.__abstractmethods__)}


def _ending(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
