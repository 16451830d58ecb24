import importlib.metadata
import subprocess
import sys

import pytest
from kept_data import keep, run

from kvkeep import __version__
from kvkeep.cli import ls
from kvkeep.cli.main import main
from kvkeep.errors import TierError

COMMANDS = ("ls", "stat", "verify", "clear", "config", "doctor")


def exits(capsys, *argv):
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    return ended.value.code, capsys.readouterr()


def test_help_names_every_command(capsys):
    status, said = exits(capsys, "--help")
    assert status == 0
    assert all(f"    {name} " in said.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(capsys, name):
    status, said = exits(capsys, name, "--help")
    assert status == 0
    assert "--json" in said.out


def test_version(capsys):
    assert exits(capsys, "--version") == (0, (f"kvkeep {__version__}\n", ""))


@pytest.mark.parametrize(
    "argv", [[], ["--json"], ["frob"], ["ls"], ["ls", "d", "--frob"], ["verify", "d", "--jobs=0"]]
)
def test_wrong_usage_is_one_line(capsys, argv):
    status, said = exits(capsys, *argv)
    assert status == 2
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("kvkeep")


def test_a_directory_that_is_not_there(capsys, tmp_path):
    for name in ("ls", "stat", "verify", "clear"):
        wrong = run(capsys, name, tmp_path / "nowhere")
        assert wrong == (2, [], [f"kvkeep {name}: {tmp_path}/nowhere does not exist"])


def test_a_file_for_a_directory(capsys, tmp_path):
    (tmp_path / "file").touch()
    status, _, errors = run(capsys, "ls", tmp_path / "file")
    assert (status, errors) == (2, [f"kvkeep ls: {tmp_path}/file is not a directory"])


def test_a_namespace_for_a_directory(capsys, tmp_path):
    (file,) = keep(tmp_path, numbers=[1])
    name = file.relative_to(tmp_path).parts[0]
    status, _, (error,) = run(capsys, "clear", tmp_path / name, "--yes")
    assert status == 2
    assert error.endswith(f"write {tmp_path} --namespace {name}")
    assert file.exists()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(13, "Permission denied", "/x"), "kvkeep ls: /x: Permission denied"),
        (TierError("two\nlines"), "kvkeep ls: two lines"),
    ],
)
def test_what_goes_wrong_is_one_line(capsys, monkeypatch, tmp_path, error, line):
    def fail(*_):
        raise error

    monkeypatch.setattr(ls, "look", fail)
    assert run(capsys, "ls", tmp_path) == (1, [], [line])


def test_interrupt(capsys, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ls, "look", interrupt)
    assert run(capsys, "ls", tmp_path) == (130, [], [])


def test_entry_point_is_main():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="kvkeep")
    assert script.load() is main


def test_a_command_starts_without_what_it_does_not_need(tmp_path):
    keep(tmp_path)
    code = (
        "import sys; from kvkeep.cli.main import main; status = main(sys.argv[1:]);"
        "print({'torch', 'vllm', 'yaml', 'numpy'} & set(sys.modules)); sys.exit(status)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "ls", str(tmp_path)], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[0].startswith("MODEL")
    assert ended.stdout.splitlines()[-1] == "set()"


def test_a_reader_that_goes_away(tmp_path):
    files = keep(tmp_path, numbers=range(3))
    code = (
        "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1);"
        "from kvkeep.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", code, "ls", str(files[0].parents[3])]
    ended = subprocess.run(argv, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (141, "")
