"""Which KV of a vLLM engine is the same: the namespace, from the engine's own configuration.

Everything that changes what a block's bytes mean or hold goes in. What does not (memory sizes,
batch limits, ports) stays out, so that a cache survives a change of those.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.connectors.vllm.messages import LayoutReport
from kvkeep.errors import LayoutError
from kvkeep.keys import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Fields of a Hugging Face config that say where it came from, not what the model computes.
_UNRELATED = frozenset({"_name_or_path", "transformers_version", "_commit_hash", "use_cache"})
_UNRELATED_SUFFIXES = frozenset({".md", ".txt", ".jinja", ".png", ".jpg", ".svg", ".lock"})
_MAX_FILES = 10_000
_SAMPLES = 64
_SAMPLE_BYTES = 4096


def engine_namespace(
    vllm_config: VllmConfig, reports: Sequence[LayoutReport], chunk_tokens: int
) -> Namespace:
    """The namespace of the engine whose ranks sent `reports` (in rank order)."""
    import vllm

    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    fields = {
        **model_identity(
            model.model,
            model.revision,
            vllm_config.load_config.load_format,
            getattr(vllm_config.load_config, "download_dir", None),
        ),
        # Where a loader streams the weights from elsewhere, the folder holds only a configuration.
        "streamed_from": str(getattr(model, "model_weights", "") or ""),
        "config": config_fingerprint(model.hf_config.to_dict()),
        "overrides": str(model.hf_overrides) if model.hf_overrides else "",
        "dtype": str(model.dtype),
        "kv_dtype": str(vllm_config.cache_config.cache_dtype),
        "quantization": str(model.quantization or ""),
        "tp": str(parallel.tensor_parallel_size),
        "pp": str(parallel.pipeline_parallel_size),
        "layout": _by_rank([report.fingerprint for report in reports]),
        "backend": _by_rank([report.backends for report in reports]),
        "device": _by_rank([report.device for report in reports]),
        # A backend may change what it packs into a block from one minor release to the next
        # without any shape to show for it.
        "engine": "vllm " + ".".join(vllm.__version__.split("+")[0].split(".")[:2]),
        "chunk_tokens": str(chunk_tokens),
    }
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise LayoutError(
            "calculate_kv_scales makes KV depend on the first requests after a start; "
            "leave it out to use kvkeep"
        )
    if _depends_on_length(model.hf_config.to_dict()):
        fields["max_model_len"] = str(model.max_model_len)
    if fields.get("weights") == "dummy":
        fields["seed"] = str(model.seed)
    return Namespace.of(Path(model.model).name or model.model, fields)


def _by_rank(values: Sequence[str]) -> str:
    """The one value of all ranks, or each rank's own."""
    return values[0] if len(set(values)) == 1 else "+".join(values)


def _depends_on_length(config: Mapping[str, Any]) -> bool:
    """Whether the rope's factors are chosen by `max_model_len`, for short prompts too."""
    text = json.dumps(config, default=str)
    return any(f'"{kind}"' in text for kind in ("longrope", "su", "dynamic"))


def config_fingerprint(config: Mapping[str, Any]) -> str:
    """32 hex digits over a model's configuration: rope scaling, head counts and all the rest."""
    kept = {name: value for name, value in config.items() if name not in _UNRELATED}
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def model_identity(
    model: str, revision: str | None, load_format: object, download_dir: str | None = None
) -> dict[str, str]:
    """Which weights these are, by what is cheap to know and changes whenever they do."""
    if str(getattr(load_format, "value", load_format)) == "dummy":
        return {"weights": "dummy", "model": Path(model).name}
    path = Path(model)
    if path.exists():
        # A folder's name says little: people train again into the same one.
        return {"weights": weights_fingerprint(str(path), _newest_change(path))}
    return {
        "model": model,
        "revision": _cached_commit(model, revision, download_dir) or revision or "",
    }


def _cached_commit(model: str, revision: str | None, cache_dir: str | None) -> str | None:
    """The commit that a Hugging Face model id resolved to on this machine."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(model, "config.json", cache_dir=cache_dir, revision=revision)
    if not isinstance(found, str):
        return None
    parts = Path(found).parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts else None


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    # Whatever they are called: weights come under many names, and what else lies in a model's
    # folder (its configuration, an adapter's scale) counts as well.
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix not in _UNRELATED_SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
        and file.is_file()
    )
    if len(files) > _MAX_FILES:
        raise LayoutError(f"{path} holds more than {_MAX_FILES} files: is it a model's folder?")
    return files


def _newest_change(path: Path) -> int:
    return max((file.stat().st_mtime_ns for file in _weight_files(path)), default=0)


@functools.lru_cache(maxsize=256)
def weights_fingerprint(path: str, changed_ns: int) -> str:
    """32 hex digits over names, sizes and samples of the files in a folder (or of one file).

    Reads `_SAMPLES` pieces of each file, not the whole: two trainings of one model differ in
    practically every piece. `changed_ns` makes a changed folder be read again.
    """
    digest = hashlib.sha256()
    for file in _weight_files(Path(path)):
        nbytes = file.stat().st_size
        digest.update(f"{file.relative_to(path)}:{nbytes};".encode())
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for sample in range(_SAMPLES + 1):
                at = max(0, nbytes - _SAMPLE_BYTES) * sample // _SAMPLES
                digest.update(os.pread(fd, _SAMPLE_BYTES, at))
        finally:
            os.close(fd)
    return digest.hexdigest()[:32]


def lora_identity(lora: Any) -> tuple[str, ...] | None:
    """What names a request's adapter: its name, and its weights where they can be read."""
    if lora is None:
        return None
    path = Path(str(lora.lora_path or ""))
    if lora.lora_path and path.exists():
        return (lora.lora_name, weights_fingerprint(str(path), _newest_change(path)))
    return (lora.lora_name, str(lora.lora_path or lora.lora_int_id))
