import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from disk_helpers import (
    PAGE,
    disk_usage,
    kept,
    opened,
    path_of,
    put_file,
    store,
)

from kvkeep.testing.tiers import aligned, key_of, load_one, value_of
from kvkeep.tiers import disk


def test_two_tiers_find_each_others_files_and_share_the_cap(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "RESCAN_S", 0.0)
    monkeypatch.setattr(disk, "RESCAN_SHARE", 1e9)
    first, second = opened(tmp_path, 8 * PAGE), opened(tmp_path, 8 * PAGE)
    store(first, *range(6))
    store(second, *range(6, 12))  # looks around after each
    assert disk_usage(tmp_path) == 8 * PAGE
    assert second.stats().used_bytes == 8 * PAGE
    assert len(kept(second, range(12))) == 8
    gone = [number for number in range(6) if not path_of(tmp_path, key_of(number)).exists()]
    assert gone
    assert load_one(first, key_of(gone[0])) is None
    store(first, 20)
    assert first.stats().used_bytes == disk_usage(tmp_path) <= 8 * PAGE
    first.check_integrity()
    second.check_integrity()


def test_alone_it_does_not_look_again(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "RESCAN_S", 0.0)
    monkeypatch.setattr(disk, "RESCAN_SHARE", 1e9)
    tier = opened(tmp_path)
    put_file(tmp_path, key_of(1), b"x")
    store(tier, 2)
    assert kept(tier, [1, 2]) == [2]


def test_what_changes_during_a_look_is_known_better(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "RESCAN_S", 0.0)
    monkeypatch.setattr(disk, "RESCAN_SHARE", 1e9)
    tier, other = opened(tmp_path), opened(tmp_path)
    store(tier, 1, 2)
    scandir = os.scandir
    deeds = [lambda: store(tier, 3), lambda: tier.delete([key_of(1)])]

    class Scan:
        """Lists a directory, and lets another thread do something before that is used."""

        def __init__(self, path):
            with scandir(path) as entries:
                self.entries = list(entries)
            if deeds and Path(path).parent.name == "r0":
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(deeds.pop()).result()

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(os, "scandir", Scan)
    store(tier, 4)
    monkeypatch.undo()
    assert deeds == []
    assert kept(tier, range(1, 5)) == [2, 3, 4]
    tier.check_integrity()
    other.close()


def hammer(where, seed, failures):
    try:
        disk.RESCAN_S = 0.05
        tier = opened(where, 32 * PAGE)
        for step in range(150):
            numbers = [(seed + step * 7 + extra) % 60 for extra in range(3)]
            keys = [key_of(number) for number in numbers]
            tier.store(keys, [aligned(value_of(number, PAGE)) for number in numbers])
            into = [aligned(bytes(PAGE)) for _ in numbers]
            for number, count, view in zip(numbers, tier.load(keys, into), into, strict=True):
                if count is not None and (count != PAGE or view != value_of(number, PAGE)):
                    failures.put(f"{number}: {count} bytes")
            tier.delete(keys[:1])
            tier.check_integrity()
        tier.close()
    except BaseException as error:
        failures.put(repr(error))
        raise


def test_two_processes_on_one_directory_do_no_harm(tmp_path):
    context = multiprocessing.get_context("spawn")
    failures = context.Queue()
    processes = [
        context.Process(target=hammer, args=(tmp_path, seed, failures)) for seed in (0, 31)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert failures.empty()
    failures.close()
    failures.join_thread()
    assert list(tmp_path.rglob("*.tmp")) == []
    tier = opened(tmp_path, 32 * PAGE)
    assert disk_usage(tmp_path) <= 32 * PAGE
    tier.close()


def write_for_ever(where, writing):
    def hang(*_):
        writing.set()
        time.sleep(600)

    os.pwritev = hang
    store(opened(where, odirect="off"), 1)


def test_what_a_killed_process_was_writing_is_swept(tmp_path):
    context = multiprocessing.get_context("spawn")
    writing = context.Event()
    process = context.Process(target=write_for_ever, args=(tmp_path, writing))
    process.start()
    assert writing.wait(60)
    opened(tmp_path)
    assert len(list(tmp_path.rglob("*.tmp"))) == 1
    process.kill()
    process.join(60)
    opened(tmp_path)
    assert list(tmp_path.rglob("*.tmp")) == []
