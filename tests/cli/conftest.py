import os

import pytest


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("KVKEEP_", "LMCACHE_")) or name == "VLLM_PLUGINS":
            monkeypatch.delenv(name)
