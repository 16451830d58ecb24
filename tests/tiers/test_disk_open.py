import errno
import fcntl
import os
import time

import pytest
from disk_helpers import (
    MIB,
    PAGE,
    files_below,
    kept,
    opened,
    path_of,
    put_file,
    store,
)

from kvkeep.errors import TierError, TierUnavailable
from kvkeep.testing.tiers import NAMESPACE, key_of, load_one, value_of
from kvkeep.tiers.disk import DiskTier


def temp_of(root, number, token="0123456789abcdef"):
    path = path_of(root, key_of(number))
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f"{path.name}.{token}-7.tmp")
    temp.write_bytes(b"half")
    return temp


def test_sweeps_what_the_dead_left_half_written(tmp_path):
    temp = temp_of(tmp_path, 1)
    lock = tmp_path / ".kvkeep" / "0123456789abcdef.lock"
    lock.parent.mkdir()
    lock.touch()
    tier = opened(tmp_path)
    assert not temp.exists()
    assert not lock.exists()
    assert kept(tier, [1]) == []
    tier.close()
    assert list(lock.parent.iterdir()) == []


def test_leaves_what_the_living_are_writing(tmp_path):
    first = opened(tmp_path)
    (lock,) = (tmp_path / ".kvkeep").iterdir()
    temp = temp_of(tmp_path, 1, token=lock.stem)
    second = opened(tmp_path)
    assert temp.exists()
    first.close()
    second.close()
    opened(tmp_path).close()
    assert not temp.exists()


def test_signs_again_where_another_took_its_sign_for_a_dead_one(tmp_path, monkeypatch):
    flock = fcntl.flock
    taken = []

    def take_the_first(fd, operation):
        if not taken:
            taken.extend((tmp_path / ".kvkeep").iterdir())
            taken[0].unlink()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", take_the_first)
    opened(tmp_path)
    assert list((tmp_path / ".kvkeep").iterdir()) == taken


def test_where_there_is_no_flock_only_old_temp_files_are_swept(tmp_path, monkeypatch):
    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    fresh, old = temp_of(tmp_path, 1), temp_of(tmp_path, 2)
    os.utime(old, (time.time() - 7200,) * 2)
    opened(tmp_path).close()
    assert fresh.exists()
    assert not old.exists()


def test_leaves_foreign_files_alone_and_says_so_once(tmp_path, caplog):
    digest = key_of(1).digest.hex()
    shard = tmp_path / NAMESPACE / "r0" / digest[:2]
    shard.mkdir(parents=True)
    (tmp_path / "lost+found").mkdir()
    foreign = [
        tmp_path / "notes.txt",
        tmp_path / NAMESPACE / "rank0",
        tmp_path / NAMESPACE / "r0" / "abc",
        shard / f"{digest[:32]}{digest[32:].upper()}.kv",
        shard / f"{digest}.kv.bak",
        shard / f"{digest[:-2]}  .kv",
        shard / f"{'0' * 64}.kv",
    ]
    for path in foreign:
        path.write_bytes(b"mine")
    (shard / f"{digest}.kv").symlink_to(foreign[0])
    tier = opened(tmp_path)
    assert tier.stats().foreign_files == len(foreign) + 1
    assert list(tier.keys()) == []
    assert all(path.read_bytes() == b"mine" for path in foreign)
    assert len([record for record in caplog.records if "not kvkeep's" in record.message]) == 1


def test_empty_files_are_removed(tmp_path):
    path = put_file(tmp_path, key_of(1), b"")
    tier = opened(tmp_path)
    assert kept(tier, [1]) == []
    assert not path.exists()


def test_finds_chunks_when_the_list_of_directories_changes(tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    tier = DiskTier([a, b], 64 * MIB)
    tier.open()
    store(tier, *range(20))
    assert files_below(a)
    assert files_below(b)
    tier.close()
    tier = DiskTier([c, b, a, str(a) + "/."], 64 * MIB)
    tier.open()
    assert kept(tier, range(20)) == list(range(20))
    assert tier.stats().used_bytes == 20 * PAGE
    assert all(load_one(tier, key_of(number)) == value_of(number, PAGE) for number in range(20))
    tier.close()


def test_keeps_the_newer_of_two_files_under_one_key(tmp_path):
    older = put_file(tmp_path / "a", key_of(1), value_of(1, PAGE))
    newer = put_file(tmp_path / "b", key_of(1), value_of(1, 2 * PAGE))
    os.utime(older, (1e9, 1e9))
    tier = DiskTier([tmp_path / "a", tmp_path / "b"], 64 * MIB)
    tier.open()
    assert not older.exists()
    assert newer.exists()
    assert tier.stats().used_bytes == 2 * PAGE
    tier.close()


def test_a_link_between_directories_is_not_a_second_file(tmp_path):
    path = put_file(tmp_path / "a", key_of(1), value_of(1, PAGE))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / NAMESPACE).symlink_to(tmp_path / "a" / NAMESPACE)
    tier = DiskTier([tmp_path / "a", tmp_path / "b"], 64 * MIB)
    tier.open()
    assert path.exists()
    assert tier.stats().used_bytes == PAGE
    tier.close()


def test_reads_5000_names_quickly(tmp_path):
    for number in range(5000):
        put_file(tmp_path, key_of(number), b"x")
    began_s = time.process_time()  # what other processes do is not its fault
    tier = opened(tmp_path)
    seconds = time.process_time() - began_s
    assert tier.stats().chunks == 5000
    assert seconds < 0.5  # 0.05 s where it was written


def test_a_wrong_policy_or_no_directory_is_said_at_once(tmp_path):
    with pytest.raises(ValueError, match="lrru"):
        DiskTier([tmp_path], MIB, policy_name="lrru")
    with pytest.raises(TierUnavailable):
        DiskTier([], MIB).open()


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match="file/cache: "):
        opened(tmp_path / "file" / "cache")


def test_is_of_no_use_before_open_and_after_close(tmp_path):
    tier = DiskTier([tmp_path], MIB)
    assert tier.contains([key_of(1)]) == [False]
    with pytest.raises(TierUnavailable):
        load_one(tier, key_of(1))
    tier.open()
    store(tier, 1)
    tier.close()
    assert tier.contains([key_of(1)]) == [False]
    with pytest.raises(TierUnavailable):
        store(tier, 1)
