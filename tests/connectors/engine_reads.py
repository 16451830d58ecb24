"""What kvkeep's connector takes from vLLM, found in its source: imports, and attributes it reads.

No type checker: a variable's class is known from its annotation, from its name where that always
means one thing, or from what it was assigned. `test_engine_versions` checks that known reads are
found, so that this does not quietly find nothing.
"""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
CONNECTOR = ROOT / "src" / "kvkeep" / "connectors" / "vllm"


def load_script(name):
    """One of `scripts/` as a module: they are programs, not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


engine_api = load_script("engine_api")


class Import(NamedTuple):
    """`from module import name`; `when` says what has to happen for it to run."""

    file: str
    line: int
    module: str
    name: str
    when: str
    """"always", "types" (for a type checker only) or "guarded" (its absence is handled)."""


class Read(NamedTuple):
    """`object.attribute`, where the object is of this class of vLLM."""

    file: str
    line: int
    owner: str
    attribute: str
    has_default: bool


def sources(folder=CONNECTOR):
    """(file name, syntax tree) of every file of the connector."""
    return [(file.name, ast.parse(file.read_text())) for file in sorted(folder.glob("*.py"))]


def imports(folder=CONNECTOR) -> list[Import]:
    """All that the connector imports from vLLM."""
    return [
        found
        for file, tree in sources(folder)
        for node, when in _with_guards(tree, "always")
        for found in _imported(file, node, when)
    ]


def _with_guards(node, when) -> Iterator[tuple[ast.AST, str]]:
    yield node, when
    handled = set()
    if isinstance(node, ast.Try) and any(_catches_import_error(h) for h in node.handlers):
        handled = {id(inner) for inner in node.body}
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        when = "types"
    for inner in ast.iter_child_nodes(node):
        yield from _with_guards(inner, "guarded" if id(inner) in handled else when)


def _catches_import_error(handler):
    return handler.type is not None and "ImportError" in ast.unparse(handler.type)


def _imported(file, node, when):
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
        for alias in node.names:
            yield Import(file, node.lineno, node.module, alias.name, when)


# What an object's attribute is, by its class; `[X]` is a sequence of X.
ATTRIBUTES = {
    ("VllmConfig", "parallel_config"): "ParallelConfig",
    ("VllmConfig", "model_config"): "ModelConfig",
    ("VllmConfig", "cache_config"): "CacheConfig",
    ("VllmConfig", "load_config"): "LoadConfig",
    ("VllmConfig", "kv_transfer_config"): "KVTransferConfig",
    ("SchedulerOutput", "scheduled_cached_reqs"): "CachedRequestData",
    ("KVCacheConfig", "kv_cache_groups"): "[KVCacheGroupSpec]",
    ("KVCacheGroupSpec", "kv_cache_spec"): "KVCacheSpec",
    ("Request", "lora_request"): "LoRARequest",
    ("Request", "mm_features"): "[MultiModalFeatureSpec]",
    ("MultiModalFeatureSpec", "mm_position"): "PlaceholderRange",
    ("Tracked", "request"): "Request",
    ("KVKeepConnector", "_vllm_config"): "VllmConfig",
    ("KVKeepConnector", "_kv_transfer_config"): "KVTransferConfig",
    ("KVKeepConnector", "_connector_metadata"): "StepPlan",
}
# Parameters annotated with `Any`, since a class of vLLM there would be imported in every process.
NAMES = {
    "spec": "KVCacheSpec",
    "group": "KVCacheGroupSpec",
    "request": "Request",
    "lora": "LoRARequest",
}
# Whose attributes are looked at; what the two sides send each other is the connector's own.
OWNERS = {
    *(name for names in engine_api.READ.values() for name in names),
    *("KVCacheSpec", "KVConnectorBase_V1", "KVConnectorStats", "KVConnectorFactory"),
    *("KVConnectorTransferResults", "CacheHitSource"),
}


def reads(folder=CONNECTOR) -> list[Read]:
    """Every attribute of a vLLM object that the connector reads."""
    found = []
    for file, tree in sources(folder):
        for owner in ast.walk(tree):
            if isinstance(owner, ast.ClassDef):
                found += _ClassReads(file, owner.name).of(owner)
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        for function in functions:
            found += _ClassReads(file, "").of(function)
    return sorted(set(found))


class _ClassReads:
    """Reads within one class, or within one function outside of any."""

    def __init__(self, file, name):
        self._file = file
        self._name = name
        self._attributes = dict(ATTRIBUTES)

    def of(self, node):
        functions = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]
        # Twice: the first time finds what `self` holds.
        for _ in range(2):
            found = [read for function in functions for read in self._of_function(function)]
        return found

    def _of_function(self, function):
        spec = function.args
        types = {
            arg.arg: NAMES.get(arg.arg, "") if kind == "Any" else kind
            for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)
            if (kind := ast.unparse(arg.annotation) if arg.annotation is not None else "")
        }
        types["self"] = self._name
        for _ in range(3):  # a name may come from a name that comes from a name
            self._follow(function, types)
        return list(self._reads(function, types))

    def _follow(self, function, types):
        for node in ast.walk(function):
            pairs = []
            if isinstance(node, ast.Import | ast.ImportFrom):
                types |= _imported_objects(node)
            elif isinstance(node, ast.Assign):
                pairs = [(target, self._type(node.value, types)) for target in node.targets]
            elif isinstance(node, ast.For | ast.comprehension):
                inside = self._type(node.iter, types) or ""
                pairs = [(node.target, inside[1:-1] if inside.startswith("[") else None)]
            for target, kind in pairs:
                if kind and isinstance(target, ast.Name):
                    types.setdefault(target.id, kind)
                elif kind and isinstance(target, ast.Attribute):
                    self._attributes.setdefault((self._name, target.attr), kind)

    def _type(self, node, types):
        if isinstance(node, ast.BoolOp):  # `x or ()`
            return self._type(node.values[0], types)
        if isinstance(node, ast.Name):
            return types.get(node.id) or ("Tracked" if node.id == "tracked" else None)
        if isinstance(node, ast.Attribute):
            return self._attributes.get((self._type(node.value, types), node.attr))
        asked = _getattr(node)
        if asked is not None:
            return self._attributes.get((self._type(asked[0], types), asked[1]))
        return None

    def _reads(self, function, types):
        for node in ast.walk(function):
            asked = _getattr(node)
            if asked is not None:
                target, attribute, has_default = asked
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                target, attribute, has_default = node.value, node.attr, False
            else:
                continue
            owner = self._type(target, types)
            if owner == "KVKeepConnector" and (owner, attribute) in ATTRIBUTES:
                owner = "KVConnectorBase_V1"
            if owner in OWNERS or (owner or "").startswith("module "):
                yield Read(self._file, node.lineno, owner, attribute, has_default)


def _imported_objects(node):
    """Modules and classes of vLLM that an import within a function brings: their names."""
    if isinstance(node, ast.Import):
        return {a.name: f"module {a.name}" for a in node.names if a.name == "vllm"}
    if (node.module or "").split(".")[0] != "vllm":
        return {}
    # A module's name begins with a small letter, a class's does not.
    return {
        a.name: f"module {node.module}.{a.name}" if a.name[0].islower() else a.name
        for a in node.names
    }


def _getattr(node):
    """(object, attribute, has a default) of a `getattr` whose attribute is written out."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "getattr":
        return None
    if not isinstance(node.args[1], ast.Constant):
        return None
    return node.args[0], node.args[1].value, len(node.args) > 2
