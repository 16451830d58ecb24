"""Checks of `kvkeep doctor`: what is installed, and whether vLLM finds kvkeep."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kvkeep import __version__
from kvkeep.cli.engine_probe import Answer, ask_engine
from kvkeep.cli.finding import Finding, fail, ok, warn

OLDEST_VLLM = (0, 26)
OLDEST_PYTHON = (3, 10)
_GROUP = "vllm.general_plugins"
_PLUGIN = "kvkeep"
_REGISTER = "kvkeep.connectors.vllm.plugin:register"
_VERSION = re.compile(r"(\d+)\.(\d+)")


def installation() -> Iterator[Finding]:
    """What can be said at once."""
    yield python(sys.version_info[:2])
    yield ok("kvkeep", f"{__version__}, {os.path.dirname(os.path.dirname(__file__))}")
    yield xxhash()
    yield entry_point(
        [one.value for one in importlib.metadata.entry_points(group=_GROUP) if one.name == _PLUGIN]
    )
    yield plugins_filter(os.environ)
    yield lmcache(is_installed=importlib.util.find_spec("lmcache") is not None)


def engine(ask: Callable[[], Iterable[Answer]] = ask_engine) -> Iterator[Finding]:
    """What takes an import of the engine: seconds."""
    judges = {"torch": torch, "vllm": vllm, "connector": connector}
    is_vllm_there = True
    for answer in ask():
        if answer.part == "connector" and not is_vllm_there:
            continue
        yield judges[answer.part](answer)
        if answer.part == "vllm":
            is_vllm_there = not answer.is_missing and answer.error is None


def python(version: tuple[int, int]) -> Finding:
    """The interpreter's version."""
    if version < OLDEST_PYTHON:
        return fail("python", "{}.{} is too old".format(*version), "use Python 3.10 or newer")
    return ok("python", f"{platform.python_version()}, {sys.executable}")


def xxhash() -> Finding:
    """The hash that guards frames."""
    try:
        import xxhash
    except ImportError as error:
        return fail("xxhash", f"cannot be imported: {error}", "pip install 'xxhash>=3.4'")
    if not hasattr(xxhash, "xxh3_128_digest"):
        return fail("xxhash", f"{xxhash.VERSION} has no XXH3", "pip install 'xxhash>=3.4'")
    return ok("xxhash", xxhash.VERSION)


def entry_point(values: list[str]) -> Finding:
    """Whether vLLM learns of the connector; `values`: what the entry point's name stands for."""
    if _REGISTER in values:
        return ok("plug-in", f"registered in {_GROUP}")
    found = f"{values[0]}, not {_REGISTER}" if values else "not registered"
    return fail(
        "plug-in",
        f"{_PLUGIN} in {_GROUP}: {found}; vLLM won't know KVKeepConnector",
        "install kvkeep with pip in this environment; a source tree on PYTHONPATH is not enough",
    )


def plugins_filter(env: Mapping[str, str]) -> Finding:
    """Whether `VLLM_PLUGINS` lets the plug-in through; vLLM loads only the names in it."""
    value = env.get("VLLM_PLUGINS")
    if value is None:
        return ok("VLLM_PLUGINS", "not set: vLLM loads every plug-in")
    if _PLUGIN in value.split(","):
        return ok("VLLM_PLUGINS", f"has {_PLUGIN}")
    names = ",".join(name for name in (*value.split(","), _PLUGIN) if name)
    return fail(
        "VLLM_PLUGINS",
        f"is {value!r}: vLLM does not load kvkeep's plug-in",
        f"unset it, or set VLLM_PLUGINS={names}",
    )


def lmcache(*, is_installed: bool) -> Finding:
    """Whose connector the name of LMCache's stands for."""
    if is_installed:
        return warn(
            "LMCache",
            "is installed: LMCacheConnectorV1 is LMCache's own connector",
            "name KVKeepConnector in --kv-transfer-config, or uninstall lmcache",
        )
    return ok("LMCache", "not installed: LMCacheConnectorV1 resolves to kvkeep")


def torch(answer: Answer) -> Finding:
    """Its version and CUDA."""
    if answer.is_missing:
        return warn("torch", "not installed", "it comes with vLLM; kvkeep's commands need none")
    if answer.error is not None:
        return fail("torch", answer.error, "reinstall torch: python -c 'import torch' must work")
    facts = answer.facts
    if facts["cuda"] is None:
        return ok("torch", f"{facts['version']}, without CUDA: the CPU path is used")
    built = f"{facts['version']}, CUDA {facts['cuda']}"
    if not facts["gpus"]:
        return warn("torch", f"{built}, but no GPU is seen", "look at nvidia-smi and the driver")
    return ok("torch", f"{built}, {facts['gpus']} GPUs: {facts['gpu_name']}")


def vllm(answer: Answer) -> Finding:
    """Its version."""
    oldest = "{}.{}".format(*OLDEST_VLLM)
    upgrade = f"pip install 'vllm>={oldest}'"
    if answer.is_missing:
        return warn("vllm", "not installed", f"{upgrade}; kvkeep's commands work without")
    if answer.error is not None:
        return fail("vllm", answer.error, "reinstall vLLM: python -c 'import vllm' must work")
    version: Any = answer.facts["version"]
    match = _VERSION.match(version)
    number = (int(match[1]), int(match[2])) if match else (0, 0)
    if "dev" in version and number < (0, 2):
        return warn(
            "vllm",
            f"{version} does not tell which release it is",
            f"{oldest} and newer are supported; build it from a checkout with tags",
        )
    if number < OLDEST_VLLM:
        return fail("vllm", f"{version} is older than {oldest}, the first supported", upgrade)
    return ok("vllm", f"{version} (supported: {oldest} and newer)")


def connector(answer: Answer) -> Finding:
    """Whether this vLLM can make our connector."""
    check = "connector"
    if answer.error is not None or answer.is_missing:
        problem = answer.error or "cannot be imported"
        return fail(check, problem, "install a newer kvkeep, or a vLLM that this one supports")
    if lacks := answer.facts["lacks"]:
        return fail(check, f"this vLLM also asks for {', '.join(lacks)}", "install a newer kvkeep")
    return ok(check, "KVKeepConnector loads in this vLLM")
