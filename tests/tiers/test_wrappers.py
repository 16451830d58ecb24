import time
from collections import OrderedDict

import pytest

from kvkeep.errors import TierError
from kvkeep.testing.tiers import TierTests, key_of, load_one, value_of
from kvkeep.tiers.base import Occupancy, Tier
from kvkeep.tiers.wrappers import Delayed, FaultRates, Faulty, Measured, Wrapper


class DictTier:
    name = "dict"
    answers_at_once = True

    def __init__(self):
        self.values = OrderedDict()
        self.is_open = False

    def open(self):
        self.is_open = True

    def contains(self, keys):
        return [key in self.values for key in keys]

    def load(self, keys, into):
        counts = []
        for key, view in zip(keys, into, strict=True):
            value = self.values.get(key)
            if value is None or len(value) > view.nbytes:
                counts.append(None)
            else:
                view[: len(value)] = value
                counts.append(len(value))
        return counts

    def store(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            self.values[key] = bytes(value)

    def delete(self, keys):
        for key in keys:
            self.values.pop(key, None)

    def close(self):
        self.is_open = False


class TestMeasured(TierTests):
    def make(self, where):
        return Measured(DictTier(), lambda event: None)


class TestDelayed(TierTests):
    def make(self, where):
        return Delayed(DictTier())


class TestFaultyWithoutFaults(TierTests):
    def make(self, where):
        return Faulty(DictTier())


def fetch(tier, number, nbytes=1000):
    return load_one(tier, key_of(number), nbytes)


def filled(count=100, nbytes=1000):
    inner = DictTier()
    keys = [key_of(number) for number in range(count)]
    inner.store(keys, [memoryview(value_of(number, nbytes)) for number in range(count)])
    return inner, keys


def buffers(keys, nbytes=1000):
    return [memoryview(bytearray(nbytes)) for _ in keys]


@pytest.mark.parametrize("wrap", [Wrapper, Delayed, Faulty, lambda tier: Measured(tier, print)])
def test_wrappers_pass_on_who_the_tier_is(wrap):
    inner = DictTier()
    tier = wrap(inner)
    assert isinstance(tier, Tier)
    assert (tier.name, tier.answers_at_once) == ("dict", True)
    tier.open()
    assert inner.is_open
    tier.close()
    assert not inner.is_open


def test_wrappers_pass_on_how_full_the_tier_is():
    inner = DictTier()
    assert Wrapper(inner).occupancy() == (0, 0)
    inner.occupancy = lambda: Occupancy(1, 2)
    assert Wrapper(inner).occupancy() == (1, 2)


def test_measured_tells_of_each_call():
    events = []
    tier = Measured(DictTier(), events.append)
    tier.store([key_of(1), key_of(2)], [memoryview(b"abc"), memoryview(b"de")])
    tier.contains([key_of(1), key_of(3)])
    tier.load([key_of(1), key_of(2), key_of(3)], buffers(range(3), 10))
    tier.delete([key_of(1)])
    told = [(event.operation, event.keys, event.hits, event.nbytes) for event in events]
    assert told == [
        ("store", 2, 0, 5),
        ("contains", 2, 1, 0),
        ("load", 3, 2, 5),
        ("delete", 1, 0, 0),
    ]
    assert all(event.seconds >= 0 and event.error is None for event in events)
    assert {event.tier for event in events} == {"dict"}


@pytest.mark.parametrize("operation", ["contains", "load", "store", "delete"])
def test_measured_tells_of_a_call_that_raises(operation):
    events = []
    faulty = Faulty(DictTier())
    faulty.fail_next(1)
    tier = Measured(faulty, events.append)
    rest = [[memoryview(bytearray(3))]] if operation in {"load", "store"} else []
    with pytest.raises(TierError):
        getattr(tier, operation)([key_of(1)], *rest)
    (event,) = events
    assert (event.operation, event.hits, event.nbytes) == (operation, 0, 0)
    assert isinstance(event.error, TierError)


def test_delayed_takes_its_time(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    tier = Delayed(DictTier(), seconds_per_call=0.5, bytes_per_s=1000)
    tier.store([key_of(1)], [memoryview(bytes(250))])
    tier.contains([key_of(1)])
    tier.load([key_of(1), key_of(2)], buffers(range(2)))
    tier.delete([key_of(1)])
    assert slept == [0.75, 0.5, 0.75, 0.5]


def test_faulty_fails_when_told_to():
    inner, _ = filled(1)
    tier = Faulty(inner)
    tier.fail_next(2)
    for _ in range(2):
        with pytest.raises(TierError, match="dict: made to fail in load"):
            fetch(tier, 0)
    assert fetch(tier, 0) == value_of(0, 1000)
    tier.fail_next(5)
    tier.fail_next(0)
    assert tier.contains([key_of(0)]) == [True]


def outcome(tier, keys):
    """What 20 loads of `keys` say, as far as one can tell them apart."""
    seen = []
    for _ in range(20):
        into = buffers(keys)
        try:
            counts = tier.load(keys, into)
        except TierError:
            seen.append("error")
            continue
        seen.append([(count, hash(bytes(view))) for count, view in zip(counts, into, strict=True)])
    return seen


def test_faulty_does_the_same_for_the_same_seed():
    rates = FaultRates(error=0.2, miss=0.1, corrupt=0.1, truncate=0.1, drop=0.1)
    inner, keys = filled(10)
    first = outcome(Faulty(inner, rates, seed=1), keys)
    assert first == outcome(Faulty(inner, rates, seed=1), keys)
    assert first != outcome(Faulty(inner, rates, seed=2), keys)
    assert "error" in first


@pytest.mark.parametrize("fault", ["miss", "corrupt", "truncate"])
def test_faulty_spoils_about_as_many_loads_as_asked(fault):
    inner, keys = filled(400)
    tier = Faulty(inner, FaultRates(**{fault: 0.5}), seed=3)
    into = buffers(keys)
    counts = tier.load(keys, into)
    spoiled = 0
    for number, (count, view) in enumerate(zip(counts, into, strict=True)):
        content = value_of(number, 1000)
        if count == 1000 and view == content:
            continue
        spoiled += 1
        wrong_bytes = sum(a != b for a, b in zip(view, content, strict=True))
        kind = (
            "miss"
            if count is None
            else "truncate"
            if count < 1000 and wrong_bytes == 0
            else "corrupt"
            if count == 1000 and wrong_bytes == 1
            else "?"
        )
        assert kind == fault
    assert 150 < spoiled < 250


def test_faulty_hides_from_questions_and_drops_stores():
    inner, keys = filled(400)
    hidden = Faulty(inner, FaultRates(miss=0.5), seed=3).contains(keys)
    assert 150 < sum(hidden) < 250
    empty = DictTier()
    values = [memoryview(b"x")] * len(keys)
    Faulty(empty, FaultRates(drop=0.5), seed=3).store(keys, values)
    assert 150 < len(empty.values) < 250


@pytest.mark.parametrize("rate", [-0.1, 1.1])
def test_rates_are_probabilities(rate):
    with pytest.raises(ValueError, match="corrupt must be from 0 to 1"):
        FaultRates(corrupt=rate)
