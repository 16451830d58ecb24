import textwrap

import pytest

from kvkeep.cli.engine_probe import PARTS, Answer, ask_engine

TORCH = """
    print("noise on stdout")
    class cuda:
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 1)
        get_device_name = staticmethod(lambda number: "a GPU")
    class version:
        cuda = "13.0"
    __version__ = "2.11"
"""


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Puts a module before all others, in this process's path and so in the other's."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))

    return write


def test_facts(install):
    install("torch", TORCH)
    install("vllm", "__version__ = '0.30.0'")
    torch, vllm, connector = ask_engine()
    facts = {"version": "2.11", "cuda": "13.0", "gpus": 1, "gpu_name": "a GPU"}
    assert torch == Answer("torch", facts=facts)
    assert vllm == Answer("vllm", facts={"version": "0.30.0"})
    assert "vllm" in connector.error


def test_missing(install, monkeypatch):
    # What is installed here must not be found, whatever it is.
    install("torch", "raise ModuleNotFoundError(name='torch')")
    install("vllm", "raise ModuleNotFoundError('no kernels', name='vllm._C')")
    torch, vllm, _ = ask_engine()
    assert torch == Answer("torch", is_missing=True)
    assert vllm == Answer("vllm", error="no kernels")


def test_an_import_that_fails(install):
    install("torch", "raise OSError('libcudart.so.13: not found\\nmore')")
    install("vllm", "raise SystemExit(3)")
    torch, vllm, _ = ask_engine()
    assert torch.error == "OSError: libcudart.so.13: not found"
    assert vllm.error == "SystemExit: 3"


@pytest.mark.parametrize(
    ("ending", "said"), [("os._exit(3)", "exit status 3"), ("os.kill(os.getpid(), 9)", "signal 9")]
)
def test_an_import_that_ends_the_process(install, ending, said):
    install("torch", TORCH)
    install("vllm", f"import os; {ending}")
    answers = list(ask_engine())
    assert [answer.part for answer in answers] == list(PARTS)
    assert answers[0].error is None
    problem = f"the process that imported it ended ({said})"
    assert [answer.error for answer in answers[1:]] == [problem, problem]
