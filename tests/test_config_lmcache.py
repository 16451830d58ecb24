"""LMCache's names that are read, and what is said about each."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.config import load_config
from kvkeep.config_lmcache import _RENAMED
from kvkeep.config_lmcache_keys import READ_KEYS
from kvkeep.errors import ConfigError

GIB = 1024**3


def test_the_published_memory_command() -> None:
    loaded = load_config(
        env={
            "LMCACHE_USE_EXPERIMENTAL": "True",
            "LMCACHE_CHUNK_SIZE": "256",
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "50",
        }
    )
    assert loaded.config.chunk_tokens == 256
    assert loaded.config.memory.enabled
    assert loaded.config.memory.size_bytes == 50 * GIB
    assert loaded.warnings == ()
    assert loaded.notes == (
        "LMCACHE_CHUNK_SIZE=256 read as chunk_tokens=256",
        "LMCACHE_LOCAL_CPU=True read as memory.enabled=true",
        "LMCACHE_MAX_LOCAL_CPU_SIZE=50 read as memory.size=50GiB; this is for the whole node, "
        "where LMCache's is for each rank",
        "LMCACHE_USE_EXPERIMENTAL=True accepted, it has no meaning here",
    )


def test_the_published_disk_command() -> None:
    loaded = load_config(
        env={
            "LMCACHE_CHUNK_SIZE": "256",
            "LMCACHE_LOCAL_DISK": "file:///mnt/kv/",
            "LMCACHE_MAX_LOCAL_DISK_SIZE": "50",
            "LMCACHE_LOCAL_CPU": "False",
            "LMCACHE_EXTRA_CONFIG": "{'use_odirect': True}",
        }
    )
    config = loaded.config
    assert config.disk.paths == ("/mnt/kv/",)
    assert config.disk.size_bytes == 50 * GIB
    assert config.disk.odirect == "on"
    assert not config.memory.enabled
    assert loaded.warnings == ()
    assert "LMCACHE_EXTRA_CONFIG[use_odirect]=True read as disk.odirect=on" in loaded.notes
    assert any("for the whole node" in note and "disk.size" in note for note in loaded.notes)


@pytest.mark.parametrize(
    "url",
    ["redis://host:6379", "redis-sentinel://h:26379,h:26380", "lm://host:65432"],
)
@pytest.mark.parametrize(("serde", "codec"), [("naive", "raw"), ("cachegen", "cachegen")])
def test_the_published_remote_commands(url: str, serde: str, codec: str) -> None:
    env = {"LMCACHE_REMOTE_URL": url, "LMCACHE_REMOTE_SERDE": serde}
    loaded = load_config(env=env)
    assert loaded.config.remote.url == url
    assert loaded.config.remote.codec == codec
    assert loaded.notes == (
        f"LMCACHE_REMOTE_SERDE={serde} read as remote.codec={codec}",
        f"LMCACHE_REMOTE_URL={url} read as remote.url={url}",
    )


def test_a_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text(
        "chunk_size: 256\nlocal_cpu: true\nmax_local_cpu_size: 50\nlocal_disk: null\n"
        "max_local_disk_size: 0\nremote_url: null\nremote_serde: 'naive'\ncache_policy: LFU\n"
        "save_decode_cache: True\nsave_unfull_chunk: True\nmin_retrieve_tokens: 64\n"
        "extra_config: {use_odirect: false}\n"
    )
    loaded = load_config(env={"LMCACHE_CONFIG_FILE": str(path)})
    config = loaded.config
    assert (config.chunk_tokens, config.min_retrieve_tokens) == (256, 64)
    assert config.save_decode_cache
    assert config.save_unfull_chunk
    assert config.memory.policy == config.disk.policy == "lfu"
    assert config.disk.odirect == "auto"
    assert config.disk.paths == ()
    assert config.remote.codec == "raw"
    assert loaded.warnings == ()
    line = f"{path}: cache_policy=LFU read as memory.policy=lfu, disk.policy=lfu"
    assert line in loaded.notes
    assert loaded.sources["disk.policy"] == f"{path}: cache_policy"


@pytest.mark.parametrize("policy", ["LRU", "LFU", "FIFO", "MRU", "lru"])
def test_policies(policy: str) -> None:
    config = load_config(env={"LMCACHE_CACHE_POLICY": policy}).config
    assert config.memory.policy == config.disk.policy == policy.lower()


def test_an_unknown_policy() -> None:
    with pytest.raises(ConfigError, match=r"'lur' is unknown; did you mean lru\? \(from LMCACHE_"):
        load_config(env={"LMCACHE_CACHE_POLICY": "LUR"})


def test_an_unknown_serde() -> None:
    with pytest.raises(
        ConfigError, match=r"remote\.codec: 'kivi' is not read; known are cachegen, "
    ):
        load_config(env={"LMCACHE_REMOTE_SERDE": "kivi"})
    with pytest.raises(ConfigError, match=r"did you mean naive\? \(from LMCACHE_REMOTE_SERDE\)"):
        load_config(env={"LMCACHE_REMOTE_SERDE": "naiv"})


@pytest.mark.parametrize(
    ("written", "paths"),
    [
        ("file:///a/", ("/a/",)),
        ("file:///a", ("/a",)),
        ("/a", ("/a",)),
        ("/a,file:///b/", ("/a", "/b/")),
        ('"file:///a/"', ("/a/",)),
        ("False", ()),
        ("null", ()),
        ("None", ()),
        ("", ()),
        (["/a", "/b"], ("/a", "/b")),
        (False, ()),
        (None, ()),
    ],
)
def test_local_disk(written: object, paths: tuple[str, ...]) -> None:
    extra = {"lmcache.max_local_disk_size": 1}
    if isinstance(written, str):
        config = load_config(extra=extra, env={"LMCACHE_LOCAL_DISK": written}).config
    else:
        config = load_config(extra={"lmcache.local_disk": written, **extra}, env={}).config
    assert config.disk.paths == paths


@pytest.mark.parametrize("written", ["True", "true"])
def test_local_disk_true_names_no_folder(written: str) -> None:
    loaded = load_config(env={"LMCACHE_LOCAL_DISK": written})
    assert loaded.config.disk.paths == ()
    assert loaded.warnings[0].startswith(f"LMCACHE_LOCAL_DISK={written} names no folder")


@pytest.mark.parametrize("size", [None, "0", "0.0"])
def test_local_disk_without_a_size(size: str | None) -> None:
    env = {"LMCACHE_LOCAL_DISK": "/a"}
    if size is not None:
        env["LMCACHE_MAX_LOCAL_DISK_SIZE"] = size
    with pytest.raises(ConfigError, match=r"disk\.size: is needed with disk\.paths") as error:
        load_config(env=env)
    assert "LMCACHE_MAX_LOCAL_DISK_SIZE" in str(error.value)


def test_no_memory_and_nothing_else_is_a_warning() -> None:
    loaded = load_config(env={"LMCACHE_LOCAL_CPU": "False"})
    assert not loaded.config.memory.enabled
    assert len(loaded.warnings) == 1
    assert "nothing will be kept" in loaded.warnings[0]


@pytest.mark.parametrize(
    "written", ["{'use_odirect': True}", '{"use_odirect": true}', "\"{'use_odirect': True}\""]
)
def test_extra_config_as_text(written: str) -> None:
    assert load_config(env={"LMCACHE_EXTRA_CONFIG": written}).config.disk.odirect == "on"


def test_other_keys_of_extra_config_are_warnings() -> None:
    content = {"disk_io_threads": 8, "s3_region": "secret-region", "none": None}
    loaded = load_config(extra={"lmcache.extra_config": content}, env={})
    origin = "kv_connector_extra_config: lmcache.extra_config"
    assert loaded.warnings == (
        f"{origin}[disk_io_threads]: kvkeep has no such setting: set disk.io_threads",
        f"{origin}[s3_region]: kvkeep has no such setting",
    )


@pytest.mark.parametrize("written", ["nonsense", "[1]", "5", "{'a': f()}", "(" * 10000])
def test_extra_config_that_is_no_mapping(written: str) -> None:
    with pytest.raises(ConfigError, match="LMCACHE_EXTRA_CONFIG: is not a mapping") as error:
        load_config(env={"LMCACHE_EXTRA_CONFIG": written})
    assert "nonsense" not in str(error.value)


def test_extra_config_with_a_wrong_switch() -> None:
    with pytest.raises(ConfigError, match=r"disk\.odirect: 'maybe' is not true or false"):
        load_config(env={"LMCACHE_EXTRA_CONFIG": "{'use_odirect': 'maybe'}"})


def test_wrong_values_name_setting_value_and_source() -> None:
    with pytest.raises(ConfigError, match="chunk_tokens: 'x' is not a whole number") as error:
        load_config(env={"LMCACHE_CHUNK_SIZE": "x"})
    assert str(error.value).endswith("(from LMCACHE_CHUNK_SIZE)")


def test_a_native_name_wins_and_the_note_says_so() -> None:
    env = {"LMCACHE_CHUNK_SIZE": "256", "KVKEEP_CHUNK_TOKENS": "16"}
    loaded = load_config(env=env)
    assert loaded.config.chunk_tokens == 16
    assert loaded.notes == (
        "LMCACHE_CHUNK_SIZE=256 not used, as chunk_tokens is set by KVKEEP_CHUNK_TOKENS",
    )


def test_a_native_name_may_win_over_half_of_an_lmcache_name() -> None:
    env = {"LMCACHE_CACHE_POLICY": "FIFO", "KVKEEP_DISK_POLICY": "mru"}
    loaded = load_config(env=env)
    assert (loaded.config.memory.policy, loaded.config.disk.policy) == ("fifo", "mru")
    assert loaded.notes == (
        "LMCACHE_CACHE_POLICY=FIFO read as memory.policy=fifo; not used, as disk.policy is set "
        "by KVKEEP_DISK_POLICY",
    )


def test_every_read_key_is_renamed_or_translated() -> None:
    assert set(READ_KEYS) == set(_RENAMED) | {"remote_serde", "extra_config"}
