"""Where settings come from: precedence, names, files, and what is said about each mistake."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from kvkeep.config import SETTINGS, load_config
from kvkeep.errors import ConfigError

GIB = 1024**3


@pytest.fixture
def native_file(tmp_path: Path) -> Path:
    path = tmp_path / "kvkeep.yaml"
    path.write_text("memory: {size: 3GiB}\n")
    return path


@pytest.fixture
def lmcache_file(tmp_path: Path) -> Path:
    path = tmp_path / "lmcache.yaml"
    path.write_text("max_local_cpu_size: 6\n")
    return path


SOURCES = ("extra", "env", "file", "lmcache extra", "lmcache env", "lmcache file")


@pytest.mark.parametrize("present", [s for n in range(7) for s in combinations(range(6), n)])
def test_precedence(present: tuple[int, ...], native_file: Path, lmcache_file: Path) -> None:
    """Source number i, where it is there, says i + 1 GiB: the strongest present one wins."""
    extra: dict[str, object] = {}
    env: dict[str, str] = {}
    if 0 in present:
        extra["memory.size"] = "1GiB"
    if 1 in present:
        env["KVKEEP_MEMORY_SIZE"] = "2GiB"
    if 2 in present:
        env["KVKEEP_CONFIG_FILE"] = str(native_file)
    if 3 in present:
        extra["lmcache.max_local_cpu_size"] = 4
    if 4 in present:
        env["LMCACHE_MAX_LOCAL_CPU_SIZE"] = "5"
    if 5 in present:
        env["LMCACHE_CONFIG_FILE"] = str(lmcache_file)
    loaded = load_config(extra=extra, env=env)
    expected = (
        "kv_connector_extra_config: memory.size",
        "KVKEEP_MEMORY_SIZE",
        f"{native_file}: memory.size",
        "kv_connector_extra_config: lmcache.max_local_cpu_size",
        "LMCACHE_MAX_LOCAL_CPU_SIZE",
        f"{lmcache_file}: max_local_cpu_size",
    )
    if present:
        assert loaded.config.memory.size_bytes == (present[0] + 1) * GIB
        assert loaded.sources["memory.size"] == expected[present[0]]
    else:
        assert loaded.config.memory.size_bytes == 5 * GIB
        assert loaded.sources["memory.size"] == "default"
    assert set(loaded.sources) == set(SETTINGS)
    assert len(loaded.notes) == sum(source >= 3 for source in present)
    assert loaded.warnings == ()


def test_sources_are_merged_setting_by_setting(native_file: Path) -> None:
    env = {"KVKEEP_CONFIG_FILE": str(native_file), "KVKEEP_MEMORY_POLICY": "FIFO"}
    config = load_config(extra={"memory": {"staging": "1GiB"}}, env=env).config
    assert config.memory.size_bytes == 3 * GIB
    assert config.memory.policy == "fifo"
    assert config.memory.staging_bytes == GIB


def test_the_file_argument_replaces_the_variable(native_file: Path) -> None:
    env = {"KVKEEP_CONFIG_FILE": "/does/not/exist"}
    assert load_config(env=env, file=str(native_file)).config.memory.size_bytes == 3 * GIB


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_CHUNK_TOKENS", "48")
    assert load_config().config.chunk_tokens == 48
    assert load_config(env={}).config.chunk_tokens is None


VALUES = {
    "chunk_tokens": ("64", 64),
    "save_decode_cache": ("yes", True),
    "save_unfull_chunk": ("1", True),
    "min_retrieve_tokens": ("512", 512),
    "self_test": ("off", False),
    "fetch_timeout_s": ("2.5", 2.5),
    "memory.enabled": ("false", False),
    "memory.size": ("7GiB", 7 * GIB),
    "memory.staging": ("1GiB", GIB),
    "memory.policy": ("MRU", "mru"),
    "disk.paths": ("/a,/b", ("/a", "/b")),
    "disk.size": ("1TB", 10**12),
    "disk.policy": ("S3FIFO", "s3fifo"),
    "disk.odirect": ("Off", "off"),
    "disk.io_threads": ("8", 8),
    "disk.write_queue": ("2GiB", 2 * GIB),
    "remote.url": ("valkey://h:1", "valkey://h:1"),
    "remote.codec": ("CacheGen", "cachegen"),
    "remote.timeout_s": ("3", 3.0),
    "remote.io_threads": ("16", 16),
}


def _values(config: object) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, setting in SETTINGS.items():
        owner = getattr(config, setting.group) if setting.group else config
        found[name] = getattr(owner, setting.field)
    return found


def test_every_setting_is_read_from_every_native_source(tmp_path: Path) -> None:
    assert set(VALUES) == set(SETTINGS)
    expected = {name: value for name, (_, value) in VALUES.items()}
    dotted = {name: text for name, (text, _) in VALUES.items()}
    nested: dict[str, object] = {}
    for name, text in dotted.items():
        group, _, key = name.rpartition(".")
        target = nested.setdefault(group, {}) if group else nested
        target[key] = text  # type: ignore[index]
    path = tmp_path / "kvkeep.yaml"
    path.write_text("".join(f"{name}: '{text}'\n" for name, text in dotted.items()))
    env = {SETTINGS[name].env_name: text for name, text in dotted.items()}
    for loaded in (
        load_config(extra=dotted, env={}),
        load_config(extra=nested, env={}),
        load_config(env=env),
        load_config(env={}, file=str(path)),
    ):
        assert _values(loaded.config) == expected
        assert "default" not in loaded.sources.values()


@pytest.mark.parametrize(
    ("env_name", "nearest"),
    [
        ("KVKEEP_MEMORY_SIZ", "KVKEEP_MEMORY_SIZE"),
        ("KVKEEP_DISK_PATH", "KVKEEP_DISK_PATHS"),
        ("KVKEEP_CHUNKTOKENS", "KVKEEP_CHUNK_TOKENS"),
        ("KVKEEP_MEMORY_SIZE_BYTES", "KVKEEP_MEMORY_SIZE"),
    ],
)
def test_an_unknown_variable(env_name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(env={env_name: "1"})
    text = f"environment: {env_name} is not a setting of kvkeep; did you mean {nearest}?"
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("extra", "name", "nearest"),
    [
        ({"memory.siz": 1}, "memory.siz", "memory.size"),
        ({"memory": {"siz": 1}}, "memory.siz", "memory.size"),
        ({"memory_size": 1}, "memory_size", "memory.size"),
        ({"memory.size_bytes": 1}, "memory.size_bytes", "memory.size"),
        ({"disk": {5: 1}}, "disk.5", "disk.size"),
    ],
)
def test_an_unknown_key_in_extra(extra: dict[str, object], name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(extra=extra, env={})
    assert f"kv_connector_extra_config: {name} is not a setting" in str(error.value)
    assert f"did you mean {nearest}?" in str(error.value)


def test_an_unknown_key_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("remote: {ulr: redis://h}\n")
    with pytest.raises(ConfigError, match=r"did you mean remote\.url") as error:
        load_config(env={}, file=str(path))
    assert f"{path}: remote.ulr" in str(error.value)


def test_an_lmcache_name_without_its_prefix_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"write it as lmcache\.chunk_size in kv_connector_extra"):
        load_config(extra={"chunk_size": 256}, env={})


def test_a_group_is_not_a_setting() -> None:
    with pytest.raises(
        ConfigError, match=r"memory is a group of settings, not one; set memory\.en"
    ):
        load_config(extra={"memory": "50GiB"}, env={})


def test_a_setting_is_not_a_group() -> None:
    with pytest.raises(ConfigError, match=r"memory\.size: a mapping is not a size"):
        load_config(extra={"memory": {"size": {"max": 5}}}, env={})


def test_nested_and_dotted_twice() -> None:
    with pytest.raises(ConfigError, match=r"memory\.size is set twice, nested and dotted"):
        load_config(extra={"memory.size": 1, "memory": {"size": 2}}, env={})


def test_nothing_written_is_nothing_set(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("chunk_tokens:\nmemory:\ndisk: {paths: null, size: ''}\nremote: {}\n")
    env = {"KVKEEP_MEMORY_SIZE": "", "KVKEEP_REMOTE_URL": "  ", "KVKEEP_CONFIG_FILE": str(path)}
    loaded = load_config(extra={"self_test": None}, env=env)
    assert set(loaded.sources.values()) == {"default"}


def test_a_stronger_source_can_take_a_store_away(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("disk: {paths: /a, size: 1}\nremote: {url: 'redis://h'}\nchunk_tokens: 16\n")
    env = {
        "KVKEEP_DISK_PATHS": "none",
        "KVKEEP_REMOTE_URL": "none",
        "KVKEEP_CHUNK_TOKENS": "auto",
        "KVKEEP_DISK_SIZE": "0",
    }
    loaded = load_config(env=env, file=str(path))
    assert loaded.config.disk.paths == ()
    assert loaded.config.remote.url is None
    assert loaded.config.chunk_tokens is None
    assert loaded.warnings == ()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"KVKEEP_MEMORY_SIZE": "lots"}, "memory.size: 'lots' is not a size; write for example"),
        ({"KVKEEP_MEMORY_SIZE": "-5"}, "memory.size: '-5' is not from 0 to 16PiB"),
        ({"KVKEEP_MEMORY_SIZE": "0"}, "memory.size: 0 keeps nothing"),
        ({"KVKEEP_SELF_TEST": "maybe"}, "self_test: 'maybe' is not true or false"),
        ({"KVKEEP_CHUNK_TOKENS": "0"}, "chunk_tokens: 0 is not from 1 to 65536"),
        ({"KVKEEP_MEMORY_POLICY": "LUR"}, "memory.policy: 'lur' is unknown; did you mean lru?"),
        ({"KVKEEP_FETCH_TIMEOUT_S": "10s"}, "fetch_timeout_s: '10s' is not a number of seconds"),
        ({"KVKEEP_DISK_ODIRECT": "maybe"}, "disk.odirect: 'maybe' is unknown"),
        ({"KVKEEP_REMOTE_URL": "http://h"}, "remote.url: 'http://h' has an unknown scheme"),
    ],
)
def test_a_wrong_value_names_setting_value_and_source(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(env=env)
    assert str(error.value).startswith(message)
    assert str(error.value).endswith(f"(from {next(iter(env))})")


def test_paths_without_a_size_say_what_to_add() -> None:
    with pytest.raises(ConfigError, match=r"disk\.size: is needed with disk\.paths") as error:
        load_config(env={"KVKEEP_DISK_PATHS": "/a"})
    assert "KVKEEP_DISK_SIZE" in str(error.value)
    assert "(from" not in str(error.value)


def test_names_that_are_not_settings_are_left_alone() -> None:
    env = {
        "KVKEEP_LOG_LEVEL": "DEBUG",
        "KVKEEP_CONFIG_FILE": "",
        "PATH": "/bin",
        "kvkeep_memory_size": "x",
        "KVKEEPX": "1",
    }
    assert set(load_config(env=env).sources.values()) == {"default"}


def test_kubernetes_service_variables_are_left_alone() -> None:
    env = {
        "KVKEEP_SERVICE_HOST": "10.0.0.1",
        "KVKEEP_SERVICE_PORT": "7700",
        "KVKEEP_SERVICE_PORT_HTTP": "7700",
        "KVKEEP_PORT": "tcp://10.0.0.1:7700",
        "KVKEEP_PORT_7700_TCP": "tcp://10.0.0.1:7700",
        "KVKEEP_PORT_7700_TCP_PROTO": "tcp",
        "KVKEEP_PORT_7700_TCP_PORT": "7700",
        "KVKEEP_PORT_7700_TCP_ADDR": "10.0.0.1",
        "LMCACHE_SERVER_SERVICE_HOST": "10.0.0.1",
        "LMCACHE_SERVER_PORT": "tcp://10.0.0.1:65432",
    }
    loaded = load_config(env=env)
    assert set(loaded.sources.values()) == {"default"}
    assert loaded.warnings == ()
    with pytest.raises(ConfigError, match="KVKEEP_PORT is not a setting"):
        load_config(env={"KVKEEP_PORT": "7700"})


def test_a_cache_that_keeps_nothing_is_a_warning() -> None:
    loaded = load_config(env={"KVKEEP_MEMORY_ENABLED": "false"})
    assert loaded.warnings[0].startswith("nothing will be kept: memory.enabled is false")
    for name, value in (("REMOTE_URL", "redis://h"), ("DISK_PATHS", "/a")):
        env = {"KVKEEP_MEMORY_ENABLED": "no", f"KVKEEP_{name}": value, "KVKEEP_DISK_SIZE": "1"}
        assert not any("nothing will be kept" in line for line in load_config(env=env).warnings)


def test_a_disk_size_without_a_folder_is_a_warning() -> None:
    loaded = load_config(env={"KVKEEP_DISK_SIZE": "1TB"})
    assert loaded.warnings == ("nothing is kept on disk: disk.size is set, but disk.paths is not",)
