"""Where one block's bytes lie in an engine's paged KV cache, from shapes and strides alone.

An engine hands over one tensor a layer. Axis `block_axis` of it counts blocks; all else of a
block is its page. Pages are kept as they lie in memory: dimensions sorted by stride, so that the
dense inner part is one run of bytes. What can't be described so is refused (`LayoutError`), and
nothing is concluded from a size that could mean two things.

A kept chunk is block-major: `[blocks of the chunk][layers][runs of the layer's page]`, so a chunk
of 256 tokens holds the same bytes as its sixteen blocks of 16 tokens one after another.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from kvkeep.errors import LayoutError

_MIN_RUN_BYTES = 64  # below that a page is scattered so finely that something was misread
_MAX_RUNS = 256


class LayerTensor(NamedTuple):
    """A layer's KV cache tensor, described without the tensor."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    itemsize: int
    """Bytes an element."""
    dtype: str
    storage: int
    """Identifies the allocation: its address."""
    offset: int
    """Where the tensor starts in the allocation, in bytes."""


class Region(NamedTuple):
    """`num_runs` runs of `run_bytes`, evenly spaced, for every block of one allocation.

    Run r of block b starts at `offset + b * block_stride + r * run_stride` bytes.
    """

    storage: int
    offset: int
    num_runs: int
    run_stride: int
    block_stride: int
    run_bytes: int

    @property
    def byte_counts(self) -> tuple[int, ...]:
        """Every number of bytes that describes it: a word that divides them all may read it."""
        return (self.offset, self.run_stride, self.block_stride, self.run_bytes)

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block that lie in this region."""
        return self.num_runs * self.run_bytes


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One block over all layers of one KV group on one rank."""

    num_blocks: int
    block_tokens: int
    regions: tuple[Region, ...]
    fingerprint: str
    """Equal where the bytes of a block mean the same; says nothing of addresses or block count."""

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(region.block_nbytes for region in self.regions)


def describe_layout(
    tensors: Sequence[LayerTensor], *, num_blocks: int, block_tokens: int, page_bytes: Sequence[int]
) -> BlockLayout:
    """The layout of one KV group.

    `tensors`: its layers in the engine's order. `page_bytes[i]`: how many bytes layer i's
    specification gives one block; a tensor that disagrees is refused.
    """
    if not tensors:
        raise LayoutError("the KV group has no layers")
    runs: list[Region] = []
    meaning: list[str] = []
    for tensor, expected in zip(tensors, page_bytes, strict=True):
        layer_runs, layer_meaning = _page(tensor, num_blocks)
        found = sum(run.run_bytes for run in layer_runs)
        if found != expected:
            raise LayoutError(
                f"layer {tensor.name}: a block takes {found} bytes by shape {tensor.shape}, but "
                f"{expected} by the engine's specification"
            )
        runs += layer_runs
        meaning.append(layer_meaning)
    text = f"block_tokens={block_tokens};" + ";".join(_run_lengths(meaning))
    return BlockLayout(
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        regions=tuple(_merged(runs)),
        fingerprint=hashlib.sha256(text.encode()).hexdigest()[:32],
    )


def _block_axis(tensor: LayerTensor, num_blocks: int) -> int:
    """Axis 0 in every current engine; axis 1 behind a (K, V) axis in older split layouts."""
    shape = tensor.shape
    first = len(shape) > 1 and shape[0] > 0 and shape[0] % num_blocks == 0
    second = len(shape) > 2 and shape[0] == 2 and shape[1] > 0 and shape[1] % num_blocks == 0
    if first == second:
        how_many = "two axes" if first else "no axis"
        raise LayoutError(
            f"layer {tensor.name}: {how_many} of shape {shape} could count {num_blocks} blocks; "
            "this layout is not known"
        )
    return 0 if first else 1


def _page(tensor: LayerTensor, num_blocks: int) -> tuple[list[Region], str]:
    """The runs of one layer's page in the order they lie in, and what the page means."""
    axis = _block_axis(tensor, num_blocks)
    per_block = tensor.shape[axis] // num_blocks  # kernel blocks that make up one block
    block_stride = tensor.strides[axis] * per_block * tensor.itemsize
    # (size, stride in bytes, axis) of everything inside one block; -1 is the kernel-block axis.
    inside = [
        (size, stride * tensor.itemsize, number)
        for number, (size, stride) in enumerate(zip(tensor.shape, tensor.strides, strict=True))
        if number != axis and size > 1
    ]
    if per_block > 1:
        inside.append((per_block, tensor.strides[axis] * tensor.itemsize, -1))
    inside.sort(key=lambda dimension: (-dimension[1], -dimension[2]))
    run_bytes = tensor.itemsize
    outer = list(inside)
    while outer and outer[-1][1] == run_bytes:
        run_bytes *= outer.pop()[0]
    blocks = [(block_stride, num_blocks)] if num_blocks > 1 else []
    _check_apart(tensor, [(stride, size) for size, stride, _ in outer] + blocks, run_bytes)
    num_runs = math.prod(size for size, _, _ in outer)
    if num_runs > _MAX_RUNS or run_bytes < _MIN_RUN_BYTES:
        raise LayoutError(
            f"layer {tensor.name}: a block lies in {num_runs} runs of {run_bytes} bytes (shape "
            f"{tensor.shape}, strides {tensor.strides}); this layout is not known"
        )
    offsets = [
        sum(index * stride for index, (_, stride, _) in zip(place, outer, strict=True))
        for place in product(*(range(size) for size, _, _ in outer))
    ]
    runs = [
        Region(tensor.storage, tensor.offset + at, 1, 0, block_stride, run_bytes) for at in offsets
    ]
    logical = tuple(size for number, size in enumerate(tensor.shape) if number != axis)
    order = tuple((number, size) for size, _, number in inside)
    return runs, f"{tensor.dtype}{logical}axis{axis}x{per_block}:{order}"


def _check_apart(tensor: LayerTensor, axes: Sequence[tuple[int, int]], run_bytes: int) -> None:
    """Each of `axes` (stride in bytes, size) steps over all that lies inside it.

    So no two runs of any two blocks share a byte.
    """
    extent = run_bytes
    for stride, size in sorted(axes):
        if stride < extent:
            raise LayoutError(
                f"layer {tensor.name}: memory of its blocks overlaps (shape {tensor.shape}, "
                f"strides {tensor.strides}); this layout is not known"
            )
        extent += (size - 1) * stride


def _merged(runs: Sequence[Region]) -> list[Region]:
    """Runs that follow one another at even distances as one region each."""
    merged: list[Region] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last is not None and _alike(last, run):
            step = run.offset - (last.offset + (last.num_runs - 1) * last.run_stride)
            if last.num_runs == 1 and step >= run.run_bytes:
                merged[-1] = last._replace(num_runs=2, run_stride=step)
                continue
            if last.num_runs > 1 and step == last.run_stride:
                merged[-1] = last._replace(num_runs=last.num_runs + 1)
                continue
        merged.append(run)
    return merged


def _alike(one: Region, other: Region) -> bool:
    return (one.storage, one.block_stride, one.run_bytes) == (
        other.storage,
        other.block_stride,
        other.run_bytes,
    )


def _run_lengths(items: Sequence[str]) -> list[str]:
    counted: list[tuple[str, int]] = []
    for item in items:
        if counted and counted[-1][0] == item:
            counted[-1] = (item, counted[-1][1] + 1)
        else:
            counted.append((item, 1))
    return [f"{count}*{item}" for item, count in counted]
