"""Reads the settings of a deployment that was written for LMCache.

Three sources, the first wins: `lmcache.<key>` in the engine's extra configuration, `LMCACHE_<KEY>`
in the environment, the YAML file that `LMCACHE_CONFIG_FILE` names. Any native name wins over all
of them. A key that kvkeep does not have is a warning, never an error: a command that ran goes on.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, cast

from kvkeep.config_lmcache_keys import (
    IGNORED_ENV,
    IGNORED_KEYS,
    OLD_NAMES,
    OTHER_ENV,
    OTHER_EXTRA_CONFIG,
    OTHER_EXTRA_KEYS,
    OTHER_KEYS,
    OTHER_PREFIXES,
    READ_KEYS,
)
from kvkeep.config_sources import (
    EXTRA_ORIGIN,
    Given,
    Setting,
    is_service_link,
    is_unset,
    parse_given,
    read_yaml,
)
from kvkeep.config_values import FALSE_WORDS, TRUE_WORDS, nearest, parse_bool, shown
from kvkeep.errors import ConfigError

EXTRA_PREFIX = "lmcache."
ENV_PREFIX = "LMCACHE_"
CONFIG_FILE_ENV = "LMCACHE_CONFIG_FILE"

_RENAMED: Mapping[str, tuple[str, ...]] = {
    "chunk_size": ("chunk_tokens",),
    "local_cpu": ("memory.enabled",),
    "max_local_cpu_size": ("memory.size",),
    "local_disk": ("disk.paths",),
    "max_local_disk_size": ("disk.size",),
    "remote_url": ("remote.url",),
    "cache_policy": ("memory.policy", "disk.policy"),
    "save_unfull_chunk": ("save_unfull_chunk",),
    "save_decode_cache": ("save_decode_cache",),
    "min_retrieve_tokens": ("min_retrieve_tokens",),
}
_CODECS: Mapping[str, str] = {"naive": "raw", "cachegen": "cachegen"}
_SIZES = ("max_local_cpu_size", "max_local_disk_size")
_NODE_REMARK = "; this is for the whole node, where LMCache's is for each rank"


class _Entry(NamedTuple):
    """One LMCache name as one source has it."""

    key: str
    raw: object
    origin: str


@dataclass(frozen=True, slots=True)
class _Use:
    """What became of one entry."""

    origin: str
    text: str
    """What was written, masked."""
    given: Mapping[str, Given]
    remark: str = ""


@dataclass(frozen=True, slots=True)
class LMCacheReading:
    """All that LMCache's names say. `layers` are in falling precedence."""

    layers: tuple[Mapping[str, Given], ...]
    warnings: tuple[str, ...]
    uses: tuple[_Use, ...]

    def notes(
        self, winners: Mapping[str, Given], settings: Mapping[str, Setting]
    ) -> tuple[str, ...]:
        """A line for each name that was read, and for each that a stronger source overrides."""
        return tuple(_note(use, winners, settings) for use in self.uses)


def read_lmcache(
    extra: Mapping[str, object], env: Mapping[str, str], settings: Mapping[str, Setting]
) -> LMCacheReading:
    """Read all three sources. A value that cannot be read is a `ConfigError`."""
    warnings: list[str] = []
    uses: list[_Use] = []
    layers: list[Mapping[str, Given]] = []
    for entries in (
        _extra_entries(extra, warnings),
        _env_entries(env, warnings),
        _file_entries(env),
    ):
        layer: dict[str, Given] = {}
        for use in _translate_all(entries, settings, warnings):
            uses.append(use)
            layer.update(use.given)
        layers.append(layer)
    return LMCacheReading(tuple(layers), tuple(warnings), tuple(uses))


def without_lmcache(extra: Mapping[str, object]) -> dict[str, object]:
    """The native part of the engine's extra configuration."""
    return {
        name: raw
        for name, raw in extra.items()
        if not name.startswith(EXTRA_PREFIX) and name not in OTHER_EXTRA_KEYS
    }


def _extra_entries(extra: Mapping[str, object], warnings: list[str]) -> list[_Entry]:
    warnings.extend(
        _not_here(f"{EXTRA_ORIGIN}: {name}", OTHER_EXTRA_KEYS[name])
        for name in extra
        if name in OTHER_EXTRA_KEYS
    )
    return [
        _Entry(name.removeprefix(EXTRA_PREFIX), raw, f"{EXTRA_ORIGIN}: {name}")
        for name, raw in extra.items()
        if name.startswith(EXTRA_PREFIX)
    ]


def _env_entries(env: Mapping[str, str], warnings: list[str]) -> list[_Entry]:
    entries: list[_Entry] = []
    for name, raw in sorted(env.items()):
        if not name.startswith(ENV_PREFIX) or name in IGNORED_ENV or is_service_link(name, raw):
            continue
        if name in OTHER_ENV:
            warnings.append(_not_here(name, OTHER_ENV[name]))
        else:
            entries.append(_Entry(name.removeprefix(ENV_PREFIX).lower(), _unquoted(raw), name))
    return entries


def _file_entries(env: Mapping[str, str]) -> list[_Entry]:
    path = env.get(CONFIG_FILE_ENV, "").strip()
    if not path:
        return []
    content = read_yaml(path, CONFIG_FILE_ENV)
    return [_Entry(key, raw, f"{path}: {key}") for key, raw in content.items()]


def _unquoted(text: str) -> str:
    """Without one pair of quotes around, as LMCache takes them off."""
    text = text.strip()
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def _translate_all(
    entries: Iterable[_Entry], settings: Mapping[str, Setting], warnings: list[str]
) -> Iterable[_Use]:
    for entry in entries:
        if is_unset(entry.raw):
            continue
        if entry.key in IGNORED_KEYS:
            yield _Use(entry.origin, _plain(entry.raw), {})
        elif entry.key == "extra_config":
            yield from _translate_extra_config(entry, warnings)
        elif entry.key == "local_disk" and _is_switch(entry.raw):
            yield from _translate_disk_switch(entry, warnings)
        elif entry.key == "remote_serde":
            yield _translate_serde(entry)
        elif entry.key in _RENAMED:
            yield _rename(entry, settings)
        else:
            warnings.append(_warning(entry))


def _rename(entry: _Entry, settings: Mapping[str, Setting]) -> _Use:
    given = {
        name: parse_given(settings[name], entry.raw, entry.origin) for name in _RENAMED[entry.key]
    }
    remark = _NODE_REMARK if entry.key in _SIZES else ""
    return _Use(entry.origin, _plain(entry.raw), given, remark)


def _translate_serde(entry: _Entry) -> _Use:
    serde = str(entry.raw).strip().lower()
    codec = _CODECS.get(serde)
    if codec is None:
        hint = nearest(serde, _CODECS)
        raise ConfigError(
            f"remote.codec: {shown(entry.raw)} is not read; {hint} (from {entry.origin})"
        )
    return _Use(entry.origin, _plain(entry.raw), {"remote.codec": Given(codec, entry.origin)})


def _is_switch(raw: object) -> bool:
    words = (*TRUE_WORDS, *FALSE_WORDS)
    return isinstance(raw, bool) or (isinstance(raw, str) and raw.strip().lower() in words)


def _translate_disk_switch(entry: _Entry, warnings: list[str]) -> Iterable[_Use]:
    if parse_bool(entry.raw):
        warnings.append(
            f"{entry.origin}={_plain(entry.raw)} names no folder, so nothing is kept on disk; "
            f"write for example file:///mnt/nvme0/kvkeep/"
        )
    else:
        yield _Use(entry.origin, _plain(entry.raw), {"disk.paths": Given((), entry.origin)})


def _translate_extra_config(entry: _Entry, warnings: list[str]) -> Iterable[_Use]:
    for key, raw in _literal_mapping(entry).items():
        origin = f"{entry.origin}[{key}]"
        if key == "use_odirect":
            try:
                switch = "on" if parse_bool(raw) else "auto"
            except ValueError as error:
                raise ConfigError(f"disk.odirect: {error} (from {origin})") from None
            yield _Use(origin, _plain(raw), {"disk.odirect": Given(switch, origin)})
        elif not is_unset(raw):
            warnings.append(_not_here(origin, OTHER_EXTRA_CONFIG.get(key, "")))


def _literal_mapping(entry: _Entry) -> dict[str, object]:
    """LMCache's `extra_config`: a mapping, or one written as JSON or as a Python literal."""
    content = entry.raw
    if isinstance(content, str):
        content = _literal(content)
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"{entry.origin}: is not a mapping (it is not printed, as it may hold secrets); "
            f"write for example {{'use_odirect': True}}"
        )
    return {str(key): raw for key, raw in cast("Mapping[object, object]", content).items()}


def _literal(text: str) -> object:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return ast.literal_eval(text)
    return None


def _plain(raw: object) -> str:
    """`raw` as it would be written in a shell, masked."""
    text = shown(raw)
    return text[1:-1] if isinstance(raw, str) else text


def _not_here(origin: str, answer: str) -> str:
    return f"{origin}: kvkeep has no such setting{': ' + answer if answer else ''}"


def _warning(entry: _Entry) -> str:
    key = entry.key
    if key in OTHER_KEYS:
        return _not_here(entry.origin, OTHER_KEYS[key])
    if key in OLD_NAMES:
        return _not_here(entry.origin, OTHER_KEYS[OLD_NAMES[key]])
    for prefix, answer in OTHER_PREFIXES.items():
        if key.startswith(prefix) or key == prefix.rstrip("_."):
            return _not_here(entry.origin, answer)
    known = (*READ_KEYS, *OTHER_KEYS, *OLD_NAMES)
    if entry.origin.startswith(ENV_PREFIX):
        hint = nearest(entry.origin, (ENV_PREFIX + one.upper() for one in known), ENV_PREFIX)
    else:
        hint = nearest(key, known)
    return f"{entry.origin}: is not a name that LMCache is known to have; {hint}"


def _note(use: _Use, winners: Mapping[str, Given], settings: Mapping[str, Setting]) -> str:
    written = f"{use.origin}={use.text}"
    read: list[str] = []
    lost: list[str] = []
    for name, given in use.given.items():
        winner = winners[name].origin
        if winner == given.origin:
            read.append(f"{name}={settings[name].kind.show(given.value)}")
        else:
            lost.append(f"{name} is set by {winner}")
    parts = [f"read as {', '.join(read)}{use.remark}"] if read else []
    parts += [f"not used, as {', '.join(lost)}"] if lost else []
    return f"{written} {'; '.join(parts) or 'accepted, it has no meaning here'}"
