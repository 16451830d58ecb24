import os
from dataclasses import replace

import pytest
from kept_data import FRAME_NBYTES, keep

from kvkeep.cli import checks_disk as checks
from kvkeep.cli.checks_disk import DirectoryFacts
from kvkeep.config import DiskConfig

GIB = 1 << 30
FACTS = DirectoryFacts("/d", "/d", 1, "ext4", 100 * GIB, 10 * GIB, None, None)


def test_no_disk_tier():
    (finding,) = checks.disk(DiskConfig(), [])
    assert finding.status == "OK"
    assert "no disk tier" in finding.says


def test_a_directory_that_is_there(tmp_path):
    keep(tmp_path)
    before = set(tmp_path.rglob("*"))
    facts = checks.directory_facts(str(tmp_path))
    assert (facts.path, facts.there) == (str(tmp_path), str(tmp_path))
    assert facts.kept_bytes == 4 * FRAME_NBYTES
    assert facts.problem is None
    assert facts.free_bytes > 0
    assert set(tmp_path.rglob("*")) == before


def test_a_directory_that_is_not_there_yet(tmp_path):
    facts = checks.directory_facts(str(tmp_path / "a" / "b"))
    assert facts.there == str(tmp_path)
    assert checks.usable(facts).says.endswith(f"can be made in {tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").touch()
    facts = checks.directory_facts(str(tmp_path / "file" / "b"))
    finding = checks.usable(facts)
    assert finding.status == "FAIL"
    assert finding.says.endswith(f"{tmp_path}/file is not a directory")


def test_not_writable(monkeypatch, tmp_path):
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        assert checks.directory_facts(str(tmp_path)).problem == f"{tmp_path} is not writable"

    def refuse(_):
        raise OSError(30, "Read-only file system", "/x")

    monkeypatch.setattr(checks, "why_not_direct", refuse)
    (failed,) = checks.disk(DiskConfig(), [str(tmp_path)])  # and no word of its room
    assert failed.status == "FAIL"
    assert failed.says.endswith("/x: Read-only file system")


def test_a_namespace_for_a_directory(tmp_path):
    (file,) = keep(tmp_path, numbers=[1])
    finding = checks.usable(checks.directory_facts(str(file.parents[2])))
    assert finding.status == "FAIL"
    assert "one namespace's own directory" in finding.says


@pytest.mark.parametrize(
    ("odirect", "reason", "status"),
    [
        ("auto", None, "OK"),
        ("auto", "Invalid argument", "WARN"),
        ("on", "Invalid argument", "WARN"),
        ("off", "Invalid argument", "OK"),
    ],
)
def test_direct(odirect, reason, status):
    finding = checks.direct(replace(FACTS, why_not_direct=reason), odirect)
    assert finding.status == status


@pytest.mark.parametrize(
    ("fs_type", "status"),
    [
        *(("ext4", "OK"), ("xfs", "OK"), ("unknown", "OK")),
        *(("tmpfs", "WARN"), ("overlay", "WARN"), ("nfs4", "WARN"), ("fuse.s3fs", "WARN")),
    ],
)
def test_file_system(fs_type, status):
    finding = checks.file_system(replace(FACTS, fs_type=fs_type))
    assert finding.status == status
    assert fs_type in finding.says


def test_fs_type_is_the_innermost_and_last_mount(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw shared:1 - ext4 /dev/a rw\n"
        "2 1 0:5 / /mnt rw - tmpfs none rw\n"
        "3 1 0:6 / /mnt rw master:2 - xfs /dev/b rw\n"
        "4 1 0:7 / /mnt/a\\040b rw - nfs4 host:/ rw\n"
    )
    for path, fs_type in {
        "/": "ext4",
        "/mntx": "ext4",
        "/mnt": "xfs",
        "/mnt/d": "xfs",
        "/mnt/a b/c": "nfs4",
    }.items():
        assert checks.fs_type_of(path, str(mounts)) == fs_type
    assert checks.fs_type_of("/", str(tmp_path / "none")) == "unknown"


def test_room_without_a_cap():
    (finding,) = checks.room([FACTS], 0)
    assert (finding.status, finding.says) == ("OK", "/d: 100 GiB free")


@pytest.mark.parametrize(("cap_gib", "status"), [(110, "OK"), (111, "WARN")])
def test_what_is_kept_already_counts_as_room(cap_gib, status):
    (finding,) = checks.room([FACTS], cap_gib * GIB)
    assert finding.status == status


def test_room_is_shared_by_directories_of_one_file_system():
    same = replace(FACTS, path="/e", kept_bytes=0)
    other = replace(FACTS, path="/f", device=2)
    one, two = checks.room([FACTS, same, other], 180 * GIB)
    assert (one.status, two.status) == ("WARN", "OK")
    assert one.says.startswith("/d, /e: 100 GiB free, but disk.size of 180GiB may take 120 GiB")
    assert one.remedy.endswith("to at most 165GiB")


def test_settings_and_arguments_are_checked_once_each(tmp_path):
    config = DiskConfig(paths=(str(tmp_path),), size_bytes=GIB, odirect="off")
    findings = list(checks.disk(config, [f"{tmp_path}/", str(tmp_path / "new")]))
    assert [finding.check for finding in findings] == [
        *("directory", "O_DIRECT", "file system"),
        *("directory", "O_DIRECT", "file system"),
        "room",
    ]
