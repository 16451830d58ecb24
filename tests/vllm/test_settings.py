"""Settings as people give them to the engine: LMCache's names, wrong values, the wrong model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import RUNNER, Run, connector, engine_environment


@pytest.fixture(scope="module")
def prompt(text_tokens: list[int]) -> dict[str, Any]:
    return {"tokens": text_tokens[:1100]}


def test_an_lmcache_users_command_runs_unchanged_in_memory(
    run: Run, prompt: dict[str, Any]
) -> None:
    result = run(
        [[prompt], [prompt]],
        connector={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        env={
            "LMCACHE_CHUNK_SIZE": "256",
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "2",
            "LMCACHE_USE_EXPERIMENTAL": "True",
        },
    )
    assert result["cache"]["name"] == "KVKeepConnector"
    assert result["cache"]["chunk_tokens"] == 256
    assert result["rounds"][1][0]["cached"] == 1024
    assert result["rounds"][1][0]["tokens"] == result["rounds"][0][0]["tokens"]
    assert result["log"].count("LMCacheConnectorV1 resolves to kvkeep") == 1
    assert 'kv_load_failure_policy is "fail"' in result["log"]


def test_an_lmcache_users_command_runs_unchanged_on_disk(
    run: Run, prompt: dict[str, Any], tmp_path: Path
) -> None:
    env = {
        "LMCACHE_CHUNK_SIZE": "256",
        "LMCACHE_LOCAL_DISK": f"file://{tmp_path}/",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "2",
        "LMCACHE_LOCAL_CPU": "False",
        "LMCACHE_EXTRA_CONFIG": "{'use_odirect': True}",
    }
    as_lmcache = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    cold = run([[prompt]], connector=as_lmcache, env=env)
    warm = run([[prompt]], connector=as_lmcache, env=env)
    assert warm["rounds"][0][0]["cached"] == 1024
    assert warm["rounds"][0][0]["tokens"] == cold["rounds"][0][0]["tokens"]
    assert "(disk 1024)" in warm["log"]
    assert len(list(tmp_path.rglob("*.kv"))) == 4


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"chunk_tokens": 200}, ["chunk_tokens=200", "128 and 256"]),
        ({"memory__sise": "1GiB"}, ["memory.sise", "memory.size"]),
        ({"memory__size": "1MiB"}, ["memory.size", "one chunk"]),
    ],
)
def test_a_wrong_setting_stops_the_start_and_says_what_is_right(
    model: str, extra: dict[str, Any], words: list[str]
) -> None:
    scenario = {"model": model, "rounds": [], "connector": connector(**extra)}
    process = subprocess.run(
        [sys.executable, str(RUNNER)],
        input=json.dumps(scenario),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=engine_environment({}),
    )
    assert process.returncode != 0
    last = process.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last


def test_roles(run: Run, prompt: dict[str, Any], tmp_path: Path) -> None:
    disk = {"disk__paths": str(tmp_path), "disk__size": "1GiB", "memory__size": "1GiB"}
    writer = run([[prompt], [prompt]], connector=connector(role="kv_producer", **disk))
    assert [batch[0]["cached"] for batch in writer["rounds"]] == [0, 0]
    files = sorted(tmp_path.rglob("*.kv"))
    assert len(files) == 8
    other = {"tokens": prompt["tokens"][::-1]}
    reader = run([[prompt], [other]], connector=connector(role="kv_consumer", **disk))
    assert [batch[0]["cached"] for batch in reader["rounds"]] == [1024, 0]
    assert sorted(tmp_path.rglob("*.kv")) == files
