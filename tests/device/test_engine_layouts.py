"""Every KV cache that vLLM 0.26 and later hand over: its bytes are moved right, or it is refused.

What is right is seen through the engine's own views of its memory (`engine_caches`), never by way
of what `describe_layout` concluded.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: copies are between tensors")

from engine_caches import CASES, DENSE, FROM_029, ORDERS, TOKENS, one_allocation  # noqa: E402

from kvkeep.connectors.vllm.selftest import check_copies  # noqa: E402
from kvkeep.device.copier import CopyRun  # noqa: E402
from kvkeep.device.layout import describe_layout  # noqa: E402
from kvkeep.device.reference import ReferenceCopier, layer_tensor  # noqa: E402
from kvkeep.errors import LayoutError  # noqa: E402
from kvkeep.memory.pool import HEADER_BYTES  # noqa: E402

BLOCKS, PER_CHUNK, NUM_SLOTS = 7, 2, 3
RECORDS = Path(__file__).parents[1] / "connectors" / "engine_api"


def describe(case, tensors, num_blocks=BLOCKS):
    return describe_layout(
        [layer_tensor(f"layer.{at}", tensor) for at, tensor in enumerate(tensors)],
        num_blocks=num_blocks,
        block_tokens=TOKENS,
        page_bytes=case.page_bytes,
    )


def by_storage(tensors):
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}


def empty_slots(layout):
    slot_bytes = HEADER_BYTES + -(-PER_CHUNK * layout.block_nbytes // 4096) * 4096
    return torch.zeros(NUM_SLOTS * slot_bytes, dtype=torch.uint8), slot_bytes


def copier_of(layout, tensors, slots, slot_bytes):
    return ReferenceCopier(
        layout, by_storage(tensors), slots, slot_bytes=slot_bytes, blocks_per_chunk=PER_CHUNK
    )


def same_bytes(one, other):
    """Equal bit for bit: numbers would not do, since random bytes may be NaN."""
    return torch.equal(
        one.contiguous().view(torch.uint8).flatten(), other.contiguous().view(torch.uint8).flatten()
    )


def test_the_orders_are_those_of_the_newest_release():
    newest = max(RECORDS.glob("*.json"), key=lambda file: int(file.stem.removeprefix("0.")))
    layouts = json.loads(newest.read_text())["classes"]["KVCacheLayout"]["fields"]
    assert {name.rstrip("=") for name in layouts} == set(ORDERS)


@pytest.mark.parametrize("name", CASES)
def test_the_cases_lie_in_memory_as_they_say(name):
    """Each byte of a block belongs to it alone, and its pages are as large as specified."""
    case = CASES[name]
    raw, tensors = case.cache(BLOCKS)
    owner = torch.full_like(raw, 255)
    for number, tensor in enumerate(case.make(BLOCKS, owner)):
        for block in range(BLOCKS):
            case.blocks(tensor)[block].view(torch.uint8).fill_(block)
        assert (owner != 255).sum() == BLOCKS * sum(case.page_bytes[: number + 1])
    for tensor, page in zip(tensors, case.page_bytes, strict=True):
        assert case.blocks(tensor)[0].numel() * tensor.element_size() == page


@pytest.mark.parametrize("name", CASES)
def test_blocks_come_back_in_other_places_and_nothing_else_changes(name):
    case = CASES[name]
    raw, tensors = case.cache(BLOCKS)
    expected = raw.clone()
    moves = {1: 5, 6: 0, 3: 4, 2: 1}
    for before, after in zip(tensors, case.make(BLOCKS, expected), strict=True):
        for source, target in moves.items():
            case.blocks(after)[target].view(torch.uint8).copy_(
                case.blocks(before)[source].view(torch.uint8)
            )
    layout = describe(case, tensors)
    slots, slot_bytes = empty_slots(layout)
    copier = copier_of(layout, tensors, slots, slot_bytes)
    copier.gather([CopyRun((2, 0), 0, tuple(moves))]).wait()
    copier.scatter([CopyRun((2, 0), 0, tuple(moves.values()))]).wait()
    assert torch.equal(raw, expected)


@pytest.mark.parametrize("name", CASES)
def test_a_cache_of_another_size_takes_what_was_kept(name):
    """An engine is restarted with more memory: other addresses, other strides, the same KV."""
    case = CASES[name]
    _, before = case.cache(BLOCKS)
    _, after = case.cache(BLOCKS + 6)
    layouts = [describe(case, before), describe(case, after, BLOCKS + 6)]
    assert layouts[0].fingerprint == layouts[1].fingerprint
    check_interchange(case, before, layouts[0], case, after, layouts[1])


PAIRS = [
    (one, other)
    for one, other in itertools.combinations(CASES, 2)
    if CASES[one].page_bytes == CASES[other].page_bytes
]


def test_equal_fingerprints_mean_that_kept_bytes_can_be_exchanged():
    """Over all pairs of cases; where the bytes of a page mean something else, it differs."""
    exchanged = set()
    for one, other in PAIRS:
        first, second = CASES[one], CASES[other]
        _, before = first.cache(BLOCKS)
        _, after = second.cache(BLOCKS)
        layouts = describe(first, before), describe(second, after)
        if layouts[0].fingerprint == layouts[1].fingerprint:
            check_interchange(first, before, layouts[0], second, after, layouts[1])
            exchanged.add((one, other))
    # The same page, wherever pages lie; not so where tokens come before heads within it.
    assert ("0.29: LBHNC", "0.29: BLHNC") in exchanged
    assert ("0.29: LBHNC", "0.29: LHBNC") in exchanged
    assert ("0.26: packed, HND", "0.29: LBHNC") in exchanged
    assert ("0.29: LBHNC", "0.29: LBNHC") not in exchanged
    assert ("0.26: packed, HND", "0.26: split") not in exchanged


def check_interchange(one, before, layout_before, other, after, layout_after):
    slots, slot_bytes = empty_slots(layout_before)
    moves = {1: 5, 6: 0, 3: 4, 2: 1}
    copier_of(layout_before, before, slots, slot_bytes).gather(
        [CopyRun((1, 2), 0, tuple(moves))]
    ).wait()
    copier_of(layout_after, after, slots, slot_bytes).scatter(
        [CopyRun((1, 2), 0, tuple(moves.values()))]
    ).wait()
    for source_tensor, target_tensor in zip(before, after, strict=True):
        assert source_tensor.dtype == target_tensor.dtype
        for source, target in moves.items():
            assert same_bytes(
                one.blocks(source_tensor)[source], other.blocks(target_tensor)[target]
            )


# -- the test at start ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_test_at_start_passes_and_leaves_memory_as_it_was(name):
    case = CASES[name]
    raw, tensors = case.cache(BLOCKS)
    before = raw.clone()
    check_copies([(describe(case, tensors), tensors)], by_storage(tensors))
    assert torch.equal(raw, before)


def test_the_test_at_start_takes_groups_that_share_memory():
    """Two KV groups over the same bytes, of other shapes: a block belongs to one of them."""
    case = FROM_029["BLHNC"]
    raw, tensors = case.cache(BLOCKS)
    other = one_allocation("BLNHC", DENSE)
    more = other.make(BLOCKS, raw)
    before = raw.clone()
    groups = [(describe(case, tensors), tensors), (describe(other, more), more)]
    check_copies(groups, by_storage([*tensors, *more]))
    assert torch.equal(raw, before)


def misread(layout, **changes):
    """The same layout with its first region read wrongly."""
    first, *others = layout.regions
    wrong = {name: change(getattr(first, name)) for name, change in changes.items()}
    return replace(layout, regions=(first._replace(**wrong), *others))


WRONG = {
    "a page too far": {"offset": lambda at: at + 64},
    "blocks half as far apart": {"block_stride": lambda stride: stride // 2},
    "runs closer than they are": {"run_stride": lambda stride: stride - 64},
    "a run short": {"num_runs": lambda runs: runs - 1},
    "half of each run": {"run_bytes": lambda nbytes: nbytes // 2},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["LHBNC", "BHLNC", "BLNHC", "LBHNC"])
def test_the_test_at_start_finds_a_layout_that_was_read_wrongly(name, wrong):
    case = FROM_029[name]
    _, tensors = case.cache(BLOCKS)
    layout = misread(describe(case, tensors), **WRONG[wrong])
    with pytest.raises(LayoutError, match="self-test"):
        check_copies([(layout, tensors)], by_storage(tensors))


# -- what is refused -----------------------------------------------------------------------------


def refused(tensors, page_bytes, match, num_blocks=BLOCKS):
    with pytest.raises(LayoutError, match=match):
        describe_layout(
            [layer_tensor("layer", tensor) for tensor in tensors],
            num_blocks=num_blocks,
            block_tokens=TOKENS,
            page_bytes=[page_bytes] * len(tensors),
        )


@pytest.mark.parametrize("name", CASES)
def test_a_page_of_another_size_than_specified_is_refused(name):
    """0.26 budgets scales that a backend keeps elsewhere; padding that is taken for content."""
    case = CASES[name]
    _, tensors = case.cache(BLOCKS)
    for change in (64, -64):
        refused(tensors[:1], case.page_bytes[0] + change, "specification")


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("name", ["0.26: split", "0.26: split, kernel blocks"])
def test_two_blocks_that_could_be_k_and_v_are_refused(name, num_blocks):
    case = CASES[name]
    _, tensors = case.cache(num_blocks)
    refused(tensors[:1], case.page_bytes[0], "two axes", num_blocks)


def test_a_tensor_over_all_layers_is_not_taken_for_a_layer():
    """What `register_cross_layers_kv_cache` gives, also with as many layers as blocks."""
    for num_layers in (3, BLOCKS, 2 * BLOCKS):
        whole = torch.zeros((num_layers, BLOCKS, 2, TOKENS, 64), dtype=torch.bfloat16)
        refused([whole], whole[0, 0].nbytes, "no axis|specification")


def test_raw_memory_without_a_shape_is_refused():
    refused([torch.zeros(BLOCKS * 4096, dtype=torch.int8)], 4096, "no axis")


def test_blocks_inside_tokens_are_refused():
    """Pages scattered token by token over all blocks: nothing that a kernel reads."""
    lying = torch.zeros((TOKENS, 2, 64, BLOCKS), dtype=torch.bfloat16)
    tensor = lying.permute(3, 1, 0, 2)
    refused([tensor], tensor[0].nbytes, "runs")


def test_layers_of_another_number_of_blocks_are_refused():
    tensor = torch.zeros((BLOCKS + 1, 2, TOKENS, 64), dtype=torch.bfloat16)
    refused([tensor], tensor[0].nbytes, "no axis")
