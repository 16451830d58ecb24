"""`vllm bench serve` twice with one seed, with the settings of somebody who runs LMCache today.

    python -m examples.serve_bench            # kept in memory
    python -m examples.serve_bench --disk     # kept on disk

The server is started with LMCache's own environment and connector name; where LMCache is not
installed, kvkeep answers to both. The second run sends the same prompts again, so its time to
first token is that of hits. The engine's own prefix cache is off, and both serving tables are
vLLM's. Run with `.venv/bin/python` in the checkout, after `make model`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from .demo.engine import ENGINE_ENVIRONMENT, HOST, Engine, EngineFailedError
from .demo.progress import Progress

TRANSFER = {
    "kv_connector": "LMCacheConnectorV1",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def lmcache_environment(folder: Path | None) -> dict[str, str]:
    """What an LMCache user has set: memory only, or disk only where a folder is given."""
    if folder is None:
        return {
            "LMCACHE_CHUNK_SIZE": "256",
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "2",
        }
    return {
        "LMCACHE_CHUNK_SIZE": "256",
        "LMCACHE_LOCAL_CPU": "False",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "2",
        "LMCACHE_LOCAL_DISK": f"file://{folder.absolute()}/",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "4",
        "LMCACHE_EXTRA_CONFIG": "{'use_odirect': True}",
    }


def bench_command(options: argparse.Namespace, port: int) -> list[str]:
    sizes = {
        "--random-input-len": options.input_tokens,
        "--random-output-len": options.output_tokens,
        "--num-prompts": options.prompts,
        "--max-concurrency": 2,
        "--seed": 7,
    }
    return [
        str(Path(sys.executable).with_name("vllm")),
        *("bench", "serve", "--backend", "openai", "--dataset-name", "random", "--ignore-eos"),
        *("--model", str(options.model), "--host", HOST, "--port", str(port)),
        *(text for name, value in sizes.items() for text in (name, str(value))),
    ]


def run_bench(options: argparse.Namespace, port: int) -> float:
    """Print vLLM's serving table; its mean time to first token in ms."""
    # Without a terminal the progress bar would only fill the page, so the table alone is shown.
    done = subprocess.run(
        bench_command(options, port),
        env={**os.environ, **ENGINE_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"^=+ Serving Benchmark Result =+$.*", done.stdout, re.MULTILINE | re.DOTALL)
    mean = re.search(r"Mean TTFT \(ms\):\s+([\d.]+)", done.stdout)
    if done.returncode != 0 or found is None or mean is None:
        raise RuntimeError(
            f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    print(found.group().strip(), flush=True)
    return float(mean.group(1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.serve_bench", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".demo/SmolLM2-135M-Instruct"))
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="for the log and the KV")
    parser.add_argument("--disk", action="store_true", help="keep on disk instead of in memory")
    parser.add_argument("--connector", choices=("lmcache", "none"), default="lmcache")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--input-tokens", type=int, default=2048)
    parser.add_argument("--output-tokens", type=int, default=16)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    # As an exception, so that the server and the client are stopped on the way out.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    progress = Progress()
    folder = options.folder / "serve-bench-kv" if options.disk else None
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    extra = ["--no-enable-prefix-caching"]
    environment: dict[str, str] = {}
    if options.connector == "lmcache":
        environment = lmcache_environment(folder)
        extra += ["--kv-transfer-config", json.dumps(TRANSFER)]
        for name, value in environment.items():
            print(f"  {name}={value}")
        print(f"  --kv-transfer-config '{json.dumps(TRANSFER)}'", flush=True)
    log = options.folder / "serve-bench.log"
    try:
        with Engine(
            options.model, log, progress, arguments=extra, environment=environment
        ) as engine:
            progress.step("first run: every prompt is new")
            first = run_bench(options, engine.port)
            progress.step("second run: the same prompts")
            second = run_bench(options, engine.port)
    except KeyboardInterrupt:
        return 130
    except (EngineFailedError, OSError, RuntimeError) as error:
        print(f"serve_bench failed: {error}", file=sys.stderr)
        return 1
    print(f"serve_bench: mean_ttft_first={first:.1f}ms mean_ttft_second={second:.1f}ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
