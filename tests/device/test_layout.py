"""Where a block's bytes lie: for each layout that engines use, compared with counting elements.

No torch here: a tensor is a shape, strides and an address.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.device.layout import LayerTensor, describe_layout
from kvkeep.errors import LayoutError

BLOCKS, TOKENS, HEADS, DIM = 7, 16, 2, 32
ITEM = 2
PAGE_NBYTES = 2 * TOKENS * HEADS * DIM * ITEM


def dense(shape, order=None):
    """Strides of a dense tensor whose axes lie in memory in `order`, outermost first."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order or range(len(shape))):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def layer(shape, strides=None, *, name="layer", storage=1, offset=0, itemsize=ITEM, dtype="bf16"):
    return LayerTensor(
        name, tuple(shape), strides or dense(shape), itemsize, dtype, storage, offset
    )


def describe(*tensors, num_blocks=BLOCKS, page_nbytes=PAGE_NBYTES):
    return describe_layout(
        tensors,
        num_blocks=num_blocks,
        block_tokens=TOKENS,
        page_bytes=[page_nbytes] * len(tensors),
    )


def bytes_of_block(layout, block):
    """(storage, address) of every byte of a block, in the order it is kept."""
    return [
        (region.storage, region.offset + block * region.block_stride + run * region.run_stride + at)
        for region in layout.regions
        for run in range(region.num_runs)
        for at in range(region.run_bytes)
    ]


def bytes_of_elements(tensor, block, axis, num_blocks):
    """The same set, from every element whose index on `axis` belongs to the block."""
    per_block = tensor.shape[axis] // num_blocks
    ranges = [range(size) for size in tensor.shape]
    ranges[axis] = range(block * per_block, (block + 1) * per_block)
    return {
        (
            tensor.storage,
            tensor.offset + at + tensor.itemsize * sum(map(int.__mul__, place, strides)),
        )
        for strides in [tensor.strides]
        for place in itertools.product(*ranges)
        for at in range(tensor.itemsize)
    }


PACKED = (BLOCKS, HEADS, TOKENS, 2 * DIM)
SPLIT = (2, BLOCKS, TOKENS, HEADS, DIM)
STACKED = (BLOCKS, 2, TOKENS, HEADS, DIM)
LATENT = (BLOCKS, TOKENS, 4 * DIM)
PADDED = 4 * TOKENS * HEADS * DIM

# name: (shape, strides, axis that counts blocks, runs of one block)
LAYOUTS = {
    "packed": (PACKED, None, 0, 1),
    "packed, tokens before heads": (PACKED, dense(PACKED, (0, 2, 1, 3)), 0, 1),
    "stacked": (STACKED, None, 0, 1),
    "stacked, heads before tokens": (STACKED, dense(STACKED, (0, 1, 3, 2, 4)), 0, 1),
    "split": (SPLIT, None, 1, 2),
    "split, heads before tokens": (SPLIT, dense(SPLIT, (0, 1, 3, 2, 4)), 1, 2),
    "split, but stored by block": (SPLIT, dense(SPLIT, (1, 0, 2, 3, 4)), 1, 1),
    "latent": (LATENT, None, 0, 1),
    "kernel blocks of half the size": ((2 * BLOCKS, HEADS, TOKENS // 2, 2 * DIM), None, 0, 1),
    "kernel blocks, split": ((2, 4 * BLOCKS, TOKENS // 4, HEADS, DIM), None, 1, 2),
    "padding between pages": (PACKED, (PADDED, *dense(PACKED)[1:]), 0, 1),
    "heads outside blocks": (PACKED, dense(PACKED, (1, 0, 2, 3)), 0, HEADS),
    "a block axis of its own for each token": (LATENT, dense(LATENT, (1, 0, 2)), 0, TOKENS),
}


@pytest.mark.parametrize("offset", [0, 12288])
@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_every_byte_of_a_block_once_and_no_other(layout_name, offset):
    shape, strides, axis, num_runs = LAYOUTS[layout_name]
    tensor = layer(shape, strides, offset=offset)
    layout = describe(tensor)
    assert layout.block_nbytes == PAGE_NBYTES
    assert sum(region.num_runs for region in layout.regions) == num_runs
    for block in range(BLOCKS):
        found = bytes_of_block(layout, block)
        assert len(found) == len(set(found)) == PAGE_NBYTES
        assert set(found) == bytes_of_elements(tensor, block, axis, BLOCKS)


def test_layers_in_one_allocation_are_one_region():
    page = PAGE_NBYTES // ITEM
    strides = (page, *dense(PACKED)[1:])
    tensors = [
        layer(PACKED, strides, name=f"layer.{at}", offset=at * BLOCKS * PAGE_NBYTES)
        for at in range(4)
    ]
    (region,) = describe(*tensors).regions
    assert (region.num_runs, region.run_bytes) == (4, PAGE_NBYTES)
    assert region.run_stride == BLOCKS * PAGE_NBYTES


def test_a_block_over_all_layers_that_lies_in_one_piece():
    """Cross-layer, block-major: [blocks, layers, ...] in one allocation, one view a layer."""
    strides = (4 * PAGE_NBYTES // ITEM, *dense(PACKED)[1:])
    tensors = [layer(PACKED, strides, offset=at * PAGE_NBYTES) for at in range(4)]
    layout = describe(*tensors)
    (region,) = layout.regions
    assert region.run_stride == PAGE_NBYTES
    assert region.block_stride == 4 * PAGE_NBYTES
    assert [at for _, at in bytes_of_block(layout, 1)] == list(
        range(4 * PAGE_NBYTES, 8 * PAGE_NBYTES)
    )


@pytest.mark.parametrize("offsets", [(3, 2, 1, 0), (0, 2, 1, 3), (0, 1, 3, 4)])
def test_layers_in_any_order_of_addresses_are_kept_in_their_own_order(offsets):
    tensors = [layer(PACKED, offset=at * BLOCKS * PAGE_NBYTES) for at in offsets]
    found = bytes_of_block(describe(*tensors), 2)
    expected = [
        (1, at * BLOCKS * PAGE_NBYTES + 2 * PAGE_NBYTES + byte)
        for at in offsets
        for byte in range(PAGE_NBYTES)
    ]
    assert found == expected


def test_layers_in_allocations_of_their_own_and_of_different_kind():
    tensors = [
        layer(PACKED, storage=1),
        layer(SPLIT, storage=2, offset=512),
        layer(PACKED, storage=3),
    ]
    found = bytes_of_block(describe(*tensors), 3)
    assert len(set(found)) == 3 * PAGE_NBYTES
    assert [storage for storage, _ in found] == [
        storage for storage in (1, 2, 3) for _ in range(PAGE_NBYTES)
    ]


@settings(deadline=None, max_examples=150)
@given(
    st.integers(3, 9),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
    st.integers(33, 70),
    st.integers(0, 40),
    st.randoms(use_true_random=False),
)
def test_odd_sizes_in_any_order(num_blocks, outer, itemsize, inner, padding, random):
    """A dense page whose axes were permuted, with padding behind it: all its bytes, or refused."""
    shape = (num_blocks, *outer, inner)
    order = list(range(1, len(shape) - 1))
    random.shuffle(order)
    strides = list(dense(shape, (0, *order, len(shape) - 1)))
    strides[0] += padding
    tensor = layer(shape, tuple(strides), itemsize=itemsize)
    page_nbytes = itemsize * inner
    for size in outer:
        page_nbytes *= size
    try:
        layout = describe(tensor, num_blocks=num_blocks, page_nbytes=page_nbytes)
    except LayoutError:
        assert page_nbytes < 64
        return
    for block in (0, num_blocks - 1):
        found = bytes_of_block(layout, block)
        assert len(found) == len(set(found)) == page_nbytes
        assert set(found) == bytes_of_elements(tensor, block, 0, num_blocks)


@pytest.mark.parametrize(
    ("shape", "strides", "num_blocks", "why"),
    [
        ((2, 2, TOKENS, HEADS, DIM), None, 2, "two axes"),
        ((2, 3, TOKENS, HEADS, DIM), None, 1, "two axes"),
        ((BLOCKS + 1, HEADS, TOKENS, 2 * DIM), None, BLOCKS, "no axis"),
        ((3, BLOCKS, TOKENS, HEADS, DIM), None, BLOCKS, "no axis"),
        ((0, HEADS, TOKENS, 2 * DIM), None, BLOCKS, "no axis"),
        ((BLOCKS,), None, BLOCKS, "no axis"),
        ((), None, BLOCKS, "no axis"),
        (
            (BLOCKS, TOKENS, 2 * HEADS * DIM),
            dense((BLOCKS, TOKENS, 128), (2, 1, 0)),
            BLOCKS,
            "runs",
        ),
        ((BLOCKS, HEADS, TOKENS, 2 * DIM), (2048, 0, 64, 1), BLOCKS, "overlaps"),
        ((BLOCKS, HEADS, TOKENS, 2 * DIM), (2048, 1024, 32, 1), BLOCKS, "overlaps"),
        # Each axis steps over the innermost run, but together they step on each other's.
        ((BLOCKS, HEADS, TOKENS, 2 * DIM), (8192, 96, 80, 1), BLOCKS, "overlaps"),
        # Blocks lie on each other.
        ((BLOCKS, HEADS, TOKENS, 2 * DIM), (1024, 1024, 64, 1), BLOCKS, "overlaps"),
        ((BLOCKS, HEADS, TOKENS, 2 * DIM), (0, 1024, 64, 1), BLOCKS, "overlaps"),
    ],
)
def test_what_is_not_known_is_refused_and_not_guessed(shape, strides, num_blocks, why):
    page_nbytes = PAGE_NBYTES
    with pytest.raises(LayoutError, match=why):
        describe(layer(shape, strides), num_blocks=num_blocks, page_nbytes=page_nbytes)


@pytest.mark.parametrize("page_nbytes", [PAGE_NBYTES - 1, PAGE_NBYTES // 2, 2 * PAGE_NBYTES, 0])
def test_a_size_that_the_engine_contradicts_is_refused(page_nbytes):
    with pytest.raises(LayoutError, match="specification"):
        describe(layer(PACKED), page_nbytes=page_nbytes)


def test_no_layers_are_no_layout():
    with pytest.raises(LayoutError, match="no layers"):
        describe()


def fingerprint(*tensors, num_blocks=BLOCKS, page_nbytes=PAGE_NBYTES):
    return describe(*tensors, num_blocks=num_blocks, page_nbytes=page_nbytes).fingerprint


def test_a_fingerprint_says_nothing_of_addresses_names_and_block_count():
    more = (4 * BLOCKS, *PACKED[1:])
    padded = (PADDED, *dense(PACKED)[1:])
    assert {
        fingerprint(layer(PACKED), layer(PACKED, offset=BLOCKS * PAGE_NBYTES)),
        fingerprint(layer(PACKED, storage=77, offset=512, name="a"), layer(PACKED, storage=9)),
        fingerprint(layer(more), layer(more, storage=2), num_blocks=4 * BLOCKS),
        fingerprint(layer(PACKED, padded), layer(PACKED, padded, storage=2)),
    } == {fingerprint(layer(PACKED), layer(PACKED, storage=2))}


def test_fingerprints_differ_where_the_bytes_mean_something_else():
    swapped = (BLOCKS, TOKENS, HEADS, 2 * DIM)
    others = {
        "packed": fingerprint(layer(PACKED)),
        "two layers": fingerprint(layer(PACKED), layer(PACKED, storage=2)),
        "tokens first in memory": fingerprint(layer(PACKED, dense(PACKED, (0, 2, 1, 3)))),
        "tokens first in shape": fingerprint(layer(swapped)),
        "another type of the same size": fingerprint(layer(PACKED, dtype="float16")),
        "split": fingerprint(layer(SPLIT)),
        "stacked": fingerprint(layer(STACKED)),
        "latent": fingerprint(layer(LATENT)),
        "kernel blocks": fingerprint(layer((2 * BLOCKS, HEADS, TOKENS // 2, 2 * DIM))),
        "more heads": fingerprint(
            layer((BLOCKS, 2 * HEADS, TOKENS, 2 * DIM)), page_nbytes=2 * PAGE_NBYTES
        ),
        "heads for dims": fingerprint(layer((BLOCKS, 2 * HEADS, TOKENS, DIM))),
        "other order of layers": fingerprint(layer(PACKED), layer(SPLIT)),
        "that order": fingerprint(layer(SPLIT), layer(PACKED)),
        "half the tokens a block": describe_layout(
            [layer((BLOCKS, 2 * HEADS, TOKENS // 2, 2 * DIM))],
            num_blocks=BLOCKS,
            block_tokens=TOKENS // 2,
            page_bytes=[PAGE_NBYTES],
        ).fingerprint,
    }
    assert len(set(others.values())) == len(others)
