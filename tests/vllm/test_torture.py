"""A short torture; `make torture` kills and damages more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.gate.__main__ import text_tokens
from tests.gate.lab import Lab
from tests.torture.corruptions import corrupt_often
from tests.torture.damage import KINDS
from tests.torture.kills import kill_often
from tests.vllm.host import EngineHost


@pytest.fixture
def lab(model: str, host: EngineHost, tmp_path: Path) -> Lab:
    return Lab(host, model, tmp_path, text_tokens(Path(model)))


@pytest.mark.timeout(900)
def test_damage_of_every_kind_is_a_counted_miss(lab: Lab) -> None:
    count = 4 * len(KINDS)
    found = corrupt_often(lab, count, random.Random(3))
    assert found.wrong == []
    assert found.damage == []
    assert found.counted == count
    assert set(found.done) == set(KINDS)


@pytest.mark.timeout(900)
def test_an_engine_that_is_killed_leaves_nothing_wrong(lab: Lab) -> None:
    found = kill_often(lab, 3, random.Random(4))
    assert found.wrong == []
    assert found.damage == []
    assert found.engine_stops == []
    assert found.kills == 3
