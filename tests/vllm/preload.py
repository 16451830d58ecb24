"""What every engine imports, imported once before engines are forked; starts no thread."""

import importlib

for _name in (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
    "transformers",
    "kvkeep.connectors.vllm.connector",
):
    importlib.import_module(_name)
