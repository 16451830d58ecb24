"""The reference copier against an oracle that moves one element at a time."""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="needs torch: copies are between tensors")

from kvkeep.device.copier import NO_SLOT, CopyRun  # noqa: E402
from kvkeep.device.layout import describe_layout  # noqa: E402
from kvkeep.device.reference import ReferenceCopier, layer_tensor  # noqa: E402
from kvkeep.errors import PoolError  # noqa: E402
from kvkeep.memory.pool import HEADER_BYTES  # noqa: E402

BLOCKS, TOKENS, HEADS, DIM = 6, 4, 2, 16
PER_CHUNK = 3
NUM_SLOTS = 3
POISON = 0xA5


def permuted(shape, order, dtype):
    """A dense tensor of `shape` whose axes lie in memory in `order`."""
    lying = torch.zeros([shape[axis] for axis in order], dtype=dtype)
    return lying.permute([order.index(axis) for axis in range(len(shape))])


def stacked_layers(make_all, count):
    whole = make_all()
    return [whole[at] for at in range(count)]


def by_dtype(dtype):
    """name -> (tensors of the layers, axis that counts blocks, kernel blocks a block)."""
    packed = (BLOCKS, HEADS, TOKENS, 2 * DIM)
    split = (2, BLOCKS, TOKENS, HEADS, DIM)
    stacked = (BLOCKS, 2, TOKENS, HEADS, DIM)
    cross = torch.zeros((BLOCKS, 3, HEADS, TOKENS, 2 * DIM), dtype=dtype)
    padded = torch.zeros((BLOCKS, HEADS * TOKENS * 2 * DIM + 8), dtype=dtype)
    unpadded = padded[:, : HEADS * TOKENS * 2 * DIM].view(packed)
    one = torch.zeros((3, *packed), dtype=dtype)
    return {
        "packed": ([torch.zeros(packed, dtype=dtype) for _ in range(3)], 0, 1),
        "packed, one allocation": ([one[at] for at in range(3)], 0, 1),
        "packed, one allocation, backwards": ([one[at] for at in (2, 1, 0)], 0, 1),
        "packed, NHD": ([permuted(packed, (0, 2, 1, 3), dtype) for _ in range(2)], 0, 1),
        "split": ([torch.zeros(split, dtype=dtype) for _ in range(2)], 1, 1),
        "split, HND": ([permuted(split, (0, 1, 3, 2, 4), dtype) for _ in range(2)], 1, 1),
        "split, by block": ([permuted(split, (1, 0, 2, 3, 4), dtype) for _ in range(2)], 1, 1),
        "stacked": ([torch.zeros(stacked, dtype=dtype) for _ in range(2)], 0, 1),
        "stacked, HND": ([permuted(stacked, (0, 1, 3, 2, 4), dtype) for _ in range(2)], 0, 1),
        "cross-layer": ([cross[:, at] for at in range(3)], 0, 1),
        "kernel blocks": (
            [torch.zeros((2 * BLOCKS, HEADS, TOKENS // 2, 2 * DIM), dtype=dtype)],
            0,
            2,
        ),
        "kernel blocks, split": (
            [torch.zeros((2, 2 * BLOCKS, TOKENS // 2, HEADS, DIM), dtype=dtype)],
            1,
            2,
        ),
        "latent": ([torch.zeros((BLOCKS, TOKENS, 36), dtype=dtype) for _ in range(2)], 0, 1),
        "padded pages": ([unpadded], 0, 1),
        "an offset": ([torch.zeros((BLOCKS + 1, *packed[1:]), dtype=dtype)[1:]], 0, 1),
        "odd": ([torch.zeros((BLOCKS, 3, 5, 37), dtype=dtype) for _ in range(2)], 0, 1),
        "mixed": (
            [torch.zeros(packed, dtype=dtype), torch.zeros((BLOCKS, TOKENS, 36), dtype=dtype)],
            0,
            1,
        ),
    }


DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn]
NAMES = list(by_dtype(torch.uint8))
CASES = [(dtype, name) for dtype in DTYPES for name in NAMES]


class Rig:
    """Layers filled with random bytes, slots filled with poison, and the copier between them."""

    def __init__(self, dtype, name):
        self.tensors, self.axis, self.per_block = by_dtype(dtype)[name]
        self.bytes = [self.storage(tensor) for tensor in self.tensors]
        generator = torch.Generator().manual_seed(7)
        for raw in self.bytes:
            raw.copy_(torch.randint(256, raw.shape, generator=generator, dtype=torch.uint8))
        pages = [tensor.nelement() * tensor.element_size() // BLOCKS for tensor in self.tensors]
        self.layout = describe_layout(
            [layer_tensor(str(at), tensor) for at, tensor in enumerate(self.tensors)],
            num_blocks=BLOCKS,
            block_tokens=TOKENS,
            page_bytes=pages,
        )
        self.slot_bytes = HEADER_BYTES + -(-PER_CHUNK * sum(pages) // 4096) * 4096
        self.slots = torch.full((NUM_SLOTS * self.slot_bytes,), POISON, dtype=torch.uint8)
        self.copier = ReferenceCopier(
            self.layout,
            {tensor.untyped_storage().data_ptr(): tensor for tensor in self.tensors},
            self.slots,
            slot_bytes=self.slot_bytes,
            blocks_per_chunk=PER_CHUNK,
        )

    @staticmethod
    def storage(tensor):
        raw = torch.empty(0, dtype=torch.uint8)
        return raw.set_(tensor.untyped_storage())

    def addresses(self, block):
        """Where each byte of a block lies, as (layer, byte of its storage), in kept order:
        layer by layer, each in the order in which its bytes lie in memory.
        """
        found = []
        for number, tensor in enumerate(self.tensors):
            ranges = [range(size) for size in tensor.shape]
            first = block * self.per_block
            ranges[self.axis] = range(first, first + self.per_block)
            size = tensor.element_size()
            starts = sorted(
                sum(map(int.__mul__, place, tensor.stride()))
                for place in itertools.product(*ranges)
            )
            base = tensor.storage_offset()
            found += [(number, (base + at) * size + byte) for at in starts for byte in range(size)]
        return found

    def slot_at(self, run, place):
        """Where the `place`-th block of a run lies among the slots' bytes."""
        chunk, at = divmod(run.first_block + place, PER_CHUNK)
        return run.slots[chunk] * self.slot_bytes + HEADER_BYTES + at * self.layout.block_nbytes


# Each alone, since together they would write over each other.
RUNS = {
    "a whole chunk, blocks in no order": [CopyRun((0,), 0, (4, 1, 5))],
    "part of a chunk, from its second block on": [CopyRun((2,), 1, (0, 2))],
    "one block in the middle": [CopyRun((1,), 1, (3,))],
    "many chunks, the first and the last in part": [CopyRun((2, 0, 1), 2, (3, 0, 5, 2, 4))],
    "several runs": [CopyRun((1,), 0, (0, 1)), CopyRun((0, 2), 1, (5, 3, 4))],
    "nothing": [CopyRun((), 0, ())],
}


@pytest.mark.parametrize(("dtype", "name"), CASES, ids=str)
def test_gather_equals_the_oracle_and_touches_nothing_else(dtype, name):
    check_gather(Rig(dtype, name), RUNS["several runs"])


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", ["split, HND", "cross-layer", "odd"])
def test_gather_of_any_run(name, runs):
    check_gather(Rig(torch.bfloat16, name), runs)


def check_gather(rig, runs):
    expected = rig.slots.tolist()
    pages = [raw.tolist() for raw in rig.bytes]
    for run in runs:
        for place, block in enumerate(run.block_ids):
            at = rig.slot_at(run, place)
            content = [pages[layer][byte] for layer, byte in rig.addresses(block)]
            expected[at : at + len(content)] = content
    event = rig.copier.gather(runs)
    event.wait()
    assert event.done()
    assert rig.slots.tolist() == expected
    assert [raw.tolist() for raw in rig.bytes] == pages


@pytest.mark.parametrize(("dtype", "name"), CASES, ids=str)
def test_scatter_equals_the_oracle_and_touches_nothing_else(dtype, name):
    check_scatter(Rig(dtype, name), RUNS["several runs"])


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", ["split, HND", "cross-layer", "odd"])
def test_scatter_of_any_run(name, runs):
    check_scatter(Rig(torch.bfloat16, name), runs)


def check_scatter(rig, runs):
    rig.slots.copy_(torch.randint(256, rig.slots.shape, dtype=torch.uint8))
    slots = rig.slots.tolist()
    # Layers may share an allocation, so the oracle writes where they do.
    storages = {tensor.untyped_storage().data_ptr(): at for at, tensor in enumerate(rig.tensors)}
    expected = {pointer: rig.bytes[at].tolist() for pointer, at in storages.items()}
    for run in runs:
        for place, block in enumerate(run.block_ids):
            for offset, (layer, byte) in enumerate(rig.addresses(block)):
                pointer = rig.tensors[layer].untyped_storage().data_ptr()
                expected[pointer][byte] = slots[rig.slot_at(run, place) + offset]
    rig.copier.scatter(runs).wait()
    for pointer, at in storages.items():
        assert rig.bytes[at].tolist() == expected[pointer]
    assert rig.slots.tolist() == slots


@pytest.mark.parametrize("name", ["packed", "split, HND", "cross-layer", "kernel blocks"])
def test_there_and_back_to_other_blocks(name):
    rig = Rig(torch.bfloat16, name)
    rig.copier.gather([CopyRun((1,), 0, (0, 1, 2))]).wait()
    rig.copier.scatter([CopyRun((1,), 0, (5, 3, 4))]).wait()
    for tensor in rig.tensors:
        blocks = tensor.movedim(rig.axis, 0).unflatten(0, (BLOCKS, rig.per_block))
        for source, target in ((0, 5), (1, 3), (2, 4)):
            same = blocks[source].contiguous().view(torch.uint8)
            assert torch.equal(same, blocks[target].contiguous().view(torch.uint8))


def test_the_same_bytes_whichever_chunk_size_wrote_them():
    """A chunk of three blocks holds what three chunks of one block hold."""
    rig = Rig(torch.bfloat16, "split")
    nbytes = rig.layout.block_nbytes
    rig.copier.gather([CopyRun((0,), 0, (4, 1, 5))]).wait()
    rig.copier.gather([CopyRun((1,), 0, (1,))]).wait()
    whole = rig.slots[HEADER_BYTES + nbytes : HEADER_BYTES + 2 * nbytes]
    alone = rig.slots[rig.slot_bytes + HEADER_BYTES :][:nbytes]
    assert torch.equal(whole, alone)


@pytest.mark.parametrize(
    "run",
    [
        CopyRun((0,), 0, (0, 1, 2, 3)),  # longer than its chunk: into the next slot
        CopyRun((0,), 2, (0, 1)),
        CopyRun((0, 1), 1, (0, 1)),  # a slot without blocks
        CopyRun((0,), 3, (0,)),  # from behind its chunk on
        CopyRun((0,), 4, (0, 1)),
        CopyRun((NO_SLOT,), 0, (0,)),
        CopyRun((1, NO_SLOT), 0, (0, 1, 2, 3)),
    ],
)
def test_a_run_whose_slots_and_blocks_do_not_match_is_refused(run):
    rig = Rig(torch.bfloat16, "packed")
    for copy in (rig.copier.gather, rig.copier.scatter):
        with pytest.raises(PoolError):
            copy([run])
    beside = [*range(HEADER_BYTES), *range(rig.slot_bytes, rig.slot_bytes + HEADER_BYTES)]
    assert set(rig.slots[beside].tolist()) == {POISON}


def test_a_block_that_does_not_exist_is_an_error():
    rig = Rig(torch.bfloat16, "packed")
    with pytest.raises(IndexError):
        rig.copier.scatter([CopyRun((0,), 0, (BLOCKS,))])
