import os

from kept_data import FRAME_NBYTES, OTHER, keep, leave_temp, run, run_json

from kvkeep.cli import direct_reads


def test_totals(capsys, tmp_path):
    root = tmp_path / "kept"
    files = keep(root, ranks=2)
    keep(root, namespace=OTHER, numbers=[1, 2])
    leave_temp(files[0])
    (root / "notes.txt").touch()
    status, document = run_json(capsys, "stat", root)
    (one,) = document["directories"]
    room = os.statvfs(root)
    assert status == 0
    assert one["directory"] == str(root)
    assert one["frame_bytes"] == 10 * FRAME_NBYTES
    assert one["used_bytes"] >= one["frame_bytes"]
    assert (one["chunks"], one["files"], one["namespaces"]) == (6, 10, 2)
    assert (one["temporary"], one["foreign"]) == (1, 1)
    assert one["size_bytes"] == room.f_blocks * room.f_frsize
    assert 0 < one["free_bytes"] <= one["size_bytes"]
    assert one["direct"] in (True, False)


def test_a_block_for_each_directory(capsys, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    status, lines, errors = run(capsys, "stat", tmp_path / "a", tmp_path / "b")
    assert (status, errors) == (0, [])
    assert [line.split()[1] for line in lines if line.startswith("directory")] == [
        str(tmp_path / "a"),
        str(tmp_path / "b"),
    ]
    assert "O_DIRECT    unknown: no chunk to try it on" in lines


def test_nothing_is_changed(capsys, tmp_path):
    keep(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    run(capsys, "stat", tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_direct_reads_that_the_file_system_refuses(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(4096))

    def refuse(*_):
        raise OSError(22, "Invalid argument")

    assert direct_reads.takes_direct_reads([str(tmp_path / "gone")]) is None
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", refuse)
        assert direct_reads.takes_direct_reads([str(file)]) is False
    monkeypatch.setattr(os, "open", refuse)
    assert direct_reads.takes_direct_reads([str(file)]) is False
