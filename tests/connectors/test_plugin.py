"""The name under which vLLM finds the connector."""

import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: the name is registered with it", allow_module_level=True)

from scheduler_rig import SchedulerSide  # noqa: F401 (imports vLLM, its warnings filtered)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvkeep.connectors.vllm import plugin
from kvkeep.connectors.vllm.connector import KVKeepConnector


@pytest.fixture
def registry(monkeypatch):
    registry = dict(KVConnectorFactory._registry)
    registry.pop("KVKeepConnector", None)
    monkeypatch.setattr(KVConnectorFactory, "_registry", registry)
    return registry


def with_lmcache(monkeypatch, installed):
    found = importlib.util.find_spec

    def find_spec(name, *rest):
        if name == "lmcache":
            return object() if installed else None
        return found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_the_name_resolves_to_the_connector(registry):
    plugin.register()
    assert registry["KVKeepConnector"]() is KVKeepConnector


def test_twice_is_as_good_as_once(registry):
    plugin.register()
    first = registry["KVKeepConnector"]
    plugin.register()
    assert registry["KVKeepConnector"] is first


def test_lmcache_keeps_its_name_where_it_is_installed(registry, monkeypatch):
    theirs = registry["LMCacheConnectorV1"]
    with_lmcache(monkeypatch, installed=True)
    plugin.register()
    assert registry["LMCacheConnectorV1"] is theirs


def test_where_lmcache_is_not_installed_its_name_is_ours(registry, monkeypatch):
    with_lmcache(monkeypatch, installed=False)
    plugin.register()
    assert registry["LMCacheConnectorV1"]() is KVKeepConnector
    assert "LMCacheMPConnector" not in registry or (
        registry["LMCacheMPConnector"] is not registry["KVKeepConnector"]
    )


def test_vllm_finds_it_through_its_entry_point():
    found = [
        point for point in entry_points(group="vllm.general_plugins") if point.name == "kvkeep"
    ]
    assert [point.load() for point in found[:1]] == [plugin.register]


def test_importing_the_plugin_imports_nothing_heavy():
    """vLLM loads it in every process, before it chooses a platform."""
    program = (
        "import sys, kvkeep.connectors.vllm.plugin\n"
        "print([name for name in ('torch', 'vllm', 'numpy', 'xxhash') if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[]"
