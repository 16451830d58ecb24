"""One `vllm serve` process on the loopback address, that never outlives this one."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from typing_extensions import Self

from .progress import Progress

HOST = "127.0.0.1"
# `vllm serve` needs about 40 s on two idle cores, most of it for imports in three processes.
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
# Before it answers a server has nothing to save, and is deaf to signals for much of the time.
STOP_STARTING_TIMEOUT_S = 3.0
LOG_TAIL_LINES = 40
PR_SET_PDEATHSIG = 1

# What a start without network, without reports to anyone and with little memory needs.
ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB of the engine's own KV cache
}
# Eager mode: compiling takes longer than the whole demo.
ENGINE_ARGUMENTS = ("--host", HOST, "--enforce-eager", "--max-model-len", "8192")


class EngineFailedError(Exception):
    """The server ended or did not answer; the text ends with the tail of its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Engine:
    """Use with `with`: inside, the server answers; afterwards none of its processes is left.

    The server gets a session of its own, so that Ctrl-C reaches only this process, which then
    stops the whole group in order. Should this process be killed, the kernel ends the server.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        progress: Progress,
        *,
        port: int = 0,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_port()
        self.log = log
        self._progress = progress
        command = Path(sys.executable).with_name("vllm")
        self._command = [str(command), "serve", str(model), "--port", str(self.port)]
        self._command += [*ENGINE_ARGUMENTS, *arguments]
        self._environment = {**os.environ, **ENGINE_ENVIRONMENT, **(environment or {})}
        # Three processes import vLLM: where this is set, each compiles all of its modules anew.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = False
        self._log_file: TextIO | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_file = self.log.open("w")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
            preexec_fn=_end_with_parent(os.getpid()),  # noqa: PLW1509 - no threads here
        )
        text = f"starting vllm serve on {HOST}:{self.port} (log: {self.log})"
        try:
            self._progress.wait_for(text, self._healthy, START_TIMEOUT_S)
        except TimeoutError as error:
            raise EngineFailedError(f"{error}\n{self.log_tail()}") from error
        self._answers = True

    def _healthy(self) -> bool | None:
        """True once the server answers, None while it does not yet."""
        self.check()
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return True if connection.getresponse().status == http.HTTPStatus.OK else None
        except OSError:
            return None
        finally:
            connection.close()

    def check(self) -> None:
        """Raise where the server has ended by itself."""
        if self._process is not None and (status := self._process.poll()) is not None:
            raise EngineFailedError(f"vllm serve ended, status {status}\n{self.log_tail()}")

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"--- last lines of {self.log} ---", *lines])

    def stop(self) -> None:
        """End the server politely, then whatever is left of its process group."""
        if self._process is None:
            return
        # A second Ctrl-C must not leave the engine half stopped.
        with _signals_ignored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process, self._process = self._process, None
            self._progress.step("stopping vllm serve")
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_TIMEOUT_S if self._answers else STOP_STARTING_TIMEOUT_S)
            # The engine core is a child of the server and may need a moment more.
            deadline = time.monotonic() + 5
            while _group_members(process.pid) and time.monotonic() < deadline:
                time.sleep(0.1)
            if _group_members(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if self._log_file is not None:
                self._log_file.close()


def _end_with_parent(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None)  # loaded here: little is safe between fork and exec

    def in_child() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return in_child


def _group_members(group: int) -> list[int]:
    """The living processes of a process group (zombies wait only for their parent to look)."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # "pid (name) state ppid pgrp ...", and the name may hold blanks and brackets
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                members.append(int(stat.parent.name))
    return members


class _signals_ignored(contextlib.ContextDecorator):  # noqa: N801 - reads as a function
    def __init__(self, *numbers: signal.Signals) -> None:
        self._numbers = numbers

    def __enter__(self) -> None:
        self._previous = [signal.signal(number, signal.SIG_IGN) for number in self._numbers]

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(self._numbers, self._previous, strict=True):
            signal.signal(number, handler)
