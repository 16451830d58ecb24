"""The part of the gate that fits here; `make gate` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gate.__main__ import groups, outcomes, text_tokens
from tests.gate.lab import Cases, Lab
from tests.vllm.host import EngineHost


@pytest.fixture(scope="module")
def lab(model: str, host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(host, model, tmp_path_factory.mktemp("gate"), text_tokens(Path(model)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*groups(quick=True)])
def test_output_is_token_exact(lab: Lab, name: str) -> None:
    group: Cases = groups(quick=True)[name]
    found = list(outcomes(group, lab))
    lab.remove_folders()
    differing = [f"{one.name}: {line}" for one in found for line in one.differences]
    assert not differing, "\n".join(differing)
    assert found
