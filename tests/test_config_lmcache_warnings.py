"""LMCache's names that kvkeep does not have: warnings, never errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.config import load_config
from kvkeep.config_lmcache_keys import OLD_NAMES, OTHER_KEYS


@pytest.mark.parametrize("key", sorted({*OTHER_KEYS, *OLD_NAMES}))
def test_every_key_that_is_not_here_is_a_warning(key: str) -> None:
    for loaded, origin in (
        (load_config(env={f"LMCACHE_{key.upper()}": "1"}), f"LMCACHE_{key.upper()}"),
        (
            load_config(extra={f"lmcache.{key}": 1}, env={}),
            f"kv_connector_extra_config: lmcache.{key}",
        ),
    ):
        answer = OTHER_KEYS.get(key) or OTHER_KEYS.get(OLD_NAMES.get(key, ""), "")
        expected = f"{origin}: kvkeep has no such setting{': ' + answer if answer else ''}"
        assert loaded.warnings == (expected,)
        assert loaded.notes == ()
        assert set(loaded.sources.values()) == {"default"}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("LMCACHE_CHUNKSIZE", "LMCACHE_CHUNK_SIZE"), ("LMCACHE_LOCAL_DISC", "LMCACHE_LOCAL_DISK")],
)
def test_an_unknown_variable_is_a_warning_with_the_nearest_name(name: str, nearest: str) -> None:
    loaded = load_config(env={name: "1"})
    assert loaded.warnings == (
        f"{name}: is not a name that LMCache is known to have; did you mean {nearest}?",
    )


def test_an_unknown_key_in_file_or_extra_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "lm.yaml"
    path.write_text("chunk_sise: 1\n")
    loaded = load_config(extra={"lmcache.chunk_sise": 1}, env={"LMCACHE_CONFIG_FILE": str(path)})
    assert len(loaded.warnings) == 2
    assert all("did you mean chunk_size?" in line for line in loaded.warnings)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LMCACHE_FORCE_SKIP_SAVE", "use kv_role kv_consumer"),
        ("LMCACHE_EC_LOCAL_CPU", "only KV is kept"),
        ("LMCACHE_COORDINATOR_URL", "engines share through one remote.url"),
        ("LMCACHE_RESP_THREADS", "kvkeep has no such setting"),
        ("LMCACHE_MQ_TIMEOUT", "kvkeep has no such setting"),
    ],
)
def test_other_variables_of_lmcache(name: str, words: str) -> None:
    (warning,) = load_config(env={name: "1"}).warnings
    assert warning.startswith(f"{name}: ")
    assert words in warning


def test_harmless_names_are_left_alone() -> None:
    env = {
        "LMCACHE_LOG_LEVEL": "DEBUG",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_CONFIG_FILE": "",
        "PYTHONHASHSEED": "0",
    }
    loaded = load_config(env=env)
    assert loaded.warnings == ()
    assert loaded.notes == ()


def test_what_vllms_lmcache_connector_reads_is_a_warning() -> None:
    extra = {"discard_partial_chunks": True, "use_native": True, "lmcache.mp.port": 5555}
    loaded = load_config(extra=extra, env={})
    assert loaded.warnings == (
        "kv_connector_extra_config: discard_partial_chunks: kvkeep has no such setting: "
        "see save_unfull_chunk",
        "kv_connector_extra_config: use_native: kvkeep has no such setting",
        "kv_connector_extra_config: lmcache.mp.port: kvkeep has no such setting: "
        "there is no LMCache server here",
    )


def test_no_value_of_a_key_that_is_not_here_is_printed() -> None:
    env = {"LMCACHE_AUDIT_ACTUAL_REMOTE_URL": "redis://:hunter2@h", "LMCACHE_NONSENSE": "hunter2"}
    assert "hunter2" not in str(load_config(env=env))
