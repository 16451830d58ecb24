"""Over HTTP, as people run it: `vllm serve`, whose workers are processes of their own."""

from __future__ import annotations

import http.client
import json
import re
from pathlib import Path

from examples.demo.client import Client
from examples.demo.engine import HOST, Engine
from examples.demo.progress import Progress
from tests.vllm.conftest import connector

PROMPT = "Count slowly: " + ", ".join(str(number) for number in range(400))


def metrics_of(port: int) -> dict[str, float]:
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    connection.request("GET", "/metrics")
    with connection.getresponse() as response:
        text = response.read().decode()
    connection.close()
    lines = re.findall(r'^(kvkeep:\w+)\{(?:[^}]*tier="(\w+)")?[^}]*\} (\S+)$', text, re.MULTILINE)
    return {f"{tier}/{name}" if tier else name: float(value) for name, tier, value in lines}


def abort_early(port: int, model: str) -> None:
    """Close the connection after the first token; the engine aborts the request."""
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    body = {"model": model, "prompt": PROMPT[::-1], "max_tokens": 400, "stream": True}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    with connection.getresponse() as response:
        response.readline()
    connection.close()


def test_serve_hits_from_memory_and_after_a_restart_from_disk(model: str, tmp_path: Path) -> None:
    kept = connector(memory__size="1GiB", disk__paths=str(tmp_path / "kv"), disk__size="2GiB")
    arguments = [
        "--dtype=float32",
        "--no-enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--kv-transfer-config",
        json.dumps(kept),
    ]

    def serve(number: int) -> Engine:
        log = tmp_path / f"engine-{number}.log"
        return Engine(Path(model), log, Progress(), arguments=arguments)

    with serve(1) as engine:
        client = Client(HOST, engine.port, model)
        cold = client.ask(PROMPT, 12)
        memory = client.ask(PROMPT, 12)
        abort_early(engine.port, model)
        again = client.ask(PROMPT, 12)
        figures = metrics_of(engine.port)
        log = engine.log.read_text()
    chunks = cold.prompt_tokens // 128
    assert chunks >= 5
    assert cold.hit_tokens == 0
    assert memory.hit_tokens == again.hit_tokens == chunks * 128
    assert cold.token_ids == memory.token_ids == again.token_ids
    assert f"(memory {chunks * 128})" in log
    assert figures["memory/kvkeep:hit_tokens_total"] == 2 * chunks * 128
    assert figures["kvkeep:stored_chunks_total"] >= chunks
    assert figures["kvkeep:missed_tokens_total"] >= cold.prompt_tokens
    assert figures["memory/kvkeep:used_bytes"] > 0
    assert figures["memory/kvkeep:cap_bytes"] <= 1 << 30
    assert figures["disk/kvkeep:breaker_open"] == 0
    with serve(2) as engine:
        client = Client(HOST, engine.port, model)
        disk = client.ask(PROMPT, 12)
        figures = metrics_of(engine.port)
    assert disk.hit_tokens == chunks * 128
    assert disk.token_ids == cold.token_ids
    assert figures["disk/kvkeep:hit_tokens_total"] == chunks * 128
    assert figures["disk/kvkeep:loaded_bytes_total"] > 0
