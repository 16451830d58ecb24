"""The settings: frozen dataclasses, one validator each, and `load_config` that fills them.

A setting's dotted name is its group and field without the `_bytes` (a size is written with its
unit): `memory.size` is `config.memory.size_bytes`, and `KVKEEP_MEMORY_SIZE` in the environment.
The table of all of them is docs/settings.md.
"""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kvkeep.config_lmcache import read_lmcache, without_lmcache
from kvkeep.config_sources import (
    CONFIG_FILE_ENV,
    EXTRA_ORIGIN,
    Given,
    Setting,
    about,
    read_environment,
    read_mapping,
    read_yaml,
    settings_of,
)
from kvkeep.config_url import REMOTE_SCHEMES as REMOTE_SCHEMES
from kvkeep.config_url import remote_url_problem
from kvkeep.config_values import (
    BOOL,
    COUNT,
    COUNT_OR_AUTO,
    GIB,
    MAX_SIZE_BYTES,
    PATHS,
    SECONDS,
    SIZE,
    SWITCH,
    URL,
    WORD,
    SettingError,
    check_choice,
    check_range,
    check_seconds,
    mask_url,
    show_size,
)
from kvkeep.errors import ConfigError

POLICY_NAMES = ("lru", "slru", "lfu", "s3fifo", "fifo", "mru")
DEFAULT_POLICY_NAME = "slru"
ODIRECT_NAMES = ("auto", "on", "off")

MAX_CHUNK_TOKENS = 65536
MAX_THREADS = 256


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """The memory tier, which is the pool of pinned slots."""

    enabled: bool = field(
        default=True,
        metadata=about(BOOL, "Keep chunks in memory; if false, it only stages copies."),
    )
    size_bytes: int = field(
        default=5 * GIB, metadata=about(SIZE, "Memory for chunks, over all ranks of the node.")
    )
    staging_bytes: int = field(
        default=GIB // 2,
        metadata=about(SIZE, "Memory that stages copies if `memory.enabled` is false."),
    )
    policy: str = field(
        default=DEFAULT_POLICY_NAME,
        metadata=about(WORD, f"Order of eviction from memory: {', '.join(POLICY_NAMES)}."),
    )

    def __post_init__(self) -> None:
        if self.enabled and self.size_bytes == 0:
            problem = "0 keeps nothing; set it for example to 50GiB, or set memory.enabled to false"
            raise SettingError("memory.size", problem)
        check_range("memory.size", self.size_bytes, 0, MAX_SIZE_BYTES, show_size)
        check_range("memory.staging", self.staging_bytes, 1, MAX_SIZE_BYTES, show_size)
        check_choice("memory.policy", self.policy, POLICY_NAMES)


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """The disk tier: used when `paths` is not empty."""

    paths: tuple[str, ...] = field(
        default=(), metadata=about(PATHS, "Folders that keep chunks; one for each device.")
    )
    size_bytes: int = field(
        default=0, metadata=about(SIZE, "Room for chunks, over all folders and ranks of the node.")
    )
    policy: str = field(
        default=DEFAULT_POLICY_NAME,
        metadata=about(WORD, f"Order of eviction from disk: {', '.join(POLICY_NAMES)}."),
    )
    odirect: str = field(
        default="auto",
        metadata=about(SWITCH, "Go past the page cache: on, off, or where the disk can (auto)."),
    )
    io_threads: int = field(
        default=4, metadata=about(COUNT, "Threads that write the disk; twice as many read it.")
    )
    write_queue_bytes: int = field(
        default=GIB, metadata=about(SIZE, "What may wait to be written; more is dropped.")
    )

    def __post_init__(self) -> None:
        if self.paths and self.size_bytes == 0:
            raise SettingError(
                "disk.size",
                "is needed with disk.paths and is 0; set disk.size, KVKEEP_DISK_SIZE or "
                "LMCACHE_MAX_LOCAL_DISK_SIZE, for example to 200GiB",
            )
        if len(set(self.paths)) < len(self.paths):
            raise SettingError("disk.paths", f"{','.join(self.paths)} names a folder twice")
        check_range("disk.size", self.size_bytes, 0, MAX_SIZE_BYTES, show_size)
        check_choice("disk.policy", self.policy, POLICY_NAMES)
        check_choice("disk.odirect", self.odirect, ODIRECT_NAMES)
        check_range("disk.io_threads", self.io_threads, 1, MAX_THREADS)
        check_range("disk.write_queue", self.write_queue_bytes, 1, MAX_SIZE_BYTES, show_size)


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """The remote tier: used when `url` is set. The representation masks the URL's secrets."""

    url: str | None = field(
        default=None, metadata=about(URL, "Store that engines share, such as `redis://host:6379`.")
    )
    codec: str = field(default="raw", metadata=about(WORD, "How chunks are coded in the store."))
    timeout_s: float = field(
        default=1.0, metadata=about(SECONDS, "Longest one call may take; then it is a miss.")
    )
    io_threads: int = field(
        default=4, metadata=about(COUNT, "Threads that talk to the remote store.")
    )

    def __post_init__(self) -> None:
        problem = None if self.url is None else remote_url_problem(self.url)
        if problem is not None:
            raise SettingError("remote.url", problem)
        if not self.codec:
            raise SettingError("remote.codec", "is empty; write for example raw")
        check_seconds("remote.timeout_s", self.timeout_s)
        check_range("remote.io_threads", self.io_threads, 1, MAX_THREADS)

    def __repr__(self) -> str:
        url = None if self.url is None else mask_url(self.url)
        return (
            f"RemoteConfig(url={url!r}, codec={self.codec!r}, timeout_s={self.timeout_s!r}, "
            f"io_threads={self.io_threads!r})"
        )


@dataclass(frozen=True, slots=True)
class KVKeepConfig:
    """All settings."""

    chunk_tokens: int | None = field(
        default=None,
        metadata=about(
            COUNT_OR_AUTO,
            f"Tokens in a chunk, 1 to {MAX_CHUNK_TOKENS}. auto: fits the engine's blocks.",
        ),
    )
    save_decode_cache: bool = field(
        default=False, metadata=about(BOOL, "Keep the chunks of generated tokens too.")
    )
    save_unfull_chunk: bool = field(
        default=False,
        metadata=about(BOOL, "Make a chunk one block, so that less than one block is left out."),
    )
    min_retrieve_tokens: int = field(
        default=0, metadata=about(COUNT, "A hit of fewer tokens is computed, not fetched.")
    )
    self_test: bool = field(
        default=True, metadata=about(BOOL, "Store, load and compare random blocks at the start.")
    )
    fetch_timeout_s: float = field(
        default=10.0,
        metadata=about(SECONDS, "Longest a request waits for a slow tier; then it is computed."),
    )
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)

    def __post_init__(self) -> None:
        if self.chunk_tokens is not None:
            check_range("chunk_tokens", self.chunk_tokens, 1, MAX_CHUNK_TOKENS)
        check_range("min_retrieve_tokens", self.min_retrieve_tokens, 0, 10**9)
        check_seconds("fetch_timeout_s", self.fetch_timeout_s)

    def describe(self) -> dict[str, str]:
        """Each setting's dotted name and its value as one would write it, secrets masked."""
        return {name: setting.kind.show(self._value(setting)) for name, setting in SETTINGS.items()}

    def _value(self, setting: Setting) -> Any:
        owner = getattr(self, setting.group) if setting.group else self
        return getattr(owner, setting.field)


_GROUPS: Mapping[str, type[MemoryConfig | DiskConfig | RemoteConfig]] = {
    "memory": MemoryConfig,
    "disk": DiskConfig,
    "remote": RemoteConfig,
}

SETTINGS: Mapping[str, Setting] = settings_of(KVKeepConfig) | {
    name: setting
    for group, owner in _GROUPS.items()
    for name, setting in settings_of(owner, group).items()
}
"""The registry: every setting by its dotted name, in the order of the documentation."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The settings and how they came about. Nothing here but `config.remote.url` holds a secret."""

    config: KVKeepConfig
    notes: tuple[str, ...]
    """One line for each LMCache name that was understood."""
    warnings: tuple[str, ...]
    """One line for each thing that does not do what its writer may expect."""
    sources: Mapping[str, str]
    """Setting name to where its value came from, `default` if nowhere."""


def load_config(
    *,
    extra: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    file: str | None = None,
) -> LoadedConfig:
    """Read every source; the first that has a setting wins.

    The order: `extra` (vLLM's `kv_connector_extra_config`), `KVKEEP_*` in `env` (the process's
    own if None), the YAML file (`file`, else what `KVKEEP_CONFIG_FILE` names), then LMCache's
    names in `extra`, in `env` and in `LMCACHE_CONFIG_FILE`, then the defaults.

    Raises `ConfigError` for an unknown native name and for any value that cannot be right,
    also where a stronger source overrides it.
    """
    environ = os.environ if env is None else env
    given_extra = extra or {}
    path = file or environ.get(CONFIG_FILE_ENV, "").strip()
    named_by = "settings file" if file else CONFIG_FILE_ENV
    lmcache = read_lmcache(given_extra, environ, SETTINGS)
    winners = ChainMap(
        read_mapping(without_lmcache(given_extra), EXTRA_ORIGIN, SETTINGS),
        read_environment(environ, SETTINGS),
        read_mapping(read_yaml(path, named_by), path, SETTINGS) if path else {},
        *(dict(layer) for layer in lmcache.layers),
    )
    config = _build(winners)
    return LoadedConfig(
        config=config,
        notes=lmcache.notes(winners, SETTINGS),
        warnings=lmcache.warnings + _doubts(config),
        sources={name: winners[name].origin if name in winners else "default" for name in SETTINGS},
    )


def _build(winners: Mapping[str, Given]) -> KVKeepConfig:
    values: dict[str, dict[str, Any]] = {"": {}, **{group: {} for group in _GROUPS}}
    for name, given in winners.items():
        values[SETTINGS[name].group][SETTINGS[name].field] = given.value
    try:
        groups = {name: group(**values[name]) for name, group in _GROUPS.items()}
        return KVKeepConfig(**values[""], **cast("dict[str, Any]", groups))
    except SettingError as error:
        if error.setting not in winners:
            raise ConfigError(str(error)) from None
        raise ConfigError(f"{error} (from {winners[error.setting].origin})") from None


def _doubts(config: KVKeepConfig) -> tuple[str, ...]:
    doubts: list[str] = []
    if not config.memory.enabled and not config.disk.paths and config.remote.url is None:
        doubts.append(
            "nothing will be kept: memory.enabled is false, and neither disk.paths nor "
            "remote.url is set"
        )
    if config.disk.size_bytes and not config.disk.paths:
        doubts.append("nothing is kept on disk: disk.size is set, but disk.paths is not")
    return tuple(doubts)
