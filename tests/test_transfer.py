"""The queue, by jobs that wait for each other."""

import threading
import time

import pytest

from kvkeep.errors import TierError, TierUnavailable
from kvkeep.testing.fake import PATIENCE_S, FakeClock
from kvkeep.transfer import Breaker, TransferQueue

FAILURE = TierError("made to fail")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def open_queue(clock):
    queues = []

    def make(num_threads=1, max_store_bytes=100):
        breaker = Breaker("fake", clock=clock)
        queue = TransferQueue(
            "fake", breaker, num_threads=num_threads, max_store_bytes=max_store_bytes
        )
        queue.open()
        queues.append(queue)
        return queue

    yield make
    for queue in queues:
        queue.close(timeout_s=1.0)


class Held:
    """A job that says that it runs, and goes on when it is let."""

    def __init__(self):
        self.runs = threading.Event()
        self.let_go = threading.Event()

    def __call__(self):
        self.runs.set()
        assert self.let_go.wait(PATIENCE_S)
        return "done"


def fails(error):
    def job():
        raise error

    return job


def result(future):
    return future.result(PATIENCE_S)


def test_runs_jobs_and_gives_their_results(open_queue):
    queue = open_queue(num_threads=2)
    assert [result(queue.load(lambda n=n: n)) for n in range(5)] == list(range(5))
    assert result(queue.store(lambda: "stored", 10)) == "stored"
    assert queue.flush(PATIENCE_S)
    assert queue.waiting_store_bytes == 0


def test_loads_go_before_stores(open_queue):
    queue = open_queue()
    ran = []
    first = Held()
    queue.load(first)
    assert first.runs.wait(PATIENCE_S)
    futures = [queue.store(lambda n=n: ran.append(("store", n)), 1) for n in range(2)]
    futures += [queue.load(lambda n=n: ran.append(("load", n))) for n in range(2)]
    first.let_go.set()
    for future in futures:
        result(future)
    assert ran == [("load", 0), ("load", 1), ("store", 0), ("store", 1)]


def test_what_is_too_much_to_store_is_dropped_and_not_awaited(open_queue):
    queue = open_queue(max_store_bytes=100)
    held = Held()
    first = queue.store(held, 60)
    assert held.runs.wait(PATIENCE_S)
    assert queue.store(lambda: None, 41) is None  # what runs still counts
    second = queue.store(lambda: "fits", 40)
    assert queue.waiting_store_bytes == 100
    assert queue.store(lambda: None, 1) is None
    held.let_go.set()
    assert (result(first), result(second)) == ("done", "fits")
    assert queue.flush(PATIENCE_S)
    assert result(queue.store(lambda: "again", 100)) == "again"


def test_one_thread_stays_free_of_stores(open_queue):
    queue = open_queue(num_threads=2)
    stores = [Held() for _ in range(4)]
    futures = [queue.store(store, 1) for store in stores]
    assert all(store.runs.wait(PATIENCE_S) for store in stores[:2])
    assert result(queue.load(lambda: "at once")) == "at once"
    assert not any(store.runs.is_set() for store in stores[2:])
    for store in stores:
        store.let_go.set()
    assert [result(future) for future in futures] == ["done"] * 4


def test_a_single_thread_does_store(open_queue):
    assert result(open_queue(num_threads=1).store(lambda: "stored", 1)) == "stored"


@pytest.mark.parametrize("error", [FAILURE, OSError("disk"), ValueError("ours"), SystemExit(1)])
def test_whatever_a_job_raises_the_thread_lives(open_queue, error):
    """`SystemExit` for all that is no `Exception`: a panic of a Rust library is such a one."""
    queue = open_queue(num_threads=1)
    with pytest.raises(type(error)):
        result(queue.load(fails(error)))
    with pytest.raises(type(error)):
        result(queue.store(fails(error), 1))
    assert result(queue.load(lambda: "alive")) == "alive"
    assert queue.flush(1.0)


def test_a_tier_that_fails_is_cut_off_and_comes_back_by_itself(open_queue, clock):
    queue = open_queue()
    for _ in range(3):
        with pytest.raises(TierError):
            result(queue.load(fails(FAILURE)))
    with pytest.raises(TierUnavailable, match="cut off"):
        result(queue.load(lambda: "never"))
    assert queue.store(lambda: "never", 1) is None
    clock.advance(1)
    assert result(queue.load(lambda: "probe")) == "probe"
    assert result(queue.store(lambda: "closed again", 1)) == "closed again"


def test_a_store_that_is_dropped_does_not_use_up_the_probe(open_queue, clock):
    queue = open_queue(max_store_bytes=100)
    for _ in range(3):
        with pytest.raises(TierError):
            result(queue.load(fails(FAILURE)))
    clock.advance(1)
    assert queue.store(lambda: "too much", 101) is None
    assert result(queue.load(lambda: "probe")) == "probe"


def test_stores_of_no_bytes_do_not_use_up_the_threads(open_queue):
    queue = open_queue(num_threads=1)
    for number in range(3):
        assert result(queue.store(lambda n=number: n, 0)) == number


def test_flush_waits_for_every_store_and_not_for_ever(open_queue):
    queue = open_queue(num_threads=2)
    held = Held()
    future = queue.store(held, 1)
    assert not queue.flush(0.05)
    held.let_go.set()
    assert queue.flush(PATIENCE_S)
    assert future.done()


def test_a_load_is_run_also_while_somebody_flushes(open_queue):
    """The wake-up that a load gives must reach a worker, not the one who waits for stores."""
    queue = open_queue(num_threads=2)
    held = Held()
    queue.store(held, 1)
    assert held.runs.wait(PATIENCE_S)
    flushing = threading.Thread(target=queue.flush, args=(PATIENCE_S,))
    flushing.start()
    deadline = time.monotonic() + PATIENCE_S
    while len(queue._condition._waiters) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    try:
        for number in range(3):  # each wakes the one who has waited longest
            assert queue.load(lambda n=number: n).result(1.0) == number
    finally:
        held.let_go.set()
        flushing.join()


def test_close_stores_what_is_queued(open_queue):
    queue = open_queue()
    futures = [queue.store(lambda n=n: n, 1) for n in range(5)]
    queue.close()
    assert [future.result(0) for future in futures] == list(range(5))


def test_close_drops_what_is_late_and_leaves_no_one_waiting(open_queue, caplog):
    """A chunk's slot is held until its write has ended, so every future must end."""
    queue = open_queue()
    held = Held()
    running = queue.store(held, 1)
    assert held.runs.wait(PATIENCE_S)
    waiting = [queue.store(lambda: "late", 1) for _ in range(2)]
    queue.close(timeout_s=0.05)
    assert "2 stores dropped" in caplog.text
    held.let_go.set()
    assert result(running) == "done"
    for future in waiting:
        assert future.cancelled() or future.exception(1.0) is not None


def test_after_close_nothing_is_taken(open_queue):
    queue = open_queue()
    queue.close()
    queue.close()
    assert queue.store(lambda: None, 1) is None
    with pytest.raises(TierUnavailable, match="closing"):
        result(queue.load(lambda: None))
