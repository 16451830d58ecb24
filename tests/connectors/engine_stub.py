"""A package named `vllm` that has what one release has by its record, and nothing else.

Classes that the connector derives from can be derived from; classes whose objects it reads take
values for the attributes that the release has, and refuse others. All else is a name without use.
"""

from pathlib import Path

from engine_reads import engine_api

_DERIVED_FROM = {name for names in engine_api.DERIVED_FROM.values() for name in names}
_PRELUDE = '''\
import abc, dataclasses, enum


class Unused:
    """Whatever else can be imported."""

    def __init__(self, name):
        self.name = name

    def __call__(self, *args, **kwargs):
        raise TypeError(f"{self.name} does nothing in this stub")


class Facts:
    """An object that has only what this release gives it, and only what it was given here."""

    known = frozenset()

    def __init__(self, **values):
        unknown = set(values).difference(*(c.known for c in type(self).__mro__[:-1]))
        if unknown:
            raise TypeError(f"{type(self).__name__} has no {sorted(unknown)} in this release")
        self.__dict__.update(values)
'''
# The few methods that must do something.
_BODIES = {
    "bind_connector_metadata": "self._connector_metadata = connector_metadata",
    "clear_connector_metadata": "self._connector_metadata = None",
    "register_connector": "cls._registry[name] = (module_path, class_name)",
    "to_dict": "return self.data",
}
_VALUES = {"_registry": "{}", "_kv_transfer_config": "vllm_config.kv_transfer_config"}


def make_stub(folder: Path, api):
    """Write the package into `folder`; `api` is a record of `scripts/engine_api.py`."""
    classes = {**api["specs"], **api["classes"]}
    modules = {module: set(names) for module, names in api["names"].items()}
    for name, facts in classes.items():
        modules.setdefault(facts["module"], set()).add(name)
    for module in list(modules):
        parts = module.split(".")
        for at in range(1, len(parts)):
            modules.setdefault(".".join(parts[:at]), set())
    for module, names in modules.items():
        path = folder / module.replace(".", "/")
        path.mkdir(parents=True, exist_ok=True)
        own = {n: facts for n, facts in classes.items() if facts["module"] == module}
        others = {n for n in names - own.keys() if f"{module}.{n}" not in modules}
        text = [_PRELUDE, *_classes(own)]
        if module == "vllm":
            # Only the version: what else it offers would import all modules in circles.
            text.append(f'__version__ = "{api["version"]}"\n')
        else:
            text += [_name(name, classes.get(name)) for name in sorted(others)]
        (path / "__init__.py").write_text("\n\n".join(text))


def _name(name, facts):
    if facts is None:
        return f'{name} = Unused("{name}")\n'
    return f"from {facts['module']} import {name}\n"


def _classes(own):
    """The classes of one module, bases first."""
    left = dict(own)
    while left:
        ready = [n for n, facts in left.items() if not left.keys() & {*facts.get("bases", ())}]
        assert ready, f"classes that are each other's bases: {sorted(left)}"
        for name in ready:
            yield _class(name, left.pop(name), own)


def _class(name, facts, own):
    bases = [base for base in facts.get("bases", ()) if base in own]
    names = [field.rstrip("=") for field in facts.get("fields", ())]
    if any(base.endswith("Enum") for base in facts.get("bases", ())):
        return f"{name} = enum.Enum('{name}', {names}, module=__name__)\n"
    if name not in _DERIVED_FROM:
        known = sorted({*names, *facts.get("members", ()), *facts.get("set_in_init", ())})
        return f"class {name}({', '.join(bases) or 'Facts'}):\n    known = frozenset({known})\n"
    lines = [f"class {name}({', '.join([*bases, 'abc.ABC'])}):", "    pass"]
    private = all(field.startswith("_") for field in names)
    typed = "" if private else ": object"
    lines += [f"    {field}{typed} = {_VALUES.get(field, 'None')}" for field in names]
    for method, described in facts.get("methods", {}).items():
        lines += _method(method, described, facts.get("set_in_init", ()))
    return "\n".join([*([] if private else ["@dataclasses.dataclass"]), *lines]) + "\n"


def _method(name, described, set_in_init):
    kinds, _, inside = described.partition("(")
    parameters = [f"{p}None" if p.endswith("=") else p for p in inside.rstrip(")").split(", ")]
    lines = [f"    @{kind}" for kind in kinds.split() if kind != "abstract"]
    if "abstract" in kinds:
        lines.append("    @abc.abstractmethod")
    lines.append(f"    def {name}({', '.join(parameters)}):")
    if name == "__init__":
        for attribute in set_in_init:
            plain = attribute.removeprefix("_")
            value = plain if plain in parameters else _VALUES.get(attribute, "None")
            lines.append(f"        self.{attribute} = {value}")
    return [*lines, f"        {_BODIES.get(name, 'return None')}"]
