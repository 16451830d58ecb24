import os
import shutil
import time

import pytest
from kept_data import FRAME_NBYTES, OTHER, SPACE, digest_of, keep, run, run_json


def test_nothing(capsys, tmp_path):
    assert run(capsys, "ls", tmp_path) == (0, ["nothing is kept here"], [])
    assert run_json(capsys, "ls", tmp_path) == (
        0,
        {"directories": [str(tmp_path)], "namespaces": []},
    )


def test_a_line_for_each_namespace_over_all_directories(capsys, tmp_path):
    roots = [tmp_path / "a", tmp_path / "b"]
    keep(*roots, numbers=range(12), ranks=2)
    keep(roots[0], namespace=OTHER, numbers=[1])
    status, document = run_json(capsys, "ls", *roots)
    assert status == 0
    other, space = document["namespaces"]
    newest = space.pop("newest_use_unix_s")
    assert time.time() - 60 < space.pop("oldest_use_unix_s") <= newest <= time.time()
    assert space == {
        "namespace": SPACE.name,
        "label": "tiny",
        "chunk_tokens": 16,
        "dtype": "bfloat16",
        "ranks": [0, 1],
        "chunks": 12,
        "files": 24,
        "bytes": 24 * FRAME_NBYTES,
    }
    assert other["label"] == "other/model"
    assert other["dtype"] == "fp8"


def test_table(capsys, tmp_path):
    files = keep(tmp_path)
    os.utime(files[0], (0, time.time() - 3 * 86400))
    status, (headers, row), errors = run(capsys, "ls", tmp_path)
    assert (status, errors) == (0, [])
    assert headers.split()[:5] == ["MODEL", "NAMESPACE", "RANKS", "CHUNKS", "SIZE"]
    assert row.split() == [
        *("tiny", SPACE.name, "1", "4", "48.0", "KiB"),
        *("3d", "ago", "0s", "ago", "16", "bfloat16"),
    ]


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff", b"{}"])
def test_a_description_that_cannot_be_read(capsys, tmp_path, content):
    keep(tmp_path)
    description = tmp_path / SPACE.name / "namespace.json"
    description.unlink()
    if content is not None:
        description.write_bytes(content)
    (one,) = run_json(capsys, "ls", tmp_path)[1]["namespaces"]
    assert (one["label"], one["chunk_tokens"], one["dtype"]) == (None, None, None)
    assert one["chunks"] == 4
    assert run(capsys, "ls", tmp_path)[1][1].startswith("? ")


def test_a_namespace_without_chunks(capsys, tmp_path):
    keep(tmp_path)
    shutil.rmtree(tmp_path / SPACE.name / "r0")
    (one,) = run_json(capsys, "ls", tmp_path)[1]["namespaces"]
    assert (one["chunks"], one["oldest_use_unix_s"]) == (0, None)
    assert " - " in run(capsys, "ls", tmp_path)[1][1]


def test_one_directory_named_twice_counts_once(capsys, tmp_path):
    keep(tmp_path)
    (one,) = run_json(capsys, "ls", tmp_path, f"{tmp_path}/")[1]["namespaces"]
    assert one["files"] == 4


def test_chunks_of_a_namespace_last_used_first(capsys, tmp_path):
    files = keep(tmp_path, ranks=2)
    keep(tmp_path, namespace=OTHER)
    now_s = time.time()
    for back_s, file in enumerate(files):
        os.utime(file, (0, now_s - 60 * back_s))
    status, document = run_json(capsys, "ls", tmp_path, "--namespace", SPACE.name)
    assert status == 0
    assert (document["namespace"], document["files"]) == (SPACE.name, 8)
    assert [one["path"] for one in document["chunks"]] == [str(file) for file in files]
    assert [one["rank"] for one in document["chunks"][:2]] == [0, 1]
    third = document["chunks"][2]
    assert third["digest"] == digest_of(1).hex()
    assert third["bytes"] == FRAME_NBYTES
    assert 119 < third["age_s"] < 180
    assert third["last_use_unix_s"] == pytest.approx(now_s - 120, abs=0.01)


def test_limit(capsys, tmp_path):
    keep(tmp_path)
    argv = ("ls", tmp_path, "--namespace", SPACE.name, "--limit", 1)
    assert len(run_json(capsys, *argv)[1]["chunks"]) == 1
    status, (headers, row, more), _ = run(capsys, *argv)
    assert status == 0
    assert headers.split() == ["RANK", "DIGEST", "SIZE", "AGE", "LAST", "USE"]
    assert row.split()[2:4] == ["12.0", "KiB"]
    assert more == "and 3 more"


def test_limit_is_for_chunks(capsys, tmp_path):
    assert run(capsys, "ls", tmp_path, "--limit", 1)[0] == 2


def test_an_unknown_namespace(capsys, tmp_path):
    keep(tmp_path)
    status, _, (error,) = run(capsys, "ls", tmp_path, "--namespace", f"{SPACE.name[:-1]}x")
    assert status == 2
    assert error.endswith(f"did you mean {SPACE.name}?")
    (tmp_path / "empty").mkdir()
    status, _, (error,) = run(capsys, "ls", tmp_path / "empty", "--namespace", "x")
    assert (status, error) == (2, "kvkeep ls: no namespace x there; nothing is kept there")
