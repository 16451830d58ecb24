"""The breaker, by a clock that stands still until it is told."""

import threading

import pytest

from kvkeep.errors import TierError
from kvkeep.testing.fake import FakeClock
from kvkeep.transfer import Breaker

FAILURE = TierError("made to fail")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def breaker(clock):
    return Breaker("fake", threshold=3, backoff_s=1.0, max_backoff_s=8.0, clock=clock)


def cut_off(breaker, failures=3):
    for _ in range(failures):
        breaker.failed(FAILURE)


def test_stays_closed_below_its_threshold(breaker):
    cut_off(breaker, 2)
    breaker.succeeded()
    cut_off(breaker, 2)
    assert breaker.allows()
    assert not breaker.is_open


def test_opens_at_its_threshold_and_waits(breaker, clock):
    cut_off(breaker)
    assert (breaker.is_open, breaker.is_ready, breaker.allows()) == (True, False, False)
    clock.advance(0.99)
    assert not breaker.allows()
    clock.advance(0.01)
    assert breaker.is_ready
    assert breaker.allows()


def test_lets_one_probe_through(breaker, clock):
    cut_off(breaker)
    clock.advance(1)
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    assert not breaker.is_ready
    assert breaker.is_open


def test_asking_whether_it_is_ready_takes_no_probe(breaker, clock):
    cut_off(breaker)
    clock.advance(1)
    assert [breaker.is_ready for _ in range(3)] == [True] * 3
    assert breaker.allows()


def test_closes_by_a_good_probe(breaker, clock):
    cut_off(breaker)
    clock.advance(1)
    assert breaker.allows()
    breaker.succeeded()
    assert not breaker.is_open
    cut_off(breaker, 2)
    assert breaker.allows()


def test_doubles_its_wait_with_each_bad_probe_up_to_a_limit(breaker, clock):
    cut_off(breaker)
    for wait_s in (1, 2, 4, 8, 8, 8):
        clock.advance(wait_s - 0.01)
        assert not breaker.allows()
        clock.advance(0.01)
        assert breaker.allows()
        breaker.failed(FAILURE)


def test_starts_again_with_a_short_wait_after_recovery(breaker, clock):
    cut_off(breaker)
    for wait_s in (1, 2):
        clock.advance(wait_s)
        assert breaker.allows()
        breaker.failed(FAILURE)
    clock.advance(4)
    assert breaker.allows()
    breaker.succeeded()
    cut_off(breaker)
    clock.advance(1)
    assert breaker.allows()


def test_a_burst_that_was_under_way_is_one_failure_of_the_tier(breaker, clock):
    """A hit is spread over many batches: all of them fail when a disk hiccups once."""
    cut_off(breaker, 32)
    clock.advance(1)
    assert breaker.is_ready


def test_gives_one_probe_to_many_threads(breaker, clock):
    for _ in range(20):
        cut_off(breaker)
        clock.advance(10)
        start = threading.Barrier(8)
        answers = []

        def ask(start=start, answers=answers):
            start.wait()
            answers.append(breaker.allows())

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(answers) == 1
        breaker.succeeded()


def test_says_once_that_it_opens_and_once_that_it_closes(breaker, clock, caplog):
    caplog.set_level("INFO")
    cut_off(breaker, 5)
    clock.advance(10)
    assert breaker.allows()
    breaker.succeeded()
    breaker.succeeded()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "cut off after 3 failures" in caplog.text
