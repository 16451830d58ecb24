"""Ask long questions cold, from kvkeep's memory and, after a restart, from kvkeep's disk.

    make demo

The engine's own prefix cache is off, so nothing but kvkeep can make a repeated prompt faster. The
model runs in float32: a prompt computed in one piece is rounded differently than the same prompt
computed from a kept prefix on. With vLLM's own prefix cache, and none of ours, that alone changed
2 of 9 answers of this model in bfloat16, and none in float32, where answers can therefore be
compared token by token.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import report
from .client import Answer, Client
from .documents import QUESTIONS, fitted, prompts
from .engine import HOST, Engine, EngineFailedError
from .progress import Progress

MODEL_NAME = "SmolLM2-135M-Instruct"  # as scripts/make_model.py makes it
MODEL_CONTEXT_TOKENS = 8192
WARM_UP_TOKENS = 2300  # more than one prefill step of the engine (2048), so that a full one has run
MAX_SETTLE_S = 20.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where all is kept")
    parser.add_argument("--model", type=Path, help=f"default: FOLDER/{MODEL_NAME}")
    parser.add_argument(
        "--connector", choices=("kvkeep", "none"), default="kvkeep", help="none: vLLM by itself"
    )
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--tokens", type=int, default=4200, help="shortest prompt")
    parser.add_argument("--questions", type=int, default=3, choices=range(1, len(QUESTIONS) + 1))
    parser.add_argument("--max-tokens", type=int, default=28, help="length of an answer")
    options = parser.parse_args()
    longest = MODEL_CONTEXT_TOKENS - options.max_tokens - 100
    if not 1 <= options.tokens <= longest:
        parser.error(f"--tokens must lie between 1 and {longest}: the model's context ends there")
    return options


class Demo:
    """The three passes over one set of questions."""

    def __init__(self, options: argparse.Namespace, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        self._model: Path = options.model or options.folder / MODEL_NAME
        self._disk: Path = options.folder / "kv"
        self._starts = 0
        self._prompts: list[tuple[str, str]] = []

    def run(self) -> list[report.Result]:
        # What an earlier demo kept would make the first pass warm.
        shutil.rmtree(self._disk, ignore_errors=True)
        with self._engine() as engine:
            client = self._client(engine)
            self._progress.step("cutting the documents to length with the server's tokenizer")
            self._prompts = prompts(
                self._options.questions, self._options.tokens, client.count_tokens
            )
            self._warm_up(client)
            cold = self._ask_all(client, "cold")
            memory = self._ask_all(client, "memory")
            self._wait_for_disk()
        self._progress.step("the engine is gone, and with it all that was in memory")
        with self._engine() as engine:
            client = self._client(engine)
            self._warm_up(client)
            disk = self._ask_all(client, "disk")
        questions = [question for question, _ in self._prompts]
        return [report.Result(*row) for row in zip(questions, cold, memory, disk, strict=True)]

    def _engine(self) -> Engine:
        self._starts += 1
        extra = [
            "--dtype",
            "float32",
            "--no-enable-prefix-caching",
            "--enable-prompt-tokens-details",
        ]
        if self._options.connector == "kvkeep":
            config = {
                "kv_connector": "KVKeepConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "memory.size": "2GiB",
                    "disk.paths": str(self._disk.absolute()),
                    "disk.size": "4GiB",
                },
            }
            extra += ["--kv-transfer-config", json.dumps(config)]
        log = self._options.folder / f"engine-{self._starts}.log"
        port = self._options.port
        return Engine(self._model, log, self._progress, port=port, arguments=extra)

    def _client(self, engine: Engine) -> Client:
        return Client(HOST, engine.port, str(self._model))

    def _warm_up(self, client: Client) -> None:
        """Let the costs of a first use fall outside the passes: one answer computed, one kept."""
        self._progress.step("a warm-up request, asked twice")
        prompt = fitted("lambda", "What is lambda?", WARM_UP_TOKENS, client.count_tokens)
        for _ in range(2):
            client.ask(prompt, max_tokens=4)

    def _ask_all(self, client: Client, name: str) -> list[Answer]:
        answers: list[Answer] = []
        for number, (question, prompt) in enumerate(self._prompts, start=1):
            answer = client.ask(prompt, self._options.max_tokens)
            answers.append(answer)
            self._progress.step(
                f"{name:6} {number}/{len(self._prompts)}: first token after {answer.ttft_s:.3f} s, "
                f"{answer.hit_tokens} of {answer.prompt_tokens} tokens from a cache"
            )
            if name == "cold":
                print(
                    f"         Q: {question}\n         A: {' '.join(answer.text.split())}",
                    flush=True,
                )
        return answers

    def _wait_for_disk(self) -> None:
        """Wait until kvkeep's folder stops growing: it writes behind the answers."""
        if self._options.connector == "none":
            return
        sizes = [-1]
        deadline = time.monotonic() + MAX_SETTLE_S

        def settled() -> int | None:
            time.sleep(0.8)
            files = [path for path in self._disk.rglob("*") if path.is_file()]
            sizes.append(sum(path.stat().st_size for path in files if path.exists()))
            done = sizes[-1] == sizes[-2] or time.monotonic() > deadline
            return sizes[-1] if done else None

        size = self._progress.wait_for("waiting for the disk", settled, 2 * MAX_SETTLE_S)
        self._progress.step(f"kvkeep keeps {size / 1e6:.0f} MB in {self._disk}")


def show(results: Sequence[report.Result], options: argparse.Namespace, progress: Progress) -> int:
    summary = report.Summary.of(results)
    drawing = options.folder / "ttft.svg"
    drawing.write_text(
        report.svg(
            summary,
            f"Time to first token, {summary.tokens} prompt tokens",
            "SmolLM2-135M-Instruct, float32, vLLM on this machine's CPU, its own prefix cache off",
        )
    )
    print(f"\n{report.table(results)}\n\n{report.bars(summary)}\n")
    if not summary.identical:
        print(f"{report.differences(results)}\n")
    progress.step(f"done; drawing: {drawing}, engine logs: {options.folder}/engine-*.log")
    failed = not summary.identical
    if options.connector == "kvkeep" and not all(
        result.memory.hit_tokens and result.disk.hit_tokens for result in results
    ):
        print("demo failed: some prompts were computed again although kvkeep should have had them")
        failed = True
    print(summary.line(), flush=True)
    return int(failed)


def end(number: int, _frame: object) -> None:
    # As an exception, so that every `with` on the way out stops what it started.
    sys.exit(128 + number)


def main() -> int:
    options = arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    # Shells start background jobs with this signal ignored; it must end the demo there too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options.folder.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    demo = Demo(options, progress)
    print(
        "vLLM's own prefix cache is off: only kvkeep can make a repeated prompt faster.", flush=True
    )
    try:
        results = demo.run()
    except KeyboardInterrupt:
        print("\ndemo: interrupted; nothing is left running", file=sys.stderr)
        return 130
    except (EngineFailedError, OSError, RuntimeError, TimeoutError) as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    return show(results, options, progress)


if __name__ == "__main__":
    sys.exit(main())
