import pytest

from kvkeep.cli.tables import one_line, short_age, short_size, table


def test_columns():
    lines = table(("NAME", "SIZE>"), [("a", "1"), ("long name", "1000")]).splitlines()
    assert lines == ["NAME       SIZE", "a             1", "long name  1000"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (1023 * 1024, "1.00 MiB"),
        (252 * 1024**3, "252 GiB"),
        (1024**7, "1024 EiB"),
    ],
)
def test_sizes(nbytes, text):
    assert short_size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0.9, "0s"), (59, "59s"), (60, "1m"), (7199, "1h"), (200_000, "2d")],
)
def test_ages(seconds, text):
    assert short_age(seconds) == text


def test_names_that_would_break_a_line():
    assert one_line("/a b/ü") == "/a b/ü"
    assert one_line("a\nb") == r"'a\nb'"
    assert one_line("\udcff") == r"'\udcff'"
