"""Real engines, started fast: vLLM is imported once, and every engine is forked from there.

An engine still has a process of its own, as in production: vLLM does not unload cleanly, and both
a restart and a kill are the point of many tests.

    with EngineHost(log_folder) as host, host.start(model=..., enforce_eager=True) as engine:
        answers = engine.do(asking.ask, [{"tokens": [...]}])
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from typing_extensions import Self

START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 300.0

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    "PYTHONUNBUFFERED": "1",
}
DEFAULTS: dict[str, Any] = {
    # On a CPU, bfloat16 rounds differently where a prompt is computed in other pieces.
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 1024,
    "disable_log_stats": True,
}


class EngineDied(RuntimeError):
    """The engine's process ended, or said nothing for too long; the end of its log is included."""


class EngineError(RuntimeError):
    """What was asked of the engine raised there."""


class EngineHost:
    """Forks engines. One for many: the first start imports vLLM, which takes ten seconds."""

    def __init__(self, log_folder: Path) -> None:
        self._logs = log_folder
        self._context = multiprocessing.get_context("forkserver")
        self._count = 0

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # Where this is set, every engine compiles all of vLLM's modules anew.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        self._context.set_forkserver_preload([f"{__package__}.preload"])
        return self

    def __exit__(self, *_: object) -> None:
        """The fork server ends with this process."""

    def start(
        self, *, env: dict[str, str] | None = None, name: str = "engine", **options: Any
    ) -> Engine:
        """An engine of `vllm.LLM(**DEFAULTS, **options)`, ready. Raises `EngineDied`."""
        self._count += 1
        log = self._logs / f"{self._count:03d}-{name}.log"
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_run_engine, args=(theirs, {**DEFAULTS, **options}, env or {}, str(log))
        )
        process.start()
        theirs.close()
        engine = Engine(process, ours, log)
        engine.wait_until_ready()
        return engine


class Engine:
    """A running engine, as its host sees it."""

    def __init__(self, process: Any, connection: Connection, log: Path) -> None:
        self._process = process
        self._connection = connection
        self.log_path = log

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """All the engine has logged so far."""
        return self.log_path.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        self._receive(START_TIMEOUT_S)

    def do(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(llm, *args, **kwargs)`, run in the engine's process. A module's function."""
        self.send(function, *args, **kwargs)
        return self.receive()

    def send(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Like `do`, but does not wait: `receive` gets the result."""
        try:
            self._connection.send((function, args, kwargs))
        except OSError as error:
            raise self._died(repr(error)) from error

    def receive(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """The result of the last `send`."""
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                raise self._died(f"no answer for {timeout_s:.0f} s")
            succeeded, result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._died(repr(error)) from error
        if not succeeded:
            raise EngineError(result)
        return result

    def _died(self, why: str) -> EngineDied:
        self._process.join(10)  # so that the log has its end
        return EngineDied(f"{why}; its log ends:\n{self.log[-6000:]}")

    def kill(self) -> None:
        """SIGKILL, as when the machine's memory runs out."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def terminate(self) -> None:
        """SIGTERM, as an orchestrator sends it; returns when the process has ended."""
        self._process.terminate()
        self._process.join(30)
        self.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    def close(self) -> None:
        """Shut the engine down in good order."""
        if not self._connection.closed:
            try:
                self._connection.send(None)
                self._process.join(60)
            except OSError:
                pass
            self._connection.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run_engine(
    connection: Connection, options: dict[str, Any], env: dict[str, str], log: str
) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.update(env)
    try:
        from vllm import LLM

        llm = LLM(**options)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise
    connection.send((True, None))
    while True:
        try:
            job = connection.recv()
        except EOFError:
            break
        if job is None:
            break
        function, args, kwargs = job
        try:
            result = (True, function(llm, *args, **kwargs))
        except Exception:
            result = (False, traceback.format_exc())
        connection.send(result)
    llm.llm_engine.engine_core.shutdown()
