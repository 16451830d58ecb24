"""Lines that say what is going on, each with the seconds since the start."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

SPINNER = "|/-\\"
# Where the output is a file or a pipe, a line this often shows that the demo still works.
HEARTBEAT_S = 10.0

Value = TypeVar("Value")


class Progress:
    """Prints steps to standard output; a moving mark only where a person is looking at it."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._is_terminal = sys.stdout.isatty()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def step(self, text: str) -> None:
        self._wipe()
        print(f"[{self.elapsed_s():5.1f}s] {text}", flush=True)

    def wait_for(self, text: str, poll: Callable[[], Value | None], timeout_s: float) -> Value:
        """Call `poll` until it gives something; raise `TimeoutError` after `timeout_s`."""
        self.step(f"{text} ...")
        started = last_line = time.monotonic()
        tick = 0
        while (value := poll()) is None:
            now = time.monotonic()
            if now - started > timeout_s:
                raise TimeoutError(f"{text}: not done after {timeout_s:.0f} s")
            if self._is_terminal:
                mark = SPINNER[tick % len(SPINNER)]
                print(f"\r{mark} {now - started:4.0f}s", end="", flush=True)
            elif now - last_line >= HEARTBEAT_S:
                last_line = now
                self.step(f"... still waiting ({now - started:.0f} s)")
            tick += 1
            time.sleep(0.2)
        self._wipe()
        return value

    def _wipe(self) -> None:
        if self._is_terminal:
            print("\r\033[K", end="")
