import builtins

import pytest

from kvkeep.cli import checks_installation as checks
from kvkeep.cli.engine_probe import Answer

TORCH = {"version": "2.11.0", "cuda": "13.0", "gpus": 2, "gpu_name": "H200"}


@pytest.mark.parametrize(
    ("version", "status"), [((3, 9), "FAIL"), ((3, 10), "OK"), ((3, 14), "OK")]
)
def test_python(version, status):
    assert checks.python(version).status == status


def test_xxhash(monkeypatch):
    assert checks.xxhash().status == "OK"
    real_import = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "xxhash":
            raise ImportError("no such thing")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    finding = checks.xxhash()
    assert (finding.status, finding.says) == ("FAIL", "cannot be imported: no such thing")


@pytest.mark.parametrize(
    ("values", "status", "says"),
    [
        (["kvkeep.connectors.vllm.plugin:register"], "OK", "registered"),
        ([], "FAIL", "not registered"),
        (["else:register"], "FAIL", "else:register, not kvkeep."),
    ],
)
def test_entry_point(values, status, says):
    finding = checks.entry_point(values)
    assert finding.status == status
    assert says in finding.says


@pytest.mark.parametrize(
    ("env", "status", "remedy"),
    [
        ({}, "OK", ""),
        ({"VLLM_PLUGINS": "a,kvkeep"}, "OK", ""),
        ({"VLLM_PLUGINS": "a"}, "FAIL", "unset it, or set VLLM_PLUGINS=a,kvkeep"),
        ({"VLLM_PLUGINS": ""}, "FAIL", "unset it, or set VLLM_PLUGINS=kvkeep"),
        ({"VLLM_PLUGINS": "kvkeep2"}, "FAIL", "unset it, or set VLLM_PLUGINS=kvkeep2,kvkeep"),
    ],
)
def test_plugins_filter(env, status, remedy):
    finding = checks.plugins_filter(env)
    assert (finding.status, finding.remedy) == (status, remedy)


def test_lmcache():
    assert checks.lmcache(is_installed=True).status == "WARN"
    assert checks.lmcache(is_installed=False).says.endswith("resolves to kvkeep")


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (Answer("torch", is_missing=True), "WARN", "not installed"),
        (Answer("torch", error="OSError: libcudart"), "FAIL", "libcudart"),
        (Answer("torch", facts=TORCH), "OK", "2.11.0, CUDA 13.0, 2 GPUs: H200"),
        (Answer("torch", facts={**TORCH, "gpus": 0}), "WARN", "no GPU is seen"),
        (Answer("torch", facts={**TORCH, "cuda": None, "gpus": 0}), "OK", "without CUDA"),
    ],
)
def test_torch(answer, status, says):
    finding = checks.torch(answer)
    assert finding.status == status
    assert says in finding.says


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.25.1", "FAIL"),
        ("0.26.0", "OK"),
        ("0.32.0+cpu", "OK"),
        ("1.0", "OK"),
        ("0.1.dev1+gabc", "WARN"),
        ("0.33.1.dev3+gabc", "OK"),
    ],
)
def test_vllm_version(version, status):
    finding = checks.vllm(Answer("vllm", facts={"version": version}))
    assert finding.status == status
    assert version in finding.says


def test_vllm_missing_or_broken():
    missing = checks.vllm(Answer("vllm", is_missing=True))
    assert missing.status == "WARN"
    assert missing.remedy.startswith("pip install 'vllm>=0.26'")
    assert checks.vllm(Answer("vllm", error="ImportError: x")).status == "FAIL"


def test_connector():
    assert checks.connector(Answer("connector", facts={"lacks": []})).status == "OK"
    lacking = checks.connector(Answer("connector", facts={"lacks": ["do_it"]}))
    assert (lacking.status, lacking.says) == ("FAIL", "this vLLM also asks for do_it")
    assert checks.connector(Answer("connector", error="ImportError: y")).status == "FAIL"


@pytest.mark.parametrize(
    ("vllm", "checked"),
    [
        (Answer("vllm", is_missing=True), ["torch", "vllm"]),
        (Answer("vllm", error="broken"), ["torch", "vllm"]),
        (Answer("vllm", facts={"version": "0.30"}), ["torch", "vllm", "connector"]),
    ],
)
def test_the_connector_is_judged_only_where_vllm_works(vllm, checked):
    answers = [Answer("torch", facts=TORCH), vllm, Answer("connector", facts={"lacks": []})]
    assert [finding.check for finding in checks.engine(lambda: answers)] == checked
