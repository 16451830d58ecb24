import os
import re
import shutil
import struct

import pytest
from kept_data import (
    FRAME_NBYTES,
    OTHER,
    SPACE,
    digest_of,
    files_below,
    flip,
    frame_of,
    keep,
    leave_temp,
    run,
    run_json,
)

from kvkeep.cli import frame_check, verify
from kvkeep.cli.frame_check import FrameChecker, remove_if_same
from kvkeep.tiers.disk_presence import Presence
from kvkeep.types import ChunkKey

SUMMARY = re.compile(
    r"verify: files=(\d+) bad=(\d+) temporary=(\d+) foreign=(\d+) bytes=(\d+) "
    r"seconds=\d+\.\d\d( deleted=\d+)?"
)


def moved(file, *, namespace=SPACE.name, rank=0, number=1):
    """Give the file another name."""
    digest = digest_of(number).hex()
    target = file.parents[3] / namespace / f"r{rank}" / digest[:2] / f"{digest}.kv"
    target.parent.mkdir(parents=True, exist_ok=True)
    file.rename(target)
    return target


def put_version(file, version):
    content = bytearray(file.read_bytes())
    struct.pack_into("<H", content, 8, version)
    file.write_bytes(content)


def longer(file, nbytes=4096):
    with file.open("ab") as stream:
        stream.write(bytes(nbytes))


DAMAGES = {
    "magic": lambda file: flip(file, 0),
    "version": lambda file: put_version(file, 9),
    "header": lambda file: flip(file, 70),
    "checksum": lambda file: flip(file, 4096 + 4999),
    "truncated": lambda file: os.truncate(file, FRAME_NBYTES - 4096),
    "truncated, in the header": lambda file: os.truncate(file, 100),
    "truncated, empty": lambda file: os.truncate(file, 0),
    "length": longer,
    "length, unaligned": lambda file: longer(file, 1),
    "digest": lambda file: moved(file, number=99),
    "rank": lambda file: moved(file, rank=3),
    "namespace": lambda file: moved(file, namespace=OTHER.name),
}


def test_all_is_well(capsys, tmp_path):
    keep(tmp_path, ranks=2)
    status, (summary,), errors = run(capsys, "verify", tmp_path)
    assert (status, errors) == (0, [])
    counts = [*map(int, SUMMARY.fullmatch(summary).groups()[:5])]
    assert counts == [8, 0, 0, 0, 8 * FRAME_NBYTES]


def test_nothing(capsys, tmp_path):
    status, (summary,), _ = run(capsys, "verify", tmp_path)
    assert status == 0
    assert summary.startswith("verify: files=0 bad=0 temporary=0 foreign=0 bytes=0 seconds=")


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_found_and_deleted(capsys, tmp_path, damage):
    files = keep(tmp_path)
    bad = DAMAGES[damage](files[1]) or files[1]
    reason = damage.partition(",")[0]

    status, document = run_json(capsys, "verify", tmp_path)
    assert status == 1
    (one,) = document["bad"]
    assert (one["path"], one["reason"]) == (str(bad), reason)
    assert (document["files"], document["deleted"]) == (4, None)
    assert bad.exists()

    status, lines, _ = run(capsys, "verify", tmp_path, "--delete", "--jobs", 1)
    assert status == 1
    assert lines[0].startswith(f"bad: {bad}: {reason}: ")
    assert lines[-1].endswith(" deleted=1")
    assert not bad.exists()
    assert run(capsys, "verify", tmp_path)[0] == 0
    assert all(file.exists() for file in files if file != files[1])


def test_one_namespace_only(capsys, tmp_path):
    for file in keep(tmp_path):
        flip(file, 5000)
    keep(tmp_path, namespace=OTHER, numbers=[1])
    assert run_json(capsys, "verify", tmp_path, "--namespace", OTHER.name)[0] == 0
    status, document = run_json(capsys, "verify", tmp_path, "--namespace", SPACE.name)
    assert (status, len(document["bad"]), document["files"]) == (1, 4, 4)


def test_temporary_and_foreign_are_told_and_not_wrong(capsys, tmp_path):
    files = keep(tmp_path)
    temp = leave_temp(files[0])
    stray = files[0].parent / "notes.txt"
    stray.touch()
    (tmp_path / "odd\nname").touch()
    status, document = run_json(capsys, "verify", tmp_path)
    assert status == 0
    assert [one["path"] for one in document["temporary"]] == [str(temp)]
    assert document["foreign"] == sorted([str(stray), f"{tmp_path}/odd\nname"])
    lines = run(capsys, "verify", tmp_path)[1]
    assert f"temporary: {temp}: 0s old" in lines
    assert f"foreign: '{tmp_path}/odd\\nname'" in lines
    assert temp.exists()


def test_delete_leaves_foreign_files_and_what_is_being_written(capsys, tmp_path):
    files = keep(tmp_path)
    presence = Presence([str(tmp_path)])
    presence.enter()
    live = leave_temp(files[0], presence.token)
    dead = leave_temp(files[0])
    (tmp_path / "notes.txt").touch()
    status, document = run_json(capsys, "verify", tmp_path, "--delete")
    presence.leave()
    assert (status, document["deleted"]) == (0, {"bad": 0, "temporary": 1})
    assert live.exists()
    assert not dead.exists()
    assert (tmp_path / "notes.txt").exists()


def test_what_vanishes_while_we_look_is_no_error(capsys, monkeypatch, tmp_path):
    files = keep(tmp_path)
    temp = leave_temp(files[0])
    look = verify.look

    def look_then_evict(*args):
        kept = look(*args)
        files[0].unlink()
        temp.unlink()
        return kept

    monkeypatch.setattr(verify, "look", look_then_evict)
    status, document = run_json(capsys, "verify", tmp_path, "--delete")
    assert status == 0
    assert (document["files"], document["vanished"], document["temporary"]) == (3, 1, [])


def test_a_file_that_is_replaced_all_the_time_is_not_called_good(monkeypatch, tmp_path):
    (file,) = keep(tmp_path, numbers=[1])
    monkeypatch.setattr(frame_check, "read_file", lambda *_, **__: False)
    checked = FrameChecker(direct=False).check(str(file), ChunkKey(SPACE.name, 0, digest_of(1)))
    assert (checked.is_gone, checked.bad, checked.nbytes) == (True, None, 0)


def test_a_bad_file_that_was_replaced_is_not_deleted(tmp_path):
    (file,) = keep(tmp_path, numbers=[1])
    good = file.read_bytes()
    flip(file, 5000)
    bad = FrameChecker(direct=False).check(str(file), ChunkKey(SPACE.name, 0, digest_of(1))).bad
    new = file.with_suffix(".new")
    new.write_bytes(good)
    new.replace(file)
    assert remove_if_same(bad) is False
    assert file.exists()
    file.unlink()
    assert remove_if_same(bad) is False


@pytest.mark.parametrize(("code", "removed"), [(5, 1), (13, 0)])
def test_a_file_that_cannot_be_read(capsys, monkeypatch, tmp_path, code, removed):
    files = keep(tmp_path)

    def fail(path, *_, **__):
        if path == str(files[2]):
            raise OSError(code, os.strerror(code), path)
        return read_file(path, *_, **__)

    read_file = frame_check.read_file
    monkeypatch.setattr(frame_check, "read_file", fail)
    status, document = run_json(capsys, "verify", tmp_path, "--delete")
    assert status == 1
    assert [one["reason"] for one in document["bad"]] == ["unreadable"]
    # What is lost on the device is of no use; what we may not read may be another's.
    assert document["deleted"]["bad"] == removed
    assert files[2].exists() is not bool(removed)


def test_frames_of_different_lengths_with_one_buffer(tmp_path):
    checker = FrameChecker(direct=False)
    for number, nbytes in enumerate([1, 100_000, 0, 4096]):
        path = tmp_path / str(number)
        path.write_bytes(frame_of(SPACE, number, payload_nbytes=nbytes))
        checked = checker.check(str(path), ChunkKey(SPACE.name, 0, digest_of(number)))
        assert (checked.bad, checked.nbytes) == (None, path.stat().st_size)


def test_progress_on_a_terminal(capsys, monkeypatch, tmp_path):
    keep(tmp_path)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    _, out, err = run(capsys, "verify", tmp_path)
    assert len(out) == 1
    assert "verify: 4 of 4 files, 48.0 KiB" in "".join(err)


def test_many_jobs_count_every_file_once(capsys, tmp_path):
    files = keep(tmp_path, numbers=range(100))
    for file in files[::10]:
        flip(file, 4200)
    before = files_below(tmp_path)
    status, document = run_json(capsys, "verify", tmp_path, "--jobs", 16)
    assert (status, document["files"], len(document["bad"])) == (1, 100, 10)
    assert files_below(tmp_path) == before
    shutil.rmtree(tmp_path)
