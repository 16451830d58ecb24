"""The YAML files: what is read from them, and what is said about a file that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvkeep.config import load_config
from kvkeep.errors import ConfigError

GIB = 1024**3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: b: c\n", "line 1: is not right YAML: mapping values are not allowed here"),
        (
            b"memory:\n  size: 1\n  size: 2\n",
            "line 3: is not right YAML: the key size is there twice",
        ),
        (b"chunk_tokens: 1\nself_test: 1\nchunk_tokens: 2\n", "line 3: is not right YAML: the key"),
        (b"- a\n- b\n", "holds no mapping"),
        (b"50GiB\n", "holds no mapping"),
        (b"a: 1\n---\nb: 2\n", "is not right YAML"),
        (b"\xff\xfe\xff", "is not right YAML"),
        (b"a: \x00", "is not right YAML"),
        (b"a: 2024-99-99\n", "is not right YAML"),
        (b"? [a]\n: 1\n", "is not right YAML: found unhashable key"),
        (b"a: !!python/name:os.system\n", "line 1: is not right YAML"),
        (b"[" * 600, "is not right YAML"),
    ],
)
@pytest.mark.parametrize("variable", ["KVKEEP_CONFIG_FILE", "LMCACHE_CONFIG_FILE"])
def test_a_file_that_is_not_settings(
    tmp_path: Path, variable: str, content: bytes, message: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_config(env={variable: str(path)})
    assert str(error.value).startswith(f"{variable} {path}")
    assert message in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory") as error:
        load_config(env={"KVKEEP_CONFIG_FILE": str(tmp_path / "no.yaml")})
    assert "KVKEEP_CONFIG_FILE" in str(error.value)
    with pytest.raises(ConfigError, match=r"settings file .*: cannot be read: Is a directory"):
        load_config(env={}, file=str(tmp_path))


def test_a_broken_file_does_not_print_its_values(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("remote:\n  url: redis://:hunter2@h: x: y\n")
    with pytest.raises(ConfigError, match="line 2") as error:
        load_config(env={}, file=str(path))
    assert "hunter2" not in str(error.value)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("# nothing yet\n")
    assert set(load_config(env={}, file=str(path)).sources.values()) == {"default"}


def test_merge_keys_are_not_taken_for_doubles(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("memory: &m {policy: fifo, size: 9}\ndisk:\n  <<: *m\n  size: 7\n  paths: /a\n")
    config = load_config(env={}, file=str(path)).config
    assert (config.disk.policy, config.disk.size_bytes) == ("fifo", 7 * GIB)


def test_yaml_words_and_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "self_test: off\nmemory: {size: 0.5}\nfetch_timeout_s: 3\n"
        "disk: {odirect: on, paths: [/a, /b], size: 100}\n"
    )
    config = load_config(env={}, file=str(path)).config
    assert config.self_test is False
    assert config.memory.size_bytes == GIB // 2
    assert config.disk.odirect == "on"
    assert config.disk.paths == ("/a", "/b")
    assert config.disk.size_bytes == 100 * GIB
