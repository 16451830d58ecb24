"""The gate on a GPU: the same cases in bfloat16, on whatever vLLM is installed there.

    python -m tests.gate.gpu [--folder DIR]

Ends with `gpu gate: cases=N differences=D` and the versions. Small random models: no download.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.gate.features import groups
from tests.gate.lab import Lab, Outcome
from tests.vllm import models
from tests.vllm.host import EngineHost

_OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "gpu_memory_utilization": 0.1}


def cases(lab: Lab) -> Iterator[Outcome]:
    from kvkeep.connectors.vllm.engine import HANDLES_GROUPS

    folder = lab.folder / "models"
    for config in (models.qwen3, models.gemma3, models.mistral):
        model = models.make_model(folder, config)
        name = config.__name__
        if config is not models.qwen3 and not HANDLES_GROUPS:
            yield from groups.refused(lab, model, "can't compute again", **_OPTIONS)
            continue
        for chunk_tokens in (32, 256):
            yield from groups.hits(lab, model, name, chunk_tokens, **_OPTIONS)
        yield from groups.beside_local_hits(lab, model, name, **_OPTIONS)
        yield from groups.failed_load(lab, model, name, **_OPTIONS)
    mla = models.make_model(folder, models.deepseek_v2)
    yield from groups.hits(lab, mla, "deepseek_v2", 64, **_OPTIONS, block_size=64)
    hybrid = models.make_model(folder, models.granite_hybrid)
    yield from groups.refused(lab, hybrid, "MambaSpec", **_OPTIONS)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp(prefix="kvkeep-gate-"))
    total = differences = 0
    with EngineHost(folder / "logs") as host:
        lab = Lab(host, "", folder, [0])
        for outcome in _each(cases, lab):
            total += 1
            differences += bool(outcome.differences)
            print("DIFFERS" if outcome.differences else "ok     ", outcome.name, flush=True)
            for line in outcome.differences:
                print("        ", line[:2000], flush=True)
    import torch
    import vllm

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}, {where}")
    print(f"gpu gate: cases={total} differences={differences}")
    return 1 if differences else 0


def _each(group: Callable[[Lab], Iterator[Outcome]], lab: Lab) -> Iterator[Outcome]:
    try:
        yield from group(lab)
    except Exception:
        yield Outcome("the gate itself", [traceback.format_exc()])


if __name__ == "__main__":
    sys.exit(main())
