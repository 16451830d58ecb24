import errno
import itertools
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from disk_helpers import (
    MIB,
    PAGE,
    disk_usage,
    files_below,
    kept,
    opened,
    path_of,
    put_file,
    store,
)

from kvkeep.errors import TierError, TierFull, TierUnavailable
from kvkeep.testing.tier_model import check_against_model
from kvkeep.testing.tiers import NAMESPACE, TierTests, aligned, key_of, load_one, value_of
from kvkeep.tiers import disk_files
from kvkeep.tiers.disk import DiskTier


class TestDiskTier(TierTests):
    keeps_after_close = True

    def make(self, where):
        return DiskTier([where / "one", where / "two"], 64 * MIB)

    def raw_get(self, where, key):
        found = [path for path in files_below(where) if path.name == f"{key.digest.hex()}.kv"]
        return found[0].read_bytes() if found else None

    def raw_put(self, where, key, value):
        put_file(where / "two", key, value)


class TestDiskTierWithoutDirect(TestDiskTier):
    def make(self, where):
        return DiskTier([where / "one", where / "two"], 64 * MIB, odirect="off")


def test_a_tier_with_little_room_may_forget_but_not_lie(tmp_path):
    numbers = itertools.count()
    check_against_model(lambda: DiskTier([tmp_path / str(next(numbers))], 5 * PAGE), forgets=True)


def test_evicts_the_least_recently_used_to_make_room(tmp_path):
    tier = opened(tmp_path, 4 * PAGE)
    store(tier, 1, 2, 3, 4)
    assert load_one(tier, key_of(1)) is not None
    tier.contains([key_of(2)])  # a question is not a use
    store(tier, 5)
    assert kept(tier, range(1, 6)) == [1, 3, 4, 5]
    assert len(files_below(tmp_path)) == 4
    assert tier.stats().evicted == 1
    assert tier.stats().used_bytes == 4 * PAGE
    tier.check_integrity()


def test_the_start_of_a_batch_outlives_its_end(tmp_path):
    tier = opened(tmp_path, 4 * PAGE)
    keys = [key_of(number) for number in range(6)]
    tier.store(keys, [aligned(value_of(0, PAGE))] * 6)
    assert kept(tier, range(6)) == [0, 1, 2, 3]


def test_room_is_counted_in_whole_blocks(tmp_path):
    tier = opened(tmp_path, 4 * PAGE)
    store(tier, 1, nbytes=1)
    store(tier, 2, nbytes=PAGE + 1)
    assert tier.stats().used_bytes == 3 * PAGE


def test_what_cannot_fit_is_skipped_and_counted(tmp_path):
    tier = opened(tmp_path, 4 * PAGE)
    store(tier, 1)
    values = [aligned(value_of(2, PAGE)), aligned(value_of(3, 5 * PAGE)), aligned(b"")]
    tier.store([key_of(2), key_of(3), key_of(4)], values)
    assert kept(tier, range(1, 5)) == [1, 2]
    assert tier.stats().refused == 2
    tier.check_integrity()


def test_the_cap_counts_what_was_there_before(tmp_path):
    tier = opened(tmp_path, 8 * PAGE)
    store(tier, *range(8))
    tier.close()
    tier = opened(tmp_path, 8 * PAGE)
    assert tier.stats().used_bytes == 8 * PAGE
    store(tier, 8, 9)
    assert len(files_below(tmp_path)) == 8


def test_a_lower_cap_evicts_the_oldest_at_open(tmp_path):
    tier = opened(tmp_path, 8 * PAGE)
    store(tier, *range(8))
    tier.close()
    for number in range(8):  # stored faster than the file system's clock ticks
        os.utime(path_of(tmp_path, key_of(number)), (1e9 + number, 1e9 + number))
    tier = opened(tmp_path, 3 * PAGE)
    assert kept(tier, range(8)) == [5, 6, 7]
    assert len(files_below(tmp_path)) == 3


def test_a_load_counts_over_a_restart(tmp_path):
    tier = opened(tmp_path, 8 * PAGE)
    store(tier, *range(4))
    tier.close()
    for number in range(4):
        os.utime(path_of(tmp_path, key_of(number)), (1e9 + number, 1e9 + number))
    tier = opened(tmp_path, 8 * PAGE)
    assert load_one(tier, key_of(0)) is not None
    tier.close()
    tier = opened(tmp_path, 2 * PAGE)
    assert kept(tier, range(4)) == [0, 3]


def test_a_time_is_set_once_in_a_while(tmp_path, monkeypatch):
    path = put_file(tmp_path, key_of(1), value_of(1, PAGE))
    os.utime(path, (1e9, 1e9))
    tier = opened(tmp_path)
    utime, times = os.utime, []
    monkeypatch.setattr(os, "utime", lambda fd: (times.append(fd), utime(fd)))
    for _ in range(3):
        assert load_one(tier, key_of(1)) is not None
    assert len(times) == 1
    assert path.stat().st_mtime > 1e9


class Ledger:
    """Stands in for `os.pwritev` and `os.unlink`: the room that files take, from before the first
    byte is written to after the name is gone."""

    def __init__(self):
        self.pwritev, self.real_unlink = os.pwritev, os.unlink
        self.lock = threading.Lock()
        self.used = self.worst = 0

    def write(self, fd, views, at):
        with self.lock:
            self.used += views[0].nbytes
            self.worst = max(self.worst, self.used)
        return self.pwritev(fd, views, at)

    def unlink(self, path):
        nbytes = os.stat(path).st_size if path.endswith(".kv") else 0
        time.sleep(0.001)  # others should not get the room before it is there
        self.real_unlink(path)
        with self.lock:
            self.used -= nbytes


def test_many_threads_never_exceed_the_cap(tmp_path, monkeypatch):
    cap = 20 * PAGE
    tier = opened(tmp_path, cap)
    ledger = Ledger()
    monkeypatch.setattr(os, "pwritev", ledger.write)
    monkeypatch.setattr(os, "unlink", ledger.unlink)

    def work(seed):
        for number in range(40):
            store(tier, 1000 * seed + number, nbytes=PAGE * (1 + 3 * (number % 3)))

    with ThreadPoolExecutor(6) as threads:
        for job in [threads.submit(work, seed) for seed in range(6)]:
            job.result()
    tier.check_integrity()
    assert cap - 10 * PAGE < ledger.worst <= cap
    assert tier.stats().used_bytes == disk_usage(tmp_path) == ledger.used


def test_describes_a_namespace_once(tmp_path):
    tier = opened(tmp_path)
    tier.describe(NAMESPACE, {"model": "m", "dtype": "bfloat16"})
    tier.describe(NAMESPACE, {"model": "another"})
    text = (tmp_path / NAMESPACE / "namespace.json").read_text()
    assert json.loads(text) == {"dtype": "bfloat16", "model": "m"}
    tier.close()
    assert opened(tmp_path).stats().foreign_files == 0
    with pytest.raises(TierError):
        tier.describe(NAMESPACE, {})


def test_only_the_owner_reads_the_chunks(tmp_path):
    tier = opened(tmp_path)
    store(tier, 1)
    assert path_of(tmp_path, key_of(1)).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, TierFull), (errno.EDQUOT, TierFull), (errno.EIO, TierUnavailable)],
)
def test_errors_say_what_and_where(number, kind):
    error = disk_files.tier_error(OSError(number, os.strerror(number)), "cannot write", "/a/b")
    assert type(error) is kind
    assert str(error) == f"cannot write /a/b: {os.strerror(number)}"
