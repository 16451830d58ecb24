"""Where settings are read: one mapping of setting name to `Given` for each source.

Nothing here knows the settings themselves: they come as a registry made from the fields of the
dataclasses, which stay the one place that names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import yaml

from kvkeep.config_lmcache_keys import READ_KEYS
from kvkeep.config_values import Kind, nearest
from kvkeep.errors import ConfigError

ENV_PREFIX = "KVKEEP_"
CONFIG_FILE_ENV = "KVKEEP_CONFIG_FILE"
LOG_LEVEL_ENV = "KVKEEP_LOG_LEVEL"
EXTRA_ORIGIN = "kv_connector_extra_config"

_METADATA_KEY = "kvkeep"
_SERVICE_LINK = re.compile(
    r"[A-Z0-9_]+_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?"
    r"|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its names, how it is written, what it means and where it is kept."""

    name: str
    """The dotted name, `memory.size`."""
    kind: Kind
    default: Any
    meaning: str
    field: str
    """The dataclass field, `size_bytes`: in the group's dataclass if the name has a dot."""

    @property
    def group(self) -> str:
        """`memory` for `memory.size`; empty for a setting that stands alone."""
        return self.name.rpartition(".")[0]

    @property
    def env_name(self) -> str:
        """The name in the environment, `KVKEEP_MEMORY_SIZE`."""
        return ENV_PREFIX + self.name.replace(".", "_").upper()


class Given(NamedTuple):
    """A setting's value as one source gives it."""

    value: Any
    origin: str
    """The source as people know it: a variable, a file and key, the engine's own setting."""


def about(kind: Kind, meaning: str) -> Mapping[str, tuple[Kind, str]]:
    """The metadata of a dataclass field that makes it a setting."""
    return {_METADATA_KEY: (kind, meaning)}


def settings_of(owner: type[Any], group: str = "") -> dict[str, Setting]:
    """The settings that a dataclass's fields are. A size's name does not say `_bytes`."""
    prefix = f"{group}." if group else ""
    found: dict[str, Setting] = {}
    for one in fields(owner):
        if _METADATA_KEY in one.metadata:
            kind, meaning = cast("tuple[Kind, str]", one.metadata[_METADATA_KEY])
            name = prefix + one.name.removesuffix("_bytes")
            found[name] = Setting(name, kind, one.default, meaning, one.name)
    return found


def parse_given(setting: Setting, raw: object, origin: str) -> Given:
    """Read `raw`; a value that cannot be read is a `ConfigError` that names setting and source."""
    try:
        return Given(setting.kind.parse(raw), origin)
    except ValueError as error:
        raise ConfigError(f"{setting.name}: {error} (from {origin})") from None


def is_unset(raw: object) -> bool:
    """Null and blank text count as not written at all."""
    return raw is None or (isinstance(raw, str) and not raw.strip())


def is_service_link(env_name: str, raw: str) -> bool:
    """Kubernetes puts such variables into every pod when a Service is called kvkeep or lmcache."""
    if env_name.endswith("_PORT") and raw.startswith(("tcp://", "udp://", "sctp://")):
        return True
    return _SERVICE_LINK.fullmatch(env_name) is not None


def read_environment(env: Mapping[str, str], settings: Mapping[str, Setting]) -> dict[str, Given]:
    """The `KVKEEP_*` variables. An unknown one is a `ConfigError`."""
    by_env_name = {setting.env_name: setting for setting in settings.values()}
    given: dict[str, Given] = {}
    for env_name, raw in sorted(env.items()):
        if not env_name.startswith(ENV_PREFIX) or is_service_link(env_name, raw):
            continue
        if env_name in (CONFIG_FILE_ENV, LOG_LEVEL_ENV):
            continue
        setting = by_env_name.get(env_name)
        if setting is None:
            hint = nearest(env_name, by_env_name, ENV_PREFIX)
            raise ConfigError(f"environment: {env_name} is not a setting of kvkeep; {hint}")
        if not is_unset(raw):
            given[setting.name] = parse_given(setting, raw, env_name)
    return given


def read_mapping(
    mapping: Mapping[str, object], source: str, settings: Mapping[str, Setting]
) -> dict[str, Given]:
    """Settings from nested or dotted names. An unknown or doubled one is a `ConfigError`."""
    given: dict[str, Given] = {}
    seen: set[str] = set()
    for name, raw in _flat(mapping, source, settings):
        if name not in settings:
            raise ConfigError(
                f"{source}: {name} is not a setting of kvkeep; {_hint(name, settings)}"
            )
        if name in seen:
            raise ConfigError(f"{source}: {name} is set twice, nested and dotted; keep one")
        seen.add(name)
        if not is_unset(raw):
            given[name] = parse_given(settings[name], raw, f"{source}: {name}")
    return given


def _flat(
    mapping: Mapping[str, object], source: str, settings: Mapping[str, Setting]
) -> Iterator[tuple[str, object]]:
    groups = {setting.group for setting in settings.values()} - {""}
    for name, raw in mapping.items():
        if name not in groups:
            yield name, raw
        elif isinstance(raw, Mapping):
            inner = cast("Mapping[object, object]", raw)
            yield from ((f"{name}.{key}", value) for key, value in inner.items())
        elif not is_unset(raw):
            members = ", ".join(one for one in settings if one.startswith(f"{name}."))
            raise ConfigError(f"{source}: {name} is a group of settings, not one; set {members}")


def _hint(name: str, settings: Mapping[str, Setting]) -> str:
    if name in READ_KEYS:
        return (
            f"it is LMCache's name: write it as lmcache.{name} in {EXTRA_ORIGIN}, or in "
            f"the file that LMCACHE_CONFIG_FILE names"
        )
    return nearest(name, settings)


def read_yaml(path: str, named_by: str) -> dict[str, object]:
    """The mapping in a YAML file. No other content passes; an empty file is an empty mapping.

    The messages hold the file, the line where it is known, and none of the file's values.
    """
    where = f"{named_by} {path}"
    try:
        with open(path, "rb") as stream:
            content: object = yaml.load(stream, Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: is not right YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{where}: is not right YAML") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: holds no mapping of names to values at its top")
    return {str(key): value for key, value in cast("dict[object, object]", content).items()}


class _UniqueKeyLoader(yaml.SafeLoader):
    """The safe loader, which refuses a key that stands twice in one mapping."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            identity = (key.tag, key.value)
            if identity in seen:
                problem = f"the key {key.value} is there twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(identity)
        return node
