"""The dataclasses: bounds, what they print, and the documentation that must list them all."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, is_dataclass, replace
from pathlib import Path

import pytest

from kvkeep.config import (
    DEFAULT_POLICY_NAME,
    POLICY_NAMES,
    REMOTE_SCHEMES,
    SETTINGS,
    DiskConfig,
    KVKeepConfig,
    MemoryConfig,
    RemoteConfig,
    load_config,
)
from kvkeep.config_lmcache_keys import OLD_NAMES, OTHER_KEYS, READ_KEYS
from kvkeep.config_sources import Setting
from kvkeep.errors import ConfigError

SETTINGS_PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
GIB = 1024**3


def test_the_defaults_are_those_of_the_design() -> None:
    config = KVKeepConfig()
    assert config.chunk_tokens is None
    assert config.self_test is True
    assert config.fetch_timeout_s == 10.0
    assert config.memory == MemoryConfig(True, 5 * GIB, GIB // 2, DEFAULT_POLICY_NAME)
    assert config.disk == DiskConfig((), 0, DEFAULT_POLICY_NAME, "auto", 4, GIB)
    assert config.remote == RemoteConfig(None, "raw", 1.0, 4)
    assert DEFAULT_POLICY_NAME in POLICY_NAMES


def test_settings_are_frozen_slotted_and_picklable() -> None:
    config = KVKeepConfig(remote=RemoteConfig(url="redis://:secret@host"))
    for part in (config, config.memory, config.disk, config.remote):
        assert is_dataclass(part)
        assert not hasattr(part, "__dict__")
    with pytest.raises(FrozenInstanceError):
        config.chunk_tokens = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(replace(config))
    loaded = load_config(env={})
    assert pickle.loads(pickle.dumps(loaded)) == loaded


@pytest.mark.parametrize("value", [1, 16, 65536])
def test_chunk_tokens_within_bounds(value: int) -> None:
    assert KVKeepConfig(chunk_tokens=value).chunk_tokens == value


BAD = [
    (lambda: KVKeepConfig(chunk_tokens=0), "chunk_tokens: 0 is not from 1 to 65536"),
    (lambda: KVKeepConfig(chunk_tokens=65537), "chunk_tokens: 65537 is not"),
    (lambda: KVKeepConfig(min_retrieve_tokens=-1), "min_retrieve_tokens: -1 is not from 0"),
    (lambda: KVKeepConfig(fetch_timeout_s=0), "fetch_timeout_s: 0 is not more than 0"),
    (lambda: KVKeepConfig(fetch_timeout_s=float("nan")), "fetch_timeout_s: nan is not"),
    (lambda: KVKeepConfig(fetch_timeout_s=3601), "at most 3600 seconds"),
    (lambda: MemoryConfig(size_bytes=0), "memory.size: 0 keeps nothing"),
    (lambda: MemoryConfig(size_bytes=-GIB), "memory.size: -1GiB is not from 0B to 16PiB"),
    (lambda: MemoryConfig(staging_bytes=0), "memory.staging: 0B is not from 1B"),
    (lambda: MemoryConfig(policy="lur"), "memory.policy: 'lur' is unknown; did you mean lru?"),
    (lambda: DiskConfig(policy="x"), "known are fifo, lfu, lru, mru, s3fifo"),
    (lambda: DiskConfig(paths=("/a",)), "disk.size: is needed with disk.paths"),
    (lambda: DiskConfig(paths=("/a", "/a"), size_bytes=1), "disk.paths: /a,/a names a folder"),
    (lambda: DiskConfig(size_bytes=2**60), "disk.size: 1024PiB is not from"),
    (lambda: DiskConfig(odirect="maybe"), "disk.odirect: 'maybe' is unknown"),
    (lambda: DiskConfig(io_threads=0), "disk.io_threads: 0 is not from 1 to 256"),
    (lambda: DiskConfig(write_queue_bytes=0), "disk.write_queue: 0B is not from 1B"),
    (lambda: RemoteConfig(codec=""), "remote.codec: is empty"),
    (lambda: RemoteConfig(timeout_s=-1), "remote.timeout_s: -1 is not more than 0"),
    (lambda: RemoteConfig(io_threads=257), "remote.io_threads: 257 is not"),
    (lambda: RemoteConfig(url="nowhere"), "remote.url: 'nowhere' has no scheme"),
]


@pytest.mark.parametrize(("build", "message"), BAD)
def test_a_value_out_of_bounds_names_setting_and_value(build, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    assert message in str(error.value)


def test_memory_may_be_empty_when_it_is_off() -> None:
    assert MemoryConfig(enabled=False, size_bytes=0).size_bytes == 0


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis://host:6379",
        "redis://h1:6379,h2:6380",
        "redis://user:pa%40ss@[::1]:6379/0",
        "rediss://:secret@host:6380",
        "redis-sentinel://h1:26379,h2:26379,h3:26379/mymaster",
        "valkey://host:6379?protocol=3",
        "kvkeep://host:7700",
        "lm://host:65432",
        "mooncakestore://host:50051/",
        "s3://bucket",
        "s3://bucket/folder",
        "fs:///mnt/shared",
        "fs://host:0/mnt/shared",
        "REDIS://host",
    ],
)
def test_right_remote_urls(url: str) -> None:
    assert RemoteConfig(url=url).url == url


def test_every_scheme_has_a_right_url() -> None:
    for scheme in REMOTE_SCHEMES:
        assert RemoteConfig(url=f"{scheme}://host/folder").url


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("host:6379", "'host:6379' has no scheme; write for example redis://host:6379"),
        ("reddis://host", "'reddis://host' has an unknown scheme; did you mean redis?"),
        ("azure://x", "known: redis, rediss, redis-sentinel, valkey, kvkeep, lm"),
        ("redis://", "has no right host and port; write for example redis://host:6379"),
        ("redis:///0", "has no right host and port"),
        ("redis://host:port", "has no right host and port"),
        ("redis://host:70000", "has no right host and port"),
        ("redis://host:0", "has no right host and port"),
        ("redis://[::1:6379", "has no right host and port"),
        ("redis-sentinel://h1:26379,", "write for example redis-sentinel://host1:26379,host2"),
        ("redis://ho st", "holds white space"),
        ("s3:///folder", "write for example s3://bucket/folder"),
        ("fs://", "names no folder; write for example fs:///mnt/shared/kvkeep"),
        ("fs://host", "names no folder"),
        ("redis://:pa/ss@host:6379", "in a password, / ? # and @ are written %2F"),
    ],
)
def test_wrong_remote_urls(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"remote\.url") as error:
        RemoteConfig(url=url)
    assert message in str(error.value)


SECRET_URLS = [
    "redis://:hunter2@host:6379",
    "redis://user:hunter2@host:6379",
    "redis://hunter2@host:6379",
    "rediss://u:hunter2@h1:1,h2:2/0",
    "redis://host:6379?password=hunter2",
    "redis://host:6379?db=1&auth_token=hunter2&x=1",
    "s3://key:hunter2@bucket/folder",
]
WRONG_SECRET_URLS = [
    "reddis://:hunter2@host:6379",
    "redis:hunter2@host:6379",
    "redis://:hun/hunter2@host:6379",
    "redis://:a@hunter2@host:99999",
    "redis://u:hunter2 @host:6379",
    "fs://u:hunter2@host",
    "redis://:hunter2@",
]


@pytest.mark.parametrize("url", SECRET_URLS)
def test_no_secret_is_printed(url: str) -> None:
    loaded = load_config(env={"LMCACHE_REMOTE_URL": url})
    assert loaded.config.remote.url == url
    printed = f"{loaded} {loaded.config!r} {loaded.config.remote!s} {loaded.config.describe()}"
    assert "hunter2" not in printed
    assert "host" in printed or "h1:1,h2:2" in printed or "bucket" in printed


@pytest.mark.parametrize("url", WRONG_SECRET_URLS)
@pytest.mark.parametrize("name", ["KVKEEP_REMOTE_URL", "LMCACHE_REMOTE_URL", "KVKEEP_MEMORY_SIZE"])
def test_no_secret_is_in_an_error(url: str, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(env={name: url})
    assert name in str(error.value)
    assert "hunter2" not in str(error.value)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__


def test_describe_names_every_setting_as_one_would_write_it() -> None:
    config = KVKeepConfig(disk=DiskConfig(paths=("/a", "/b"), size_bytes=1500 * 10**9))
    described = config.describe()
    assert list(described) == list(SETTINGS)
    assert described["chunk_tokens"] == "auto"
    assert described["memory.size"] == "5GiB"
    assert described["memory.enabled"] == "true"
    assert described["disk.paths"] == "/a,/b"
    assert described["disk.size"] == "1500GB"
    assert described["remote.url"] == "none"
    assert described["fetch_timeout_s"] == "10"


def test_what_describe_says_reads_back_to_the_same_settings() -> None:
    config = KVKeepConfig(
        chunk_tokens=64,
        fetch_timeout_s=0.1234567891,
        memory=MemoryConfig(enabled=False, size_bytes=123456789),
        disk=DiskConfig(paths=("/a", "/b"), size_bytes=7, odirect="off", policy="s3fifo"),
        remote=RemoteConfig(url="redis://host:6379"),
    )
    env = {SETTINGS[name].env_name: text for name, text in config.describe().items()}
    assert load_config(env=env).config == config


def _row(setting: Setting) -> str:
    default = setting.kind.show(setting.default)
    return (
        f"| `{setting.name}` | `{setting.env_name}` | {setting.kind.label} | `{default}` "
        f"| {setting.meaning} |"
    )


def test_the_page_has_every_setting() -> None:
    lines = SETTINGS_PAGE.read_text().splitlines()
    rows = [line for line in lines if line.startswith("| `") and "| `KVKEEP_" in line]
    assert rows == [_row(setting) for setting in SETTINGS.values()]


def test_the_page_has_every_lmcache_name() -> None:
    page = SETTINGS_PAGE.read_text()
    for key, meaning in READ_KEYS.items():
        assert f"| `{key}` | {meaning} |" in page
    for key in (*OTHER_KEYS, *OLD_NAMES):
        assert f"`{key}`" in page
    for answer in OTHER_KEYS.values():
        assert f"| {answer or 'nothing'} |" in page


def test_the_page_names_every_scheme_and_policy() -> None:
    page = SETTINGS_PAGE.read_text()
    for scheme in REMOTE_SCHEMES:
        assert f"`{scheme}://" in page
    for policy in POLICY_NAMES:
        assert policy in page


def test_all_108_keys_and_12_old_names_are_known() -> None:
    assert len(READ_KEYS) + len(OTHER_KEYS) == 108
    assert not set(READ_KEYS) & set(OTHER_KEYS)
    assert len(OLD_NAMES) == 12
    assert set(OLD_NAMES.values()) <= set(OTHER_KEYS)
