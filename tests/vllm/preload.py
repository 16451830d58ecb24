"""What every engine imports, imported once before engines are forked; starts no thread."""

import importlib

from vllm.platforms import current_platform

_ALL = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.llama",
    "transformers",
    "kvkeep.connectors.vllm.connector",
)
_CPU = ("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner")

# A GPU's own modules may start its driver, which does not outlive a fork.
for _name in (*_ALL, *(_CPU if current_platform.is_cpu() else ())):
    importlib.import_module(_name)
