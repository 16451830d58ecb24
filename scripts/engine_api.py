"""Writes down what kvkeep's connector needs to know of one vLLM release: facts, no code.

    python scripts/engine_api.py vllm-0.33.0-*.whl > tests/connectors/engine_api/0.33.json

Reads a wheel or a source folder with `ast`; nothing of vLLM is imported, so releases that do not
run on this machine can be read. The tests compare the connector with every recorded release.

A signature is written `self, request, tokens=, *, flag=, **rest`: `=` marks a default. A call is
written in the same way: `_, _, role=, **` has two positional arguments, `role` and a `**mapping`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONNECTOR = Path(__file__).parents[1] / "src" / "kvkeep" / "connectors" / "vllm"
_TRANSFER = "vllm.distributed.kv_transfer.kv_connector"
_SPECS = "vllm.v1.kv_cache_interface"

# Classes that the connector derives from: every method, with its signature.
DERIVED_FROM = {
    f"{_TRANSFER}.v1.base": (
        "KVConnectorBase_V1",
        "SupportsHMA",
        "KVConnectorHandshakeMetadata",
        "KVConnectorMetadata",
        "KVConnectorWorkerMetadata",
        "KVConnectorTransferResults",
        "KVConnectorRole",
    ),
    f"{_TRANSFER}.v1.metrics": ("KVConnectorStats", "KVConnectorPromMetrics"),
    f"{_TRANSFER}.factory": ("KVConnectorFactory",),
    "vllm.v1.metrics.cache_hit_source": ("CacheHitSource",),
    "vllm.v1.kv_cache_layout": ("KVCacheLayout",),
}
# Classes whose objects it reads: the names of their attributes.
READ = {
    "vllm.v1.request": ("Request",),
    "vllm.v1.core.sched.output": ("SchedulerOutput", "CachedRequestData", "NewRequestData"),
    "vllm.v1.core.kv_cache_manager": ("KVCacheBlocks",),
    "vllm.v1.outputs": ("KVConnectorOutput",),
    _SPECS: ("KVCacheConfig", "KVCacheGroupSpec", "KVCacheTensor"),
    "vllm.config.vllm": ("VllmConfig",),
    "vllm.config.parallel": ("ParallelConfig",),
    "vllm.config.model": ("ModelConfig",),
    "vllm.config.cache": ("CacheConfig",),
    "vllm.config.load": ("LoadConfig",),
    "vllm.config.kv_transfer": ("KVTransferConfig",),
    "vllm.lora.request": ("LoRARequest",),
    "vllm.multimodal.inputs": ("MultiModalFeatureSpec", "PlaceholderRange"),
}
# Whoever is called like this in vLLM's source is a KV connector.
_CALLED = re.compile(r"(^|\.)(kv_)?connector$|kv_transfer_group(\(\))?$|(^|\.)connector_cls$")
_NOT_THE_ENGINE = re.compile(
    r"/kv_connector/v1/(?!base|metrics)|/ec_transfer/|/ec_connector|/aux_output_connector/"
)


class Source:
    """The Python files of a vLLM wheel, of its unpacked folder, or of a `site-packages`."""

    def __init__(self, path: Path) -> None:
        self._wheel = zipfile.ZipFile(path) if path.is_file() else None
        self._folder = path
        if self._wheel is not None:
            files = [name for name in self._wheel.namelist() if name.endswith(".py")]
        else:
            files = [str(file.relative_to(path)) for file in sorted(path.glob("vllm/**/*.py"))]
        self.files = sorted(name for name in files if name.startswith("vllm/"))
        if "vllm/__init__.py" not in self.files:
            raise SystemExit(f"{path} holds no vLLM")
        self._trees: dict[str, ast.Module] = {}

    def text(self, file: str) -> str:
        """One file's source."""
        if self._wheel is not None:
            return self._wheel.read(file).decode()
        return (self._folder / file).read_text()

    def tree(self, file: str) -> ast.Module:
        """One file's syntax tree."""
        if file not in self._trees:
            self._trees[file] = ast.parse(self.text(file))
        return self._trees[file]

    def file_of(self, module: str) -> str | None:
        """The file of a module by its dotted name; None where this release has none."""
        stem = module.replace(".", "/")
        return next((f for f in (f"{stem}.py", f"{stem}/__init__.py") if f in self.files), None)

    def module(self, module: str) -> ast.Module | None:
        """A module's syntax tree by its dotted name."""
        file = self.file_of(module)
        return self.tree(file) if file is not None else None

    def version(self) -> str:
        """The release, from the file that its build wrote."""
        found = re.search(r"version = '(\d+\.\d+\.\d+)", self.text("vllm/_version.py"))
        assert found is not None, "vllm/_version.py names no release"
        return found.group(1)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """`body` and what stands in its `if` and `try` blocks."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from statements(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            handled = [inner for handler in node.handlers for inner in handler.body]
            yield from statements(node.body + handled + node.orelse + node.finalbody)


def class_named(tree: ast.Module | None, name: str) -> ast.ClassDef | None:
    """A module's class, where it has one of that name."""
    found = statements(tree.body) if tree is not None else ()
    return next((n for n in found if isinstance(n, ast.ClassDef) and n.name == name), None)


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A function's parameters, as the module's docstring says."""
    spec = function.args
    positional = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
    first_default = len(positional) - len(spec.defaults)
    parts = [f"{name}=" if at >= first_default else name for at, name in enumerate(positional)]
    if spec.vararg is not None:
        parts.append(f"*{spec.vararg.arg}")
    elif spec.kwonlyargs:
        parts.append("*")
    for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        parts.append(f"{arg.arg}=" if default is not None else arg.arg)
    if spec.kwarg is not None:
        parts.append(f"**{spec.kwarg.arg}")
    return ", ".join(parts)


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}


def _only_raises(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a subclass has to write this method, though nothing declares it abstract."""
    last = function.body[-1]
    return isinstance(last, ast.Raise) and "NotImplementedError" in ast.unparse(last)


def method_facts(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """`abstract property (self)`: what a method is, then its signature."""
    found = _decorators(node)
    kinds = ["abstract"] if "abstractmethod" in found or _only_raises(node) else []
    kinds += [kind for kind in ("classmethod", "staticmethod") if kind in found]
    kinds += ["property"] if found & {"property", "cached_property"} else []
    return " ".join([*kinds, f"({signature(node)})"])


def _set_in_init(node: ast.ClassDef) -> set[str]:
    """Attributes that `__init__` gives to self."""
    inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return {
        target.attr
        for init in inits
        for inner in ast.walk(init)
        if isinstance(inner, ast.Assign | ast.AnnAssign)
        for target in (inner.targets if isinstance(inner, ast.Assign) else [inner.target])
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    }


def class_facts(node: ast.ClassDef, *, signatures: bool) -> dict[str, Any]:
    """A class: its bases, its own fields (`=` after those with a default), what it can be asked."""
    fields: list[str] = []
    methods: dict[str, str] = {}
    for inner in node.body:
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            if not ast.unparse(inner.annotation).startswith("ClassVar"):
                fields.append(inner.target.id + ("=" if inner.value is not None else ""))
        elif isinstance(inner, ast.Assign):
            fields += [f"{t.id}=" for t in inner.targets if isinstance(t, ast.Name)]
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            methods[inner.name] = method_facts(inner)
    facts: dict[str, Any] = {
        "bases": [ast.unparse(base) for base in node.bases],
        "fields": fields,
        "set_in_init": sorted(_set_in_init(node)),
    }
    if signatures:
        facts["methods"] = methods
    else:
        facts["members"] = sorted(
            name for name in methods if not name.startswith("__") and "validat" not in name
        )
    return {name: value for name, value in facts.items() if value}


def _classes(source: Source) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for wanted, signatures in ((DERIVED_FROM, True), (READ, False)):
        for module, names in wanted.items():
            for name in names:
                node = class_named(source.module(module), name)
                if node is not None:
                    found[name] = {
                        "module": module,
                        **class_facts(node, signatures=signatures),
                    }
    return dict(sorted(found.items()))


def _specs(source: Source) -> dict[str, dict[str, Any]]:
    """Every class that says how a layer's KV is cached, wherever it is written."""
    candidates: dict[str, tuple[str, ast.ClassDef]] = {}
    for file in source.files:
        if not re.search(r"^class \w+\([^)]*Specs?\b", source.text(file), re.MULTILINE):
            continue
        for node in statements(source.tree(file).body):
            if isinstance(node, ast.ClassDef):
                candidates.setdefault(node.name, (file, node))
    file = source.file_of(_SPECS)
    root = class_named(source.module(_SPECS), "KVCacheSpec")
    assert file is not None, "this vLLM has no vllm.v1.kv_cache_interface"
    assert root is not None, "this vLLM has no KVCacheSpec"
    kinds = {"KVCacheSpec": (file, root)}
    grows = True
    while grows:
        more = {
            name: (file, node)
            for name, (file, node) in candidates.items()
            if name not in kinds and any(ast.unparse(base) in kinds for base in node.bases)
        }
        kinds |= more
        grows = bool(more)
    return {
        name: {
            "module": file.removesuffix(".py").replace("/", "."),
            **class_facts(node, signatures=False),
        }
        for name, (file, node) in sorted(kinds.items())
    }


def imported(folder: Path = CONNECTOR) -> set[str]:
    """What the connector's source imports from vLLM: modules, and `module.name` of each name."""
    found: set[str] = set()
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found.add(str(node.module))
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {a.name for a in node.names if a.name.split(".")[0] == "vllm"}
    return found


def _names(source: Source, file: str) -> list[str]:
    """What can be imported from a module."""
    found: set[str] = set()
    for node in statements(source.tree(file).body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = [n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            found |= {name.id for name in named}
    if file.endswith("/__init__.py"):
        folder = file.removesuffix("__init__.py")
        inside = [other.removeprefix(folder) for other in source.files if other.startswith(folder)]
        found |= {name.split("/")[0].removesuffix(".py") for name in inside}
    return sorted(name for name in found if name == "__version__" or not name.startswith("__"))


def _call(node: ast.Call) -> str:
    parts = ["*" if isinstance(arg, ast.Starred) else "_" for arg in node.args]
    named = sorted(f"{keyword.arg}=" for keyword in node.keywords if keyword.arg is not None)
    rest = ["**"] if any(keyword.arg is None for keyword in node.keywords) else []
    return ", ".join([*parts, *named, *rest])


def _calls(source: Source, hooks: set[str]) -> dict[str, list[str]]:
    """Hook -> the different ways in which the engine calls it."""
    found: dict[str, set[str]] = {}
    for file in source.files:
        if _NOT_THE_ENGINE.search(file) or "connector" not in source.text(file):
            continue
        for node in ast.walk(source.tree(file)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            hook = node.func.attr
            if hook in hooks and _CALLED.search(ast.unparse(node.func.value)):
                found.setdefault(hook, set()).add(_call(node))
    return {hook: sorted(ways) for hook, ways in sorted(found.items())}


def engine_api(source: Source) -> dict[str, Any]:
    """All facts of one release."""
    classes = _classes(source)
    bases = [classes[name] for name in ("KVConnectorBase_V1", "SupportsHMA")]
    return {
        "version": source.version(),
        "classes": classes,
        "specs": _specs(source),
        "names": {
            module: _names(source, file)
            for module in sorted(imported())
            if (file := source.file_of(module)) is not None
        },
        "calls": _calls(source, {hook for base in bases for hook in base["methods"]}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, help="a wheel of vLLM, or a folder that holds vllm/")
    facts = engine_api(Source(parser.parse_args().path))
    json.dump(facts, sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
