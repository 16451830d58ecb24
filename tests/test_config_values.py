"""How values are written: each parse rule, what is refused, and how they are shown again."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.config_values import (
    MAX_SIZE_BYTES,
    mask_url,
    nearest,
    parse_bool,
    parse_count,
    parse_count_or_auto,
    parse_paths,
    parse_seconds,
    parse_size,
    parse_switch,
    parse_url,
    parse_word,
    show_size,
    shown,
)

GIB = 1024**3


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("50GiB", 50 * GIB),
        ("500MB", 500_000_000),
        ("1.5 TB", 1_500_000_000_000),
        ("0.5", GIB // 2),
        (".5", GIB // 2),
        ("50", 50 * GIB),
        (50, 50 * GIB),
        (5.0, 5 * GIB),
        (0.25, GIB // 4),
        (1e-3, 1073741),
        ("0", 0),
        (0, 0),
        ("0B", 0),
        (" 4096 b ", 4096),
        ("2gib", 2 * GIB),
        ("1KiB", 1024),
        ("1KB", 1000),
        ("3MiB", 3 * 1024**2),
        ("2TiB", 2 * 1024**4),
        ("1PB", 10**15),
        ("16PiB", MAX_SIZE_BYTES),
        ("5.", 5 * GIB),
    ],
)
def test_sizes(written: object, size_bytes: int) -> None:
    assert parse_size(written) == size_bytes


@pytest.mark.parametrize(
    "written",
    [
        "lots", "", "GiB", "50G", "50 Gb/s", "5,0GiB", "1e3", "0x10", "nan", "inf", "٣GiB", "--5",
        "1.2.3", "50GiB!", None, True, False, float("nan"), float("inf"), [], {}, b"5GiB",
    ],
)  # fmt: skip
def test_what_is_not_a_size(written: object) -> None:
    with pytest.raises(ValueError, match=r"is not a size; write for example 50GiB, 500MB or 50"):
        parse_size(written)


@pytest.mark.parametrize(
    "written", ["-1", "-5GiB", -1, -0.5, "17PiB", 53687091200, 10**300, "1" * 20, 1e300]
)
def test_sizes_that_cannot_be(written: object) -> None:
    with pytest.raises(ValueError, match=r"is not from 0 to 16PiB; write for example") as error:
        parse_size(written)
    assert str(written)[:20] in str(error.value)


@given(st.integers(0, MAX_SIZE_BYTES))
def test_a_shown_size_reads_back(size_bytes: int) -> None:
    assert parse_size(show_size(size_bytes)) == size_bytes


@given(
    st.decimals(0, 1000, places=3),
    st.sampled_from(["B", "KiB", "MB", "GiB", "TB"]),
    st.sampled_from(["", " ", "  "]),
)
def test_a_written_size_is_what_it_says(number: Decimal, unit: str, space: str) -> None:
    unit_bytes = {"B": 1, "KiB": 1024, "MB": 10**6, "GiB": GIB, "TB": 10**12}[unit]
    assert parse_size(f"{number}{space}{unit}") == int(number * unit_bytes)
    assert parse_size(f"{number}{space}{unit.lower()}") == int(number * unit_bytes)


PARSERS = (
    parse_size,
    parse_bool,
    parse_count,
    parse_count_or_auto,
    parse_seconds,
    parse_switch,
    parse_word,
    parse_paths,
    parse_url,
)


@pytest.mark.parametrize("parse", PARSERS)
@given(written=st.text() | st.floats() | st.integers() | st.none() | st.booleans() | st.binary())
def test_a_parser_gives_a_value_or_a_problem(
    parse: Callable[[object], object], written: object
) -> None:
    with suppress(ValueError):
        parse(written)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0B"),
        (1, "1B"),
        (1024, "1KiB"),
        (5 * GIB, "5GiB"),
        (GIB // 2, "512MiB"),
        (500_000_000, "500MB"),
        (1_500_000_000_000, "1500GB"),
        (1_000_001, "1000001B"),
    ],
)
def test_sizes_are_shown_short(size_bytes: int, text: str) -> None:
    assert show_size(size_bytes) == text


@pytest.mark.parametrize("written", [True, 1, "1", "true", "True", "TRUE", "yes", "On", " on "])
def test_true(written: object) -> None:
    assert parse_bool(written) is True


@pytest.mark.parametrize("written", [False, 0, "0", "false", "FALSE", "No", "off"])
def test_false(written: object) -> None:
    assert parse_bool(written) is False


@pytest.mark.parametrize("written", ["", "2", 2, "y", "truee", "none", None, 1.0, [], "enabled"])
def test_neither_true_nor_false(written: object) -> None:
    with pytest.raises(ValueError, match="is not true or false; write for example true, 1, yes"):
        parse_bool(written)


@pytest.mark.parametrize(("written", "count"), [(256, 256), ("256", 256), (" 7 ", 7), ("-1", -1)])
def test_counts(written: object, count: int) -> None:
    assert parse_count(written) == count
    assert parse_count_or_auto(written) == count


@pytest.mark.parametrize("written", ["", "1.0", 1.0, "1e3", "1_000", "0x1", True, None, "many"])
def test_what_is_not_a_count(written: object) -> None:
    with pytest.raises(ValueError, match="is not a whole number"):
        parse_count(written)
    with pytest.raises(ValueError, match="is not a whole number or auto"):
        parse_count_or_auto(written)


@pytest.mark.parametrize("written", ["auto", "AUTO", "none", "null"])
def test_auto(written: str) -> None:
    assert parse_count_or_auto(written) is None


@pytest.mark.parametrize(
    ("written", "seconds"), [(1, 1.0), ("2.5", 2.5), (0.1, 0.1), ("1e-3", 1e-3)]
)
def test_seconds(written: object, seconds: float) -> None:
    assert parse_seconds(written) == seconds


@pytest.mark.parametrize("written", ["10s", "1m", "", "nan", "inf", True, None, 10**400, "soon"])
def test_what_is_not_a_number_of_seconds(written: object) -> None:
    with pytest.raises(ValueError, match=r"is not a number of seconds; write for example 2\.5"):
        parse_seconds(written)


@pytest.mark.parametrize(
    ("written", "word"),
    [("LRU", "lru"), (" S3FIFO ", "s3fifo"), ("int8-token_wise", "int8-token_wise")],
)
def test_words(written: str, word: str) -> None:
    assert parse_word(written) == word


@pytest.mark.parametrize("written", ["", "a b", "a/b", 1, None, True, "-x"])
def test_what_is_not_a_word(written: object) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        parse_word(written)


@pytest.mark.parametrize(
    ("written", "switch"), [(True, "on"), (False, "off"), ("AUTO", "auto"), ("on", "on")]
)
def test_yaml_reads_on_and_off_as_booleans(written: object, switch: str) -> None:
    assert parse_switch(written) == switch


@pytest.mark.parametrize(
    ("written", "paths"),
    [
        ("/a", ("/a",)),
        ("/a, /b", ("/a", "/b")),
        (["/a", "/b,c"], ("/a", "/b,c")),
        (("/a",), ("/a",)),
        ("file:///a/", ("/a/",)),
        ("file:///a/,file:///b", ("/a/", "/b")),
        ("none", ()),
        ([], ()),
    ],
)
def test_paths(written: object, paths: tuple[str, ...]) -> None:
    assert parse_paths(written) == paths


def test_a_path_may_start_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_paths("~/kv") == (str(tmp_path / "kv"),)


@pytest.mark.parametrize("written", ["", "/a,", ",", "file://", [1], [None], ["/a\0"], 5, True, {}])
def test_what_is_not_a_folder(written: object) -> None:
    with pytest.raises(ValueError, match="is not a folder; write for example /mnt/nvme0/kvkeep"):
        parse_paths(written)


def test_urls_are_not_looked_into() -> None:
    assert parse_url(" redis://h ") == "redis://h"
    assert parse_url("None") is None
    with pytest.raises(ValueError, match="5 is not a URL"):
        parse_url(5)


@given(secret=st.text())
def test_whatever_stands_before_the_last_at_is_masked(secret: str) -> None:
    assert mask_url(f"redis://user:{secret}@host:6379") == "redis://***@host:6379"


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://host:6379", "redis://host:6379"),
        ("pw@host", "***@host"),
        ("fs:///mnt/user@site/kv", "fs:///mnt/user@site/kv"),
        ("fs://u:p@host/mnt/a@b", "fs://***@host/mnt/a@b"),
        ("redis://h?password=p&db=1", "redis://h?password=***&db=1"),
        ("redis://h?db=1&Secret_Key=p", "redis://h?db=1&Secret_Key=***"),
        ("redis://h?db=1", "redis://h?db=1"),
    ],
)
def test_masks(url: str, masked: str) -> None:
    assert mask_url(url) == masked


def test_what_is_shown_is_one_short_line() -> None:
    assert shown("a\nb") == r"'a\nb'"
    assert shown({"password": "p"}) == "a mapping"
    assert shown(["redis://:p@h"]) == "a list"
    assert shown(datetime.date(2026, 1, 2)) == "datetime.date(2026, 1, 2)"
    assert len(shown("x" * 1000)) == 100


def test_nearest() -> None:
    assert nearest("memory_size", ["memory.size", "disk.size"]) == "did you mean memory.size?"
    assert nearest("zzz", ["b", "a"]) == "known are a, b"
    many = [f"name{number}" for number in range(20)]
    assert nearest("7", many) == "the nearest is name7"


def test_a_common_prefix_does_not_make_two_names_alike() -> None:
    known = ["KVKEEP_REMOTE_CODEC", "KVKEEP_MEMORY_SIZE"]
    assert nearest("KVKEEP_MEMORY", known, "KVKEEP_") == "did you mean KVKEEP_MEMORY_SIZE?"
    text = "known are KVKEEP_MEMORY_SIZE, KVKEEP_REMOTE_CODEC"
    assert nearest("KVKEEP_FOO", known, "KVKEEP_") == text
