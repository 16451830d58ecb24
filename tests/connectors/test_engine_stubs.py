"""The connector at work under every vLLM release, each played by a stub made from its record.

The connector meets only what the release has: a name or an attribute that came later is not there.
What the scenarios do, and in which order the hooks are called, is in `stub_engine`.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "prometheus_client")):
    pytest.skip("needs torch and prometheus_client, as vLLM does", allow_module_level=True)

from engine_stub import make_stub
from test_engine_versions import APIS, RECORDS, RELEASES

HERE = Path(__file__).parent
SCENARIOS = (
    "register_name",
    "refuse",
    "keep_and_give_back",
    "fail_to_load",
    "groups_with_a_window",
    "wake_up",
)


@pytest.fixture(scope="module", params=RELEASES)
def outcomes(request, tmp_path_factory):
    """Scenario -> what went wrong, empty for nothing; one process for all of a release."""
    folder = tmp_path_factory.mktemp("stub")
    make_stub(folder, APIS[request.param])
    # The stub before all else: where vLLM itself is installed it must not be found.
    path = os.pathsep.join(map(str, (folder, HERE)))
    settings = ("KVKEEP_", "LMCACHE_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(settings)}
    record = RECORDS / f"{request.param}.json"
    ended = subprocess.run(
        [sys.executable, str(HERE / "stub_engine.py"), str(record), *SCENARIOS],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment, "PYTHONPATH": path},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(outcomes, scenario):
    assert not outcomes[scenario]
