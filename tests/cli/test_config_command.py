import json

import pytest
from kept_data import run, run_json

from kvkeep.cli.main import main
from kvkeep.config import SETTINGS


def test_every_setting_with_its_source(capsys, monkeypatch, tmp_path):
    file = tmp_path / "kvkeep.yaml"
    file.write_text("disk: {paths: /d, size: 1TB}\n")
    monkeypatch.setenv("KVKEEP_MEMORY_SIZE", "7GiB")
    monkeypatch.setenv("KVKEEP_CONFIG_FILE", "/nowhere/to/be/read")
    status, document = run_json(capsys, "config", "--extra", '{"chunk_tokens": 64}', "--file", file)
    settings = document["settings"]
    assert status == 0
    assert list(settings) == list(SETTINGS)
    assert settings["memory.size"] == {"value": "7GiB", "source": "KVKEEP_MEMORY_SIZE"}
    assert settings["disk.size"] == {"value": "1TB", "source": f"{file}: disk.size"}
    assert settings["chunk_tokens"]["source"] == "kv_connector_extra_config: chunk_tokens"
    assert settings["self_test"] == {"value": "true", "source": "default"}
    assert (document["notes"], document["warnings"]) == ([], [])


def test_table_notes_and_warnings(capsys, monkeypatch):
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "3")
    monkeypatch.setenv("KVKEEP_DISK_SIZE", "1TB")
    status, lines, errors = run(capsys, "config")
    assert (status, errors) == (0, [])
    assert lines[0].split() == ["SETTING", "VALUE", "FROM"]
    assert any(line.split()[:2] == ["memory.size", "3GiB"] for line in lines)
    assert any(line.startswith("note: ") and "LMCACHE_MAX_LOCAL_CPU_SIZE" in line for line in lines)
    assert any(line.startswith("warning: nothing is kept on disk") for line in lines)


def test_secrets_are_masked(capsys):
    extra = json.dumps({"remote.url": "redis://user:hunter2@host:6379/?password=hunter2"})
    for argv in (["config", "--extra", extra], ["config", "--extra", extra, "--json"]):
        assert main(argv) == 0
        said = capsys.readouterr()
        assert "host:6379" in said.out
        assert "hunter2" not in said.out + said.err


def test_the_whole_setting_of_the_engine_is_taken_too(capsys):
    extra = {"memory.size": "9GiB"}
    whole = {"kv_connector": "KVKeepConnector", "kv_connector_extra_config": extra}
    _, document = run_json(capsys, "config", "--extra", json.dumps(whole))
    assert document["settings"]["memory.size"]["value"] == "9GiB"
    assert main(["config", "--extra", '{"kv_connector": "KVKeepConnector"}']) == 0


def test_wrong_settings_are_something_wrong(capsys):
    status, out, (error,) = run(capsys, "config", "--extra", '{"memory.siz": 1}', "--json")
    assert (status, out) == (1, [])
    assert error.endswith("did you mean memory.size?")


def test_a_file_that_is_not_there(capsys, tmp_path):
    status, _, (error,) = run(capsys, "config", "--file", tmp_path / "no.yaml")
    assert status == 1
    assert "no.yaml: cannot be read" in error


@pytest.mark.parametrize(
    "extra", ["{", "[]", "1", '{"kv_connector": "x", "kv_connector_extra_config": 3}']
)
def test_wrong_json_is_wrong_usage(capsys, extra):
    with pytest.raises(SystemExit) as ended:
        main(["config", "--extra", extra])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("kvkeep config: argument --extra: ")
    assert run(capsys, "config", "--file", "")[0] == 2
