import errno
import fcntl
import logging
import os

import pytest
from disk_helpers import (
    PAGE,
    disk_usage,
    kept,
    opened,
    path_of,
    put_file,
    store,
)

from kvkeep.errors import TierError, TierFull, TierUnavailable
from kvkeep.testing.tiers import aligned, key_of, load_one, value_of

# --- files that are not as they should be


@pytest.mark.parametrize("change", [-1, -PAGE, PAGE, 1])
def test_a_file_of_another_length_is_a_miss_and_removed(tmp_path, change):
    tier = opened(tmp_path)
    store(tier, 1, 2, nbytes=2 * PAGE)
    path = path_of(tmp_path, key_of(1))
    os.truncate(path, 2 * PAGE + change)
    into = [aligned(bytes(4 * PAGE)) for _ in range(2)]
    assert tier.load([key_of(1), key_of(2)], into) == [None, 2 * PAGE]
    assert not path.exists()
    assert tier.stats().failed_reads == 1
    assert kept(tier, [1, 2]) == [2]
    tier.check_integrity()


def test_a_file_that_is_gone_is_a_miss_and_forgotten(tmp_path):
    tier = opened(tmp_path)
    store(tier, 1)
    path_of(tmp_path, key_of(1)).unlink()
    assert load_one(tier, key_of(1)) is None
    assert kept(tier, [1]) == []
    assert tier.stats().used_bytes == 0


def test_a_file_evicted_while_it_is_open_is_still_read(tmp_path, monkeypatch):
    tier = opened(tmp_path)
    store(tier, 1)
    preadv = os.preadv

    def evict_then_read(fd, buffers, offset):
        tier.delete([key_of(1)])
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", evict_then_read)
    assert load_one(tier, key_of(1)) == value_of(1, PAGE)


def test_one_bad_file_does_not_fail_the_batch_but_a_bad_batch_does(tmp_path, monkeypatch):
    tier = opened(tmp_path)
    store(tier, 1, 2)
    bad = str(path_of(tmp_path, key_of(1)))
    real_open = os.open

    def open_some(path, *rest, **more):
        if path == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real_open(path, *rest, **more)

    monkeypatch.setattr(os, "open", open_some)
    into = [aligned(bytes(PAGE)) for _ in range(2)]
    assert tier.load([key_of(1), key_of(2)], into) == [None, PAGE]
    assert kept(tier, [1, 2]) == [2]
    store_anew = aligned(value_of(1, PAGE))
    tier.store([key_of(1)], [store_anew])
    with pytest.raises(TierUnavailable, match=r"cannot read .*Input/output error"):
        tier.load([key_of(1)], into[:1])
    assert tier.stats().failed_reads == 2


def test_a_read_that_ends_early_is_an_error(tmp_path, monkeypatch):
    tier = opened(tmp_path)
    store(tier, 1)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(TierError, match="ended after 0 of 4096 bytes"):
        load_one(tier, key_of(1))


def test_transfers_in_pieces_are_put_together(tmp_path, monkeypatch):
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [views[0][:1000]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:1000]], at))
    tier = opened(tmp_path)
    store(tier, 1, nbytes=3 * PAGE)
    assert load_one(tier, key_of(1)) == value_of(1, 3 * PAGE)


def test_a_store_takes_over_a_file_that_is_there(tmp_path):
    tier = opened(tmp_path)
    path = put_file(tmp_path, key_of(1), value_of(1, PAGE))
    inode = path.stat().st_ino
    store(tier, 1)
    assert path.stat().st_ino == inode
    assert load_one(tier, key_of(1)) == value_of(1, PAGE)
    put_file(tmp_path, key_of(2), b"of another length")
    store(tier, 2)
    assert load_one(tier, key_of(2)) == value_of(2, PAGE)
    tier.check_integrity()


# --- direct I/O


def test_goes_on_through_the_page_cache_where_direct_is_refused(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    real_open = os.open

    def refuse_direct(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real_open(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse_direct)
    for odirect, level in (("auto", logging.INFO), ("on", logging.WARNING)):
        caplog.clear()
        tier = opened(tmp_path / odirect, odirect=odirect)
        (record,) = caplog.records
        assert record.levelno == level
        assert "no O_DIRECT" in record.message
        assert "Invalid argument" in record.message
        assert not tier.stats().direct
        store(tier, 1)
        assert load_one(tier, key_of(1)) == value_of(1, PAGE)
        tier.close()


def test_a_transfer_that_is_refused_goes_on_without_direct(tmp_path, monkeypatch):
    """As the kernel does with a buffer that is not aligned well enough for the device."""
    pwritev = os.pwritev
    refused = []

    def refuse(fd, views, at):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(at)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwritev(fd, views, at)

    tier = opened(tmp_path)
    if not tier.stats().direct:
        pytest.skip("this file system has no O_DIRECT")
    monkeypatch.setattr(os, "pwritev", refuse)
    store(tier, 1)
    assert refused == [0]
    assert load_one(tier, key_of(1)) == value_of(1, PAGE)


def test_an_invalid_argument_without_direct_is_an_error(tmp_path, monkeypatch):
    def refuse(fd, views, at):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    tier = opened(tmp_path, odirect="off")
    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(TierError):
        store(tier, 1)


# --- a disk that is full or gone


class FullDisk:
    """Stands in for `os.pwritev` on a disk that has room for `blocks` more blocks."""

    def __init__(self, root, blocks):
        self.root, self.blocks, self.pwritev = root, blocks, os.pwritev

    def __call__(self, fd, views, at):
        if disk_usage(self.root) + sum(view.nbytes for view in views) > self.blocks * PAGE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.pwritev(fd, views, at)


def test_a_full_disk_is_answered_by_eviction(tmp_path, monkeypatch, caplog):
    tier = opened(tmp_path)
    monkeypatch.setattr(os, "pwritev", FullDisk(tmp_path, 3))
    store(tier, *range(5))
    assert kept(tier, range(5)) == [2, 3, 4]
    assert len([record for record in caplog.records if "is full" in record.message]) == 1
    tier.check_integrity()


def test_a_disk_that_stays_full_refuses_and_leaves_nothing(tmp_path, monkeypatch):
    tier = opened(tmp_path)
    monkeypatch.setattr(os, "pwritev", FullDisk(tmp_path, 0))
    with pytest.raises(TierFull, match="No space left"):
        store(tier, 1)
    assert tier.stats().used_bytes == 0
    assert disk_usage(tmp_path) == 0
    assert list(tmp_path.rglob("*.tmp")) == []
    monkeypatch.undo()
    store(tier, 1)
    assert kept(tier, [1]) == [1]
    tier.check_integrity()


def test_a_directory_that_is_gone_is_not_made_again(tmp_path):
    root = tmp_path / "disk"
    tier = opened(root)
    root.rename(tmp_path / "unmounted")
    with pytest.raises(TierUnavailable, match="No such file"):
        store(tier, 1)
    assert not root.exists()
    (tmp_path / "unmounted").rename(root)
    store(tier, 1)
    tier.check_integrity()


def test_a_victim_that_cannot_be_removed_is_kept_and_counted(tmp_path, monkeypatch):
    tier = opened(tmp_path, PAGE)
    store(tier, 1)
    unlink = os.unlink

    def refuse(path):
        if str(path).endswith(".kv"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(TierUnavailable, match=r"cannot remove .*Read-only"):
        store(tier, 2)
    assert kept(tier, [1, 2]) == [1]
    tier.check_integrity()
    with pytest.raises(TierUnavailable):
        tier.delete([key_of(1)])
    monkeypatch.undo()
    store(tier, 2)
    assert kept(tier, [1, 2]) == [2]


def test_a_namespace_cannot_lead_out_of_the_directory(tmp_path):
    tier = opened(tmp_path / "in")
    for namespace in ("../out", "a/b", ".", "", ".hidden"):
        with pytest.raises(TierError):
            tier.store([key_of(1, namespace=namespace)], [memoryview(b"x")])
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    tier.check_integrity()
