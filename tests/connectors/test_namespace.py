"""What makes KV of two engines the same, and what does not."""

import json
import os
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM: the messages are subclasses of its own")

from scheduler_rig import SchedulerSide  # noqa: F401 (imports vLLM, its warnings filtered)

from kvkeep.connectors.vllm import namespace as module
from kvkeep.connectors.vllm.messages import GroupReport, LayoutReport
from kvkeep.connectors.vllm.namespace import (
    config_fingerprint,
    engine_namespace,
    lora_identity,
    model_identity,
    weights_fingerprint,
)
from kvkeep.errors import LayoutError

HF_CONFIG = {
    "hidden_size": 64,
    "rope_scaling": {"type": "linear", "factor": 2},
    "_name_or_path": "here",
    "transformers_version": "5.0",
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.safetensors").write_bytes(os.urandom(100_000))
    (path / "config.json").write_text(json.dumps(HF_CONFIG))
    return path


def engine(folder, **changes):
    """A `VllmConfig` with what the namespace reads of it."""
    values = {
        "revision": None,
        "hf_config": HF_CONFIG,
        "hf_overrides": {},
        "dtype": "bfloat16",
        "quantization": None,
        "seed": 0,
        "max_model_len": 4096,
        "cache_dtype": "auto",
        "load_format": "auto",
        "tp": 1,
        "pp": 1,
        "gpu_memory_utilization": 0.9,
        **changes,
    }
    get = SimpleNamespace(**values)
    hf_config = SimpleNamespace(to_dict=lambda: get.hf_config)
    model = SimpleNamespace(
        model=str(folder),
        model_weights="",
        revision=get.revision,
        hf_config=hf_config,
        hf_text_config=hf_config,
        hf_overrides=get.hf_overrides,
        dtype=get.dtype,
        quantization=get.quantization,
        seed=get.seed,
        max_model_len=get.max_model_len,
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=get.tp, pipeline_parallel_size=get.pp, world_size=get.tp * get.pp
        ),
        cache_config=SimpleNamespace(
            cache_dtype=get.cache_dtype, gpu_memory_utilization=get.gpu_memory_utilization
        ),
        load_config=SimpleNamespace(load_format=get.load_format, download_dir=None),
        speculative_config=None,
        lora_config=None,
    )


def report(fingerprint="f", window=None, **changes):
    group = GroupReport(16, 4096, window, fingerprint)
    return LayoutReport(
        **{"groups": (group,), "backends": "FLASH_ATTN", "device": "cuda", **changes}
    )


def digest(folder, *, reports=None, chunk_tokens=16, **changes):
    reports = reports or [report()]
    return engine_namespace(engine(folder, **changes), reports, chunk_tokens).digest


def test_a_restart_has_the_same_namespace(folder):
    assert digest(folder) == digest(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu_memory_utilization": 0.5},
        {"seed": 7},
        {"hf_config": {**HF_CONFIG, "_name_or_path": "there", "transformers_version": "6.0"}},
    ],
)
def test_what_does_not_change_kv_stays_out(folder, changes):
    assert digest(folder, **changes) == digest(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16"},
        {"cache_dtype": "fp8"},
        {"quantization": "awq"},
        {"tp": 2},
        {"pp": 2},
        {"chunk_tokens": 32},
        {"hf_overrides": {"rope_theta": 1e6}},
        {"hf_config": {**HF_CONFIG, "hidden_size": 65}},
        {"hf_config": {**HF_CONFIG, "rope_scaling": {"type": "linear", "factor": 4}}},
        {"load_format": "dummy"},
        {"reports": [report(fingerprint="g")]},
        {"reports": [report(backends="TRITON_ATTN")]},
        {"reports": [report(device="cpu")]},
        {"reports": [report(), report(fingerprint="g")]},
        {"reports": [report(window=512)]},
        {"reports": [report(groups=report().groups * 2)]},
    ],
    ids=str,
)
def test_what_changes_kv_changes_the_namespace(folder, changes):
    assert digest(folder, **changes) != digest(folder)


def test_another_minor_release_of_the_engine_is_another_namespace(folder, monkeypatch):
    before = digest(folder)
    monkeypatch.setattr("vllm.__version__", "0.99.1+cpu")
    assert digest(folder) != before


def test_longrope_has_other_kv_for_another_max_model_len(folder):
    """vLLM's Phi-3 rope takes its long factors once `max_model_len` exceeds the original length,
    for short prompts too (`phi3_long_rope_scaled_rope.py`).
    """
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    config = {**HF_CONFIG, "rope_scaling": scaling}
    short = digest(folder, hf_config=config, max_model_len=4096)
    assert digest(folder, hf_config=config, max_model_len=8192) != short


def test_dummy_weights_go_by_their_seed(folder):
    one, other = (digest(folder, load_format="dummy", seed=seed) for seed in (1, 2))
    assert one != other


def test_weights_are_told_apart_by_their_bytes(folder):
    before = model_identity(str(folder), None, "auto")
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (folder / "model.safetensors").write_bytes(raw)
    assert model_identity(str(folder), None, "auto") != before


def test_weights_are_told_apart_by_names_and_sizes(folder, tmp_path):
    def fingerprint():
        weights_fingerprint.cache_clear()
        return weights_fingerprint(str(folder), 0)

    seen = {fingerprint()}
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    seen.add(fingerprint())
    (folder / "more.safetensors").write_bytes(b"")
    seen.add(fingerprint())
    (folder / "README.md").write_text("no weights")
    assert fingerprint() in seen
    assert len(seen) == 3
    assert tmp_path.exists()


@pytest.mark.parametrize("name", ["model.tensors", "shard/model.safetensors"])
def test_weights_that_are_not_recognised_are_not_all_taken_for_the_same(tmp_path, name):
    """Else all such models with one configuration would share their KV. Refused is right too."""
    identities = []
    for number in range(2):
        path = tmp_path / str(number)
        (path / name).parent.mkdir(parents=True)
        (path / name).write_bytes(os.urandom(5000))
        try:
            identities.append(model_identity(str(path), None, "auto"))
        except LayoutError:
            identities.append(f"refused {number}")
    assert identities[0] != identities[1]


def test_a_hub_id_goes_by_the_commit_it_resolved_to(monkeypatch):
    monkeypatch.setattr(module, "_cached_commit", lambda *_: "c0ffee")
    assert model_identity("org/model", None, "auto") == {"model": "org/model", "revision": "c0ffee"}
    monkeypatch.setattr(module, "_cached_commit", lambda *_: None)
    assert model_identity("org/model", "v2", "auto") == {"model": "org/model", "revision": "v2"}


def test_a_config_is_told_apart_by_all_that_counts():
    assert config_fingerprint({"a": 1, "b": {"c": 2}}) == config_fingerprint(
        {"b": {"c": 2}, "a": 1}
    )
    assert config_fingerprint({"a": 1}) != config_fingerprint({"a": 2})
    assert config_fingerprint({"a": 1}) != config_fingerprint({"a": "1"})


def adapter(path="", name="sql", number=1):
    return SimpleNamespace(lora_name=name, lora_path=str(path), lora_int_id=number)


def test_adapters_are_told_apart():
    assert lora_identity(None) is None
    identities = {
        lora_identity(adapter()),
        lora_identity(adapter(number=2)),
        lora_identity(adapter(name="python")),
        lora_identity(adapter(path="org/adapter")),
    }
    assert len(identities) == 4


@pytest.mark.parametrize("change", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_trained_or_scaled_anew_under_its_old_name_is_another(tmp_path, change):
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(5000))
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 16}')
    before = lora_identity(adapter(tmp_path))
    assert lora_identity(adapter(tmp_path)) == before
    (tmp_path / change).write_bytes(b'{"lora_alpha": 32}')
    assert lora_identity(adapter(tmp_path)) != before
