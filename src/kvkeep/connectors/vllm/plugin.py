"""The entry point of `vllm.general_plugins`: makes `KVKeepConnector` a name that vLLM knows.

vLLM calls it in every process, perhaps several times; it must not import the engine's heavy
parts, nor ours.
"""

from __future__ import annotations

import importlib.util
from typing import Any

_MODULE = "kvkeep.connectors.vllm.connector"
_CLASS = "KVKeepConnector"
_LMCACHE_NAME = "LMCacheConnectorV1"


def register() -> None:
    """Register the connector; twice is as good as once.

    Where LMCache is not installed its connector's name resolves to ours, so that commands written
    for it run unchanged; the connector says so in the log when it is made.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    registry: dict[str, Any] = KVConnectorFactory._registry  # pyright: ignore[reportPrivateUsage]
    if _CLASS not in registry:
        KVConnectorFactory.register_connector(_CLASS, _MODULE, _CLASS)
    if importlib.util.find_spec("lmcache") is None:
        registry[_LMCACHE_NAME] = registry[_CLASS]
