import argparse
import io
import os
import time

import pytest
from kept_data import FRAME_NBYTES, OTHER, SPACE, files_below, keep, leave_temp, run, run_json

from kvkeep.cli import clear
from kvkeep.tiers.disk_presence import Presence


class Terminal(io.StringIO):
    def isatty(self):
        return True


def aged(file, seconds):
    os.utime(file, (0, time.time() - seconds))


def test_all(capsys, tmp_path):
    files = keep(tmp_path, ranks=2)
    keep(tmp_path, namespace=OTHER, numbers=[1])
    leave_temp(files[0])  # now: opening a tier sweeps them
    status, document = run_json(capsys, "clear", tmp_path, "--yes")
    assert (status, document) == (
        0,
        {"files": 9, "bytes": 9 * FRAME_NBYTES, "temporary": 1, "namespaces": 2, "failed": 0},
    )
    assert [path.name for path in tmp_path.rglob("*")] == [".kvkeep"]


def test_one_namespace(capsys, tmp_path):
    keep(tmp_path)
    kept = keep(tmp_path, namespace=OTHER)
    status, lines, _ = run(capsys, "clear", tmp_path, "--namespace", SPACE.name, "--yes")
    assert status == 0
    assert lines == [f"clear: files=4 bytes={4 * FRAME_NBYTES} temporary=0 namespaces=1 failed=0"]
    assert not (tmp_path / SPACE.name).exists()
    assert all(file.exists() for file in kept)


def test_never_foreign(capsys, tmp_path):
    files = keep(tmp_path)
    strays = [
        tmp_path / "notes.txt",
        tmp_path / SPACE.name / "README",
        files[0].parent / "data.kv",
        files[0].parent / f"{'0' * 64}.kv",  # a chunk's name, in the wrong place
        files[1].parent / f"{files[1].name}.tmp",
        tmp_path / ".hidden" / "file",
    ]
    for stray in strays:
        stray.parent.mkdir(exist_ok=True)
        stray.write_text("mine")
    assert run(capsys, "clear", tmp_path, "--yes")[0] == 0
    # The description stays with what is still there.
    assert files_below(tmp_path) - set(strays) == {tmp_path / SPACE.name / "namespace.json"}
    assert all(stray.read_text() == "mine" for stray in strays)


def test_only_what_is_old(capsys, tmp_path):
    files = keep(tmp_path)
    old_temp, new_temp = leave_temp(files[0]), leave_temp(files[1])
    aged(files[0], 8 * 86400)
    aged(files[1], 6 * 86400)
    aged(old_temp, 8 * 86400)
    status, document = run_json(capsys, "clear", tmp_path, "--older-than", "7d", "--yes")
    assert status == 0
    assert (document["files"], document["temporary"], document["namespaces"]) == (1, 1, 0)
    assert files_below(tmp_path) == {
        *files[1:],
        new_temp,
        tmp_path / SPACE.name / "namespace.json",
    }


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("1.5m", 90), ("12h", 43200), ("7d", 604800), ("2w", 1209600), ("0s", 0)],
)
def test_ages(text, seconds):
    assert clear.parse_age_s(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "7 days", "1y", "1e3s"])
def test_not_ages(text):
    with pytest.raises(argparse.ArgumentTypeError, match="for example 12h or 7d"):
        clear.parse_age_s(text)


def test_refuses_where_nobody_can_be_asked(capsys, monkeypatch, tmp_path):
    files = keep(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    status, out, (error,) = run(capsys, "clear", tmp_path)
    assert (status, out) == (2, [])
    assert "would delete 4 files of 48.0 KiB" in error
    assert error.endswith("say --yes to do it")
    assert all(file.exists() for file in files)


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("YES\n", True), ("\n", False)])
def test_asks_on_a_terminal(capsys, monkeypatch, tmp_path, answer, gone):
    (file,) = keep(tmp_path, numbers=[1])
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    status, out, err = run(capsys, "clear", tmp_path)
    assert status == 0
    assert err[0].startswith("This deletes 1 files of 12.0 KiB")
    assert file.exists() is not gone
    assert bool(out) is gone


def test_nothing_to_do_needs_no_answer(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    keep(tmp_path)
    status, document = run_json(capsys, "clear", tmp_path, "--older-than", "1h")
    assert (status, document["files"]) == (0, 0)


def test_beside_an_engine_only_chunks_go(capsys, tmp_path):
    files = keep(tmp_path)
    presence = Presence([str(tmp_path)])
    presence.enter()
    live = leave_temp(files[0], presence.token)
    dead = leave_temp(files[0])
    status, document = run_json(capsys, "clear", tmp_path, "--yes")
    presence.leave()
    assert (status, document["files"], document["temporary"]) == (0, 4, 1)
    assert document["namespaces"] == 0
    assert live.exists()
    assert not dead.exists()
    # The engine makes these only once.
    assert (tmp_path / SPACE.name / "namespace.json").exists()
    assert files[1].parent.is_dir()


def test_what_cannot_be_deleted_is_said(capsys, monkeypatch, tmp_path):
    files = keep(tmp_path)
    unlink = os.unlink

    def refuse(path, *args, **kwargs):
        if str(path) == str(files[2]):
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", refuse)
    status, (report,), errors = run(capsys, "clear", tmp_path, "--yes")
    assert status == 1
    assert report.startswith("clear: files=3 ")
    assert report.endswith(" failed=1")
    assert errors == [f"kvkeep clear: cannot delete {files[2]}: Permission denied"]


def test_what_vanishes_meanwhile_is_no_error(capsys, monkeypatch, tmp_path):
    files = keep(tmp_path)
    look = clear.look

    def look_then_evict(*args):
        kept = look(*args)
        files[0].unlink(missing_ok=True)
        return kept

    monkeypatch.setattr(clear, "look", look_then_evict)
    status, document = run_json(capsys, "clear", tmp_path, "--yes")
    assert (status, document["files"], document["failed"]) == (0, 3, 0)
