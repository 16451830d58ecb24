import resource

import pytest

from kvkeep.cli import checks_memory as checks
from kvkeep.cli.checks_memory import MemoryFacts
from kvkeep.config import KVKeepConfig, MemoryConfig
from kvkeep.memory.shared import SharedMemory

GIB = 1 << 30


def config_of(gib, **settings):
    return KVKeepConfig(memory=MemoryConfig(size_bytes=gib * GIB, **settings))


@pytest.mark.parametrize(
    ("gib", "facts", "status", "says"),
    [
        (5, MemoryFacts(100 * GIB, 90 * GIB, None), "OK", "this machine's memory of 100 GiB"),
        (101, MemoryFacts(100 * GIB, 90 * GIB, None), "FAIL", "more than this machine's"),
        (50, MemoryFacts(100 * GIB, 90 * GIB, 40 * GIB), "FAIL", "more than the cgroup's limit"),
        (30, MemoryFacts(100 * GIB, 90 * GIB, 40 * GIB), "OK", "the cgroup's limit of 40.0 GiB"),
        (50, MemoryFacts(100 * GIB, 40 * GIB, None), "WARN", "only 40.0 GiB are available"),
        (85, MemoryFacts(100 * GIB, 90 * GIB, None), "WARN", "little is left"),
        (85, MemoryFacts(100 * GIB, 90 * GIB, 200 * GIB), "WARN", "little is left"),
    ],
)
def test_pool(gib, facts, status, says):
    finding = checks.pool(config_of(gib), facts)
    assert finding.status == status
    assert finding.says.startswith(f"memory.size is {gib}GiB")
    assert says in finding.says
    assert status == "OK" or "KVKEEP_MEMORY_SIZE" in finding.remedy


def test_the_pool_that_only_stages():
    config = KVKeepConfig(memory=MemoryConfig(enabled=False, staging_bytes=2 * GIB))
    finding = checks.pool(config, MemoryFacts(GIB, GIB, None))
    assert finding.status == "FAIL"
    assert finding.says.startswith("memory.staging is 2GiB")
    assert "KVKEEP_MEMORY_STAGING" in finding.remedy


def test_memory_facts(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    facts = checks.memory_facts(str(tmp_path), str(tmp_path / "none"))
    assert facts == MemoryFacts(1000 * 1024, 600 * 1024, None)
    assert checks.memory_facts().total > 0


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "5000"}, 5000),
        ("0::/a/b\n", {"a/b/memory.max": "3000", "a/memory.max": "5000"}, 3000),
        ("0::/../../x\n", {"memory.max": "7000"}, 7000),
        ("0::/\n", {}, None),
        ("5:cpu,memory:/a\n", {"memory/a/memory.limit_in_bytes": "42"}, 42),
        ("5:memory:/gone\n", {"memory/memory.limit_in_bytes": "43"}, 43),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": str((1 << 63) - 4096)}, None),
        ("1:cpu:/a\n0::/a\n", {"unified/a/memory.max": "44", "cpu/a/memory.max": "1"}, 44),
        ("", {"memory.max": "1"}, None),
    ],
)
def test_cgroup_limit(tmp_path, own, files, limit):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert checks.cgroup_limit(str(tmp_path / "own"), str(tmp_path / "mounted")) == limit


def test_shared_memory(monkeypatch):
    assert checks.shared_memory().status in ("OK", "WARN")
    monkeypatch.setattr(SharedMemory, "populate", lambda *_: False)
    assert checks.shared_memory().status == "WARN"

    def refuse(_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(SharedMemory, "create", refuse)
    finding = checks.shared_memory()
    assert (finding.status, finding.says) == ("FAIL", "cannot be made: Operation not permitted")


def test_memlock_is_no_limit():
    assert checks.memlock(resource.RLIM_INFINITY).says == "unlimited"
    finding = checks.memlock(65536)
    assert finding.status == "OK"
    assert finding.says.startswith("64.0 KiB; pinning by CUDA")


@pytest.mark.parametrize(
    ("limit", "status"), [(256, "WARN"), (1024, "OK"), (resource.RLIM_INFINITY, "OK")]
)
def test_open_files(limit, status):
    assert checks.open_files(limit).status == status
