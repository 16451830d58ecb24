import pytest
from kept_data import run, run_json

from kvkeep.cli import doctor
from kvkeep.cli.engine_probe import Answer
from kvkeep.cli.finding import fail, ok, warn

FINDINGS = {"ok": ok("one", "is right"), "warn": warn("two", "is odd", "do this")}


@pytest.fixture
def quick(monkeypatch):
    """The engine is not imported, the rest is as it is here."""
    answers = [Answer("torch", is_missing=True), Answer("vllm", is_missing=True)]
    judge = doctor.engine
    monkeypatch.setattr(doctor, "engine", lambda: judge(lambda: answers))


@pytest.fixture
def only(monkeypatch):
    """Nothing is checked; each finding is the test's."""

    def replace(*findings):
        monkeypatch.setattr(doctor, "_checks", lambda *_: iter(findings))

    return replace


def test_lines_and_remedies(capsys, only):
    only(*FINDINGS.values())
    assert run(capsys, "doctor") == (
        0,
        [
            "OK    one: is right",
            "WARN  two: is odd",
            "      remedy: do this",
            "doctor: ok=1 warn=1 fail=0",
        ],
        [],
    )


def test_only_a_failure_is_something_wrong(capsys, only):
    only(*FINDINGS.values(), fail("three", "is broken", "mend it"))
    status, document = run_json(capsys, "doctor")
    assert status == 1
    assert (document["ok"], document["warn"], document["fail"]) == (1, 1, 1)
    assert document["findings"][2] == {
        "check": "three",
        "status": "FAIL",
        "says": "is broken",
        "remedy": "mend it",
    }


@pytest.mark.usefixtures("quick")
def test_here(capsys, tmp_path):
    status, document = run_json(capsys, "doctor", "--dir", tmp_path, "--dir", tmp_path / "new")
    checks = [one["check"] for one in document["findings"]]
    for check in ("python", "kvkeep", "xxhash", "plug-in", "VLLM_PLUGINS", "LMCache", "settings"):
        assert checks.count(check) == 1
    for check in ("pool", "memfd", "memlock", "open files", "torch", "vllm"):
        assert checks.count(check) == 1
    assert checks.count("directory") == checks.count("file system") == 2
    assert "connector" not in checks
    assert status == (1 if document["fail"] else 0)
    assert all(one["remedy"] for one in document["findings"] if one["status"] != "OK")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_wrong_settings_are_a_failure_and_the_rest_goes_on(capsys, tmp_path):
    argv = ("doctor", "--extra", '{"disk.sise": 1}', "--dir", tmp_path)
    status, document = run_json(capsys, *argv)
    assert status == 1
    by_check = {one["check"]: one for one in document["findings"]}
    assert by_check["settings"]["status"] == "FAIL"
    assert "did you mean disk.size?" in by_check["settings"]["says"]
    assert "pool" not in by_check
    assert "directory" in by_check
    assert "vllm" in by_check


@pytest.mark.usefixtures("quick")
def test_doubtful_settings_are_a_warning(capsys):
    _, document = run_json(capsys, "doctor", "--extra", '{"disk.size": "1TB"}')
    settings = [one for one in document["findings"] if one["check"] == "settings"]
    assert [one["status"] for one in settings] == ["OK", "WARN"]
    assert settings[0]["says"].startswith("load; 1 of ")
