"""How a setting is written: text becomes a value, and a value is shown again.

Each `parse_*` takes what a source gave (text from the environment, a YAML or JSON value) and
returns the value, or raises `ValueError` with a problem that a person can act on. No message and
no shown value holds a password.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, cast

from kvkeep.errors import ConfigError

GIB = 1024**3
MAX_SIZE_BYTES = 16 * 1024**5
"""16 PiB. More is taken for a number of bytes written without its unit."""

MAX_TIMEOUT_S = 3600.0

_UNITS: Mapping[str, int] = {
    "B": 1,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
    "PiB": 1024**5,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "PB": 1000**5,
}
_UNITS_BY_LOWER_NAME = {name.lower(): unit_bytes for name, unit_bytes in _UNITS.items()}
_SIZE = re.compile(r"(?P<number>[0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})\s*(?P<unit>[A-Za-z]*)")
_SIZE_EXAMPLE = "50GiB, 500MB or 50 (a number without a unit is GiB)"
_FOLDER_EXAMPLE = "/mnt/nvme0/kvkeep"
_COUNT = re.compile(r"-?[0-9]{1,18}")
_WORD = re.compile(r"[a-z0-9][a-z0-9_-]*")
_SECRET_IN_QUERY = re.compile(
    r"([?&][^=&]*(?:pass|secret|token|key|auth|sig|cred)[^=&]*=)[^&'\"]*", re.IGNORECASE
)

_FEW_NAMES = 10

NONE_WORDS = ("none", "null")
TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to write a value: `show` is the right inverse of `parse`, but for masked secrets."""

    label: str
    """What a person is told to write, in a word or two."""
    parse: Callable[[object], Any]
    show: Callable[[Any], str]


class SettingError(ConfigError):
    """A setting's value is out of its bounds. `setting` is the dotted name."""

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(f"{setting}: {problem}")
        self.setting = setting


def check_range(
    setting: str, value: float, low: float, high: float, show: Callable[[Any], str] = str
) -> None:
    """Raise `SettingError` unless `low <= value <= high`."""
    if not low <= value <= high:
        raise SettingError(setting, f"{show(value)} is not from {show(low)} to {show(high)}")


def check_seconds(setting: str, seconds: float) -> None:
    """Raise `SettingError` unless `seconds` is more than 0 and not absurdly long."""
    if not 0 < seconds <= MAX_TIMEOUT_S:
        problem = f"{_show_seconds(seconds)} is not more than 0 and at most {MAX_TIMEOUT_S:g}"
        raise SettingError(setting, f"{problem} seconds")


def check_choice(setting: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `SettingError` unless `value` is one of `choices`."""
    if value not in choices:
        raise SettingError(setting, f"{shown(value)} is unknown; {nearest(value, choices)}")


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message about an unknown word: the nearest known one, or the few there are.

    `prefix` is what all of them begin with: it does not make two words alike.
    """
    names = {name.removeprefix(prefix).lower(): name for name in sorted(known)}
    written = word.removeprefix(prefix).lower()
    if close := get_close_matches(written, names, n=1, cutoff=0.5):
        return f"did you mean {names[close[0]]}?"
    if len(names) <= _FEW_NAMES:
        return f"known are {', '.join(names.values())}"
    return f"the nearest is {names[get_close_matches(written, names, n=1, cutoff=0.0)[0]]}"


def mask_url(text: str) -> str:
    """`text` without what may be a secret: all before its last `@`, and such query values.

    It errs on the side of masking: a password may hold any character, also `@`, `/` and `:`.
    """
    scheme, found, rest = text.partition("://")
    prefix = scheme + found if found else ""
    rest = rest if found else text
    if scheme.lower() == "fs":
        host, slash, path = rest.partition("/")
        return prefix + _without_user(host) + slash + path
    return prefix + _SECRET_IN_QUERY.sub(r"\1***", _without_user(rest))


def _without_user(text: str) -> str:
    _, at, after = text.rpartition("@")
    return f"***@{after}" if at else text


def shown(given: object) -> str:
    """What a source gave, for a message: one short line with no secret in it."""
    if isinstance(given, Mapping):
        return "a mapping"
    if isinstance(given, (list, tuple, set, frozenset)):
        return "a list"
    text = repr(mask_url(given) if isinstance(given, str) else given)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _wrong(given: object, wanted: str, example: str) -> ValueError:
    return ValueError(f"{shown(given)} is not {wanted}; write for example {example}")


def parse_size(given: object) -> int:
    """Bytes. A number without a unit is GiB, as LMCache reads its sizes."""
    size_bytes = _exact_bytes(given)
    if size_bytes is None:
        raise _wrong(given, "a size", _SIZE_EXAMPLE)
    if not 0 <= size_bytes <= MAX_SIZE_BYTES:
        raise _wrong(given, f"from 0 to {show_size(MAX_SIZE_BYTES)}", _SIZE_EXAMPLE)
    return int(size_bytes)


def _exact_bytes(given: object) -> Decimal | None:
    if isinstance(given, bool):
        return None
    if isinstance(given, (int, float)):
        return Decimal(repr(given)) * GIB if math.isfinite(given) else None
    if not isinstance(given, str):
        return None
    text = given.strip()
    sign = -1 if text.startswith("-") else 1
    match = _SIZE.fullmatch(text.removeprefix("-"))
    if match is None:
        return None
    unit_bytes = _UNITS_BY_LOWER_NAME.get(match["unit"].lower() or "gib")
    return None if unit_bytes is None else sign * Decimal(match["number"]) * unit_bytes


def show_size(size_bytes: int) -> str:
    """The shortest exact way to write a size: `parse_size` reads it back to the same number."""
    exact = [
        f"{size_bytes // unit_bytes}{name}"
        for name, unit_bytes in _UNITS.items()
        if size_bytes % unit_bytes == 0
    ]
    return "0B" if size_bytes == 0 else min(exact, key=lambda text: len(text.rstrip("KMGTPiB")))


def parse_count(given: object) -> int:
    """A whole number."""
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if isinstance(given, str) and _COUNT.fullmatch(given.strip()):
        return int(given)
    raise _wrong(given, "a whole number", "256")


def parse_count_or_auto(given: object) -> int | None:
    """A whole number; None for `auto`."""
    if _is_word(given, ("auto", *NONE_WORDS)):
        return None
    try:
        return parse_count(given)
    except ValueError:
        raise _wrong(given, "a whole number or auto", "256") from None


def parse_seconds(given: object) -> float:
    """Plain seconds, whole or not, without a unit."""
    if not isinstance(given, bool) and isinstance(given, (int, float, str)):
        try:
            seconds = float(given)
        except (ValueError, OverflowError):
            seconds = math.nan
        if math.isfinite(seconds):
            return seconds
    raise _wrong(given, "a number of seconds", "2.5")


def parse_bool(given: object) -> bool:
    """True or false, in the usual words."""
    if isinstance(given, bool):
        return given
    if _is_word(given, TRUE_WORDS):
        return True
    if _is_word(given, FALSE_WORDS):
        return False
    raise _wrong(given, "true or false", ", ".join(TRUE_WORDS + FALSE_WORDS))


def parse_word(given: object) -> str:
    """A name, in lower case."""
    text = given.strip().lower() if isinstance(given, str) else ""
    if not _WORD.fullmatch(text):
        raise _wrong(given, "a name", "lru")
    return text


def parse_switch(given: object) -> str:
    """`auto`, `on` or `off`, of which YAML hands over the last two as booleans."""
    if isinstance(given, bool):
        return "on" if given else "off"
    return parse_word(given)


def parse_paths(given: object) -> tuple[str, ...]:
    """Folders: a list, or text with commas between. `file://` in front is dropped."""
    if _is_word(given, NONE_WORDS):
        return ()
    if isinstance(given, str):
        parts: list[object] = list(given.split(","))
    elif isinstance(given, (list, tuple)):
        parts = list(cast("list[object]", given))
    else:
        raise _wrong(given, "a folder", _FOLDER_EXAMPLE)
    return tuple(_folder(part) for part in parts)


def _folder(part: object) -> str:
    path = part.strip().removeprefix("file://") if isinstance(part, str) else ""
    if not path or "\0" in path:
        raise _wrong(part, "a folder", _FOLDER_EXAMPLE)
    return os.path.expanduser(path)


def parse_url(given: object) -> str | None:
    """A URL, not looked into; None for `none`."""
    if _is_word(given, NONE_WORDS):
        return None
    if not isinstance(given, str):
        raise _wrong(given, "a URL", "redis://host:6379")
    return given.strip()


def _is_word(given: object, words: tuple[str, ...]) -> bool:
    is_text = isinstance(given, (str, int)) and not isinstance(given, bool)
    return is_text and str(given).strip().lower() in words


def _show_bool(value: bool) -> str:
    return "true" if value else "false"


def _show_count_or_auto(value: int | None) -> str:
    return "auto" if value is None else str(value)


def _show_seconds(value: float) -> str:
    return str(value).removesuffix(".0")


def _show_paths(value: tuple[str, ...]) -> str:
    return ",".join(value) or "none"


def _show_url(value: str | None) -> str:
    return "none" if value is None else mask_url(value)


BOOL = Kind("true or false", parse_bool, _show_bool)
COUNT = Kind("whole number", parse_count, str)
COUNT_OR_AUTO = Kind("whole number or auto", parse_count_or_auto, _show_count_or_auto)
SECONDS = Kind("seconds", parse_seconds, _show_seconds)
SIZE = Kind("size", parse_size, show_size)
WORD = Kind("name", parse_word, str)
SWITCH = Kind("auto, on or off", parse_switch, str)
PATHS = Kind("folders, commas between", parse_paths, _show_paths)
URL = Kind("URL or none", parse_url, _show_url)
