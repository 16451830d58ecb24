"""A real engine and a real model. Both are set up by `make test`; without them these skip."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.host import EngineHost

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("runner.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def model() -> str:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; `make test` installs it")
    folder = Path(os.environ.get("TEST_MODEL", ROOT / ".demo" / "SmolLM2-135M-Instruct"))
    if not (folder / "config.json").exists():
        pytest.skip(f"no model in {folder}; `make test` makes it, or set TEST_MODEL")
    return str(folder)


@pytest.fixture(scope="session")
def host(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    """Starts engines from a process that has imported vLLM already."""
    with EngineHost(tmp_path_factory.mktemp("engines")) as host:
        yield host


@pytest.fixture(scope="session")
def text_tokens(model: str) -> list[int]:
    """Token ids of a long real text: Python's language reference."""
    import pydoc_data.topics

    from tokenizers import Tokenizer

    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return Tokenizer.from_file(f"{model}/tokenizer.json").encode(text[:200_000]).ids


def engine_environment(extra: dict[str, str]) -> dict[str, str]:
    """This process's environment for an engine's, and `extra`."""
    environment = {**os.environ, **extra}
    # Where this is set, every engine compiles all of vLLM's modules anew.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(model: str) -> Run:
    """Run a scenario on an engine of its own; what `runner.py` found."""

    def run(
        rounds: list[Any], env: dict[str, str] | None = None, **scenario: Any
    ) -> dict[str, Any]:
        process = subprocess.run(
            [sys.executable, str(RUNNER)],
            input=json.dumps({"model": model, "rounds": rounds, **scenario}),
            capture_output=True,
            text=True,
            timeout=600,
            env=engine_environment(env or {}),
            check=False,
        )
        lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            pytest.fail(f"the engine failed:\n{process.stdout[-6000:]}\n{process.stderr[-6000:]}")
        result = json.loads(lines[0].removeprefix("RESULT "))
        result["log"] = process.stdout + process.stderr
        return result

    return run


def connector(name: str = "KVKeepConnector", role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The one flag, as vLLM's `KVTransferConfig` takes it."""
    return {
        "kv_connector": name,
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            key.replace("__", "."): value for key, value in extra.items()
        },
    }
