"""Copies in plain torch: the path on a CPU, and what every kernel is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from kvkeep.device.copier import CopyRun, Ended, PageCopier
from kvkeep.device.groups import GroupedCopier
from kvkeep.device.layout import BlockLayout, LayerTensor, Region
from kvkeep.errors import PoolError
from kvkeep.memory.pool import HEADER_BYTES

# In place of a loop in Python: one call that copies tensor by tensor.
_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_  # pyright: ignore

# Widest first: a strided copy goes element by element, so elements should be large.
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def layer_tensor(name: str, tensor: torch.Tensor) -> LayerTensor:
    """Describe an engine's tensor for `kvkeep.device.layout`."""
    storage = tensor.untyped_storage().data_ptr()
    return LayerTensor(
        name=name,
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        itemsize=tensor.element_size(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        storage=storage,
        offset=tensor.data_ptr() - storage,
    )


class ReferenceCopier:
    """Copies inline on the calling thread; releases the GIL while it copies.

    Blocks go one by one, in one call for all: on 2 cores with 2.4 MB blocks that reaches 0.98 of
    one large memcpy; index_select with a strided output 0.96, a Python loop of `copy_` 0.91, and
    for the way back index_copy_ 0.73.
    """

    def __init__(
        self,
        layout: BlockLayout,
        tensors: Mapping[int, torch.Tensor],
        slots: torch.Tensor,
        *,
        slot_bytes: int,
        blocks_per_chunk: int,
        offset: int = 0,
    ) -> None:
        """`tensors`: storage address -> any tensor of that allocation. `slots`: uint8 [bytes] on
        the CPU, this rank's region of the pool; slot i starts at `i * slot_bytes`. `offset`:
        where in a chunk the `blocks_per_chunk` blocks of this layout start, in bytes.
        """
        self._blocks_per_chunk = blocks_per_chunk
        self._num_slots = len(slots) // slot_bytes
        self._regions: list[tuple[_Views, _Views]] = []
        """For each region: pages by block, and slots by `slot * blocks_per_chunk + block`."""
        at = offset
        for region in layout.regions:
            dtype = _word((*region.byte_counts, layout.block_nbytes, at))
            pages = _page_view(tensors[region.storage], region, layout.num_blocks, dtype)
            words = slots.view(dtype)
            nbytes = dtype.itemsize
            kept = words.as_strided(
                (self._num_slots, blocks_per_chunk, *pages.shape[1:]),
                (
                    slot_bytes // nbytes,
                    layout.block_nbytes // nbytes,
                    region.run_bytes // nbytes,
                    1,
                ),
                words.storage_offset() + (HEADER_BYTES + at) // nbytes,
            )
            self._regions.append((_Views(pages, 1), _Views(kept, blocks_per_chunk)))
            at += region.block_nbytes

    def gather(self, runs: Sequence[CopyRun]) -> Ended:
        pages, kept = self._blocks(runs)
        if pages:
            _copy(kept, pages)
        return Ended()

    def scatter(self, runs: Sequence[CopyRun]) -> Ended:
        pages, kept = self._blocks(runs)
        if pages:
            _copy(pages, kept)
        return Ended()

    def _blocks(self, runs: Sequence[CopyRun]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Every block of `runs` by region: where it lies in the engine, and where in its slot."""
        pages: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        per_chunk = self._blocks_per_chunk
        for run in runs:
            for slot, first, block_ids in run.chunks(per_chunk):
                if slot >= self._num_slots:
                    raise PoolError(f"slot {slot} does not exist: there are {self._num_slots}")
                places = range(slot * per_chunk + first, slot * per_chunk + first + len(block_ids))
                for engine_pages, slots in self._regions:
                    pages += engine_pages.at(block_ids)
                    kept += slots.at(places)
        return pages, kept


def grouped_copier(
    groups: Iterable[tuple[BlockLayout | None, int]],
    tensors: Mapping[int, torch.Tensor],
    slots: torch.Tensor,
    *,
    slot_bytes: int,
) -> PageCopier:
    """A copier for all KV groups of a rank: (layout, blocks of it in a chunk) of each, in order."""
    copiers: list[ReferenceCopier | None] = []
    offset = 0
    for layout, kept in groups:
        if layout is None:
            copiers.append(None)
            continue
        copiers.append(
            ReferenceCopier(
                layout,
                tensors,
                slots,
                slot_bytes=slot_bytes,
                blocks_per_chunk=kept,
                offset=offset,
            )
        )
        offset += kept * layout.block_nbytes
    if len(copiers) == 1 and copiers[0] is not None:
        return copiers[0]
    return GroupedCopier(copiers)


class _Views:
    """A tensor's blocks as views, each made once: making one costs 1 us, a twentieth of a copy."""

    def __init__(self, tensor: torch.Tensor, inner: int) -> None:
        """`tensor`: `[entry, ...]` for `inner` 1, else `[entry, inner, ...]`."""
        self._tensor = tensor
        self._inner = inner
        self._views: dict[int, torch.Tensor] = {}

    def at(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Views of these blocks, counted over all entries. Raises `IndexError` past the end."""
        views = self._views
        try:
            return [views[number] for number in numbers]
        except KeyError:
            for number in numbers:
                if number not in views:
                    views[number] = self._make(number)
            return [views[number] for number in numbers]

    def _make(self, number: int) -> torch.Tensor:
        if number < 0:
            raise IndexError(f"block {number} does not exist")
        if self._inner == 1 and self._tensor.dim() == 3:
            return self._tensor[number]
        return self._tensor[number // self._inner][number % self._inner]


def _word(numbers: Sequence[int]) -> torch.dtype:
    """The widest integer type that all of these byte counts are multiples of."""
    return next(dtype for nbytes, dtype in _WORDS if all(n % nbytes == 0 for n in numbers))


def _page_view(
    tensor: torch.Tensor, region: Region, num_blocks: int, dtype: torch.dtype
) -> torch.Tensor:
    """A region as words `[num_blocks, num_runs, words]` over the engine's own memory."""
    nbytes = dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    return view.set_(
        tensor.untyped_storage(),
        region.offset // nbytes,
        (num_blocks, region.num_runs, region.run_bytes // nbytes),
        (region.block_stride // nbytes, region.run_stride // nbytes, 1),
    )
