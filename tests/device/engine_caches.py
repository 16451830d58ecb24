"""The KV caches that vLLM 0.26 and later hand to a connector, built as vLLM builds them.

Each case makes its tensors over memory that it is given, so that the same cache can be made twice
and compared byte by byte. B counts blocks, H heads, N tokens of a block, C the bytes of one token
and head (K and V), L layers.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

TOKENS, HEADS, DIM, LAYERS = 16, 2, 32, 3


class Case(NamedTuple):
    """`make(num_blocks, raw)`: one tensor a layer, over `raw` (uint8)."""

    make: Callable[[int, torch.Tensor], list[torch.Tensor]]
    nbytes: Callable[[int], int]
    """How much memory `make` needs, by the number of blocks."""
    page_bytes: list[int]
    """What the layers' specifications say one block takes, without padding."""
    num_kernel_blocks: int = 1
    """How many entries of the block axis make up one block."""
    block_axis: int = 0

    def cache(self, num_blocks, raw=None):
        """(all memory, a tensor a layer); random memory where none is given."""
        if raw is None:
            raw = torch.randint(256, (self.nbytes(num_blocks),), dtype=torch.uint8)
        return raw, self.make(num_blocks, raw)

    def blocks(self, tensor):
        """A layer's tensor with one entry of axis 0 a block, as the engine's kernels see it."""
        first = tensor.movedim(self.block_axis, 0)
        return first.unflatten(0, (-1, self.num_kernel_blocks))


def strides_of(shape, order):
    """Strides of a dense tensor whose axes lie in memory in `order`, outermost first."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return strides


# -- 0.26 to 0.28: every layer has memory of its own, in the shape its backend asks for ----------


def own_memory(shape, order=None, *, dtype=torch.bfloat16, ratio=1, axis=0, padding=0):
    """`shape`: of one layer, `None` for the number of blocks. `order`: of its axes in memory.
    `padding`: bytes behind each page.
    """
    size = dtype.itemsize
    page = size * torch.Size(n for n in shape if n is not None).numel() * ratio

    def make(num_blocks, raw):
        full = [num_blocks * ratio if n is None else n for n in shape]
        strides = strides_of(full, order or range(len(full)))
        if padding:
            strides[axis] = (page + padding) // size
        each = raw.view(LAYERS, -1)
        return [
            layer.view(dtype).as_strided(full, strides, layer.storage_offset() // size)
            for layer in each
        ]

    return Case(make, lambda n: LAYERS * n * (page + padding), [page] * LAYERS, ratio, axis)


PACKED = (None, HEADS, TOKENS, 2 * DIM)
SPLIT = (2, None, TOKENS, HEADS, DIM)
KV_SIDE = TOKENS * HEADS * DIM


def cross_layers(order):
    """`--enable-cross-layers`: one tensor over all layers, and a view of it for each. Only for a
    connector that asks for it.
    """

    def make(num_blocks, raw):
        shape = (LAYERS, num_blocks, HEADS, TOKENS, 2 * DIM)
        whole = raw.view(torch.bfloat16).as_strided(shape, strides_of(shape, order))
        return list(whole)

    page = HEADS * TOKENS * 2 * DIM * 2
    return Case(make, lambda n: LAYERS * n * page, [page] * LAYERS)


def packed_blocks():
    """Layers of several kinds behind one another in each block (DeepSeek V4 and the like)."""
    widths = [576 * 2, 656, 132]
    pages = [TOKENS * width for width in widths]
    stride = sum(pages) + 192

    def make(num_blocks, raw):
        by_block = raw.view(num_blocks, stride)
        starts = [sum(pages[:at]) for at in range(len(pages))]
        dtypes = [torch.bfloat16, torch.uint8, torch.uint8]
        return [
            by_block[:, start : start + page].view(dtype).unflatten(1, (TOKENS, -1))
            for start, page, dtype in zip(starts, pages, dtypes, strict=True)
        ]

    return Case(make, lambda n: n * stride, pages)


UP_TO_028 = {
    "packed, HND": own_memory(PACKED),
    "packed, NHD": own_memory(PACKED, (0, 2, 1, 3)),
    "packed, V narrower than K": own_memory((None, HEADS, TOKENS, DIM + DIM // 2), (0, 2, 1, 3)),
    "packed, HND, kernel blocks": own_memory((None, HEADS, TOKENS // 4, 2 * DIM), ratio=4),
    "packed, NHD, kernel blocks": own_memory(
        (None, HEADS, TOKENS // 4, 2 * DIM), (0, 2, 1, 3), ratio=4
    ),
    "packed, padded pages": own_memory(PACKED, padding=512),
    "packed, NHD, padded pages": own_memory(PACKED, (0, 2, 1, 3), padding=512),
    "split": own_memory(SPLIT, axis=1),
    "split, kernel blocks": own_memory((2, None, TOKENS // 4, HEADS, DIM), ratio=4, axis=1),
    # A hybrid model's split layout is turned to lie block by block.
    "split, lying by block": own_memory(SPLIT, (1, 0, 2, 3, 4), axis=1),
    "K beside V in a block": own_memory((None, 2, TOKENS, HEADS, DIM)),
    # And the other way round, where a decoder shares memory with a split cross-attention.
    "K beside V in a block, lying split": own_memory(
        (None, 2, TOKENS, HEADS, DIM), (1, 0, 2, 3, 4)
    ),
    "int8, scales inline": own_memory((None, HEADS, TOKENS, 2 * (DIM + 4)), dtype=torch.int8),
    "fp8, scales inline": own_memory(
        (None, HEADS, TOKENS, 2 * (DIM + 4)), (0, 2, 1, 3), dtype=torch.float8_e4m3fn
    ),
    "int4, scales inline": own_memory((None, HEADS, TOKENS, 2 * (DIM // 2 + 4)), dtype=torch.uint8),
    "fp8, one scale for all": own_memory(PACKED, dtype=torch.float8_e4m3fn),
    "nvfp4": own_memory((None, 2 * HEADS, TOKENS, DIM // 2 + DIM // 16), dtype=torch.uint8),
    "turboquant": own_memory((None, HEADS, TOKENS, 88), dtype=torch.uint8),
    "MLA": own_memory((None, TOKENS, 576)),
    "MLA, kernel blocks": own_memory((None, TOKENS // 4, 576), ratio=4),
    "MLA, fp8_ds_mla": own_memory((None, TOKENS, 656), dtype=torch.uint8),
    "MLA, padded pages": own_memory((None, TOKENS, 656), dtype=torch.uint8, padding=96),
    "cross layers, HND": cross_layers((1, 2, 0, 3, 4)),
    "cross layers, NHD": cross_layers((1, 0, 3, 2, 4)),
    "several kinds packed in a block": packed_blocks(),
}

# -- 0.29 and later: one allocation, logically [L, B, H, N, C], in one of six orders -------------

ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


class Kind(NamedTuple):
    """Layers of one specification within an allocation."""

    heads: int
    content_bytes: int
    dtype: torch.dtype
    padding: int = 0
    layers: int = LAYERS

    @property
    def page(self):
        return self.heads * TOKENS * self.content_bytes


DENSE = Kind(HEADS, 2 * DIM * 2, torch.bfloat16)


def one_allocation(name, *kinds, ratio=1, tail=0):
    """`kinds` behind one another: within each block where the order begins with B, else each with
    memory of its own. `tail`: bytes behind each block, or each layer's pages.
    """
    order = ORDERS[name]
    by_block = order[0] == 1
    whole = sum(kind.layers * (kind.page + kind.padding) for kind in kinds)
    block_stride = whole + tail if by_block else None

    def make(num_blocks, raw):
        views, at = [], 0
        for kind in kinds:
            shape = (
                kind.layers,
                num_blocks * ratio,
                kind.heads,
                TOKENS // ratio,
                kind.content_bytes,
            )
            strides = strides_of(shape, order)
            if kind.padding and not by_block:
                strides[1] = kind.page + kind.padding
                strides[0] = num_blocks * strides[1]
            elif by_block:
                strides[1] = block_stride
                strides[0] = strides[0] if order[1] == 2 else kind.page + kind.padding
            view = raw.as_strided(shape, strides, at)
            views += [layer.view(kind.dtype) for layer in view]
            size = kind.layers * (kind.page + kind.padding)
            at += size if by_block else size * num_blocks
        return views

    pages = [kind.page for kind in kinds for _ in range(kind.layers)]
    return Case(make, lambda n: n * (block_stride or whole), pages, ratio)


FROM_029 = {
    **{f"{name}": one_allocation(name, DENSE) for name in ORDERS},
    **{f"{name}, one head": one_allocation(name, DENSE._replace(heads=1)) for name in ORDERS},
    **{
        f"{name}, MLA": one_allocation(name, Kind(1, 576 * 2, torch.bfloat16))
        for name in ("LBHNC", "BLHNC")
    },
    **{
        f"{name}, int8, scales inline": one_allocation(name, Kind(HEADS, 2 * (DIM + 4), torch.int8))
        for name in ORDERS
    },
    # K and V as two "heads", for kernels that want each in one piece.
    **{
        f"{name}, K and V as heads": one_allocation(name, Kind(2, HEADS * DIM * 2, torch.bfloat16))
        for name in ("LHBNC", "LBHNC")
    },
    **{
        f"{name}, padded pages": one_allocation(name, DENSE._replace(padding=512))
        for name in ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
    },
    **{
        f"{name}, kernel blocks": one_allocation(name, DENSE, ratio=4)
        for name in ("LBHNC", "LBNHC")
    },
    **{
        f"{name}, two kinds": one_allocation(name, DENSE, Kind(1, 656, torch.uint8, layers=2))
        for name in ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
    },
    "BLHNC, room behind each block": one_allocation("BLHNC", DENSE, tail=768),
}
CASES = {
    **{f"0.26: {name}": case for name, case in UP_TO_028.items()},
    **{f"0.29: {name}": case for name, case in FROM_029.items()},
}
