"""Copies in plain torch: the path on a CPU, and what every kernel is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvkeep.device.copier import CopyRun, Ended
from kvkeep.device.layout import BlockLayout, LayerTensor, Region
from kvkeep.memory.pool import HEADER_BYTES

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
    """Copies inline on the calling thread; releases the GIL inside each copy.

    One `copy_` a block and region: on the CPU that runs within a few per cent of one large
    memcpy (2 cores, blocks of 0.4 to 3 MB), where index_select and index_copy_ reach 0.5 to 0.9.
    """

    def __init__(
        self,
        layout: BlockLayout,
        tensors: Mapping[int, torch.Tensor],
        slots: torch.Tensor,
        *,
        slot_bytes: int,
        blocks_per_chunk: int,
    ) -> None:
        """`tensors`: storage address -> any tensor of that allocation. `slots`: uint8 [bytes] on
        the CPU, this rank's region of the pool; slot i starts at `i * slot_bytes`.
        """
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._blocks_per_chunk = blocks_per_chunk
        self._block_nbytes = layout.block_nbytes
        self._pages: list[torch.Tensor] = []
        at = 0
        for region in layout.regions:
            word = _word((*region.byte_counts, layout.block_nbytes, at))
            self._pages.append(_page_view(tensors[region.storage], region, layout.num_blocks, word))
            at += region.block_nbytes
        self._regions = layout.regions

    def gather(self, runs: Sequence[CopyRun]) -> Ended:
        for run in runs:
            for slot, first, block_ids in run.chunks(self._blocks_per_chunk):
                for pages, chunk in self._pairs(slot, first, len(block_ids)):
                    for at, block in enumerate(block_ids):
                        chunk[at].copy_(pages[block])
        return Ended()

    def scatter(self, runs: Sequence[CopyRun]) -> Ended:
        for run in runs:
            for slot, first, block_ids in run.chunks(self._blocks_per_chunk):
                for pages, chunk in self._pairs(slot, first, len(block_ids)):
                    for at, block in enumerate(block_ids):
                        pages[block].copy_(chunk[at])
        return Ended()

    def _pairs(
        self, slot: int, first_block: int, num_blocks: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each region: its pages `[block, run, word]` and these blocks of the slot."""
        start = slot * self._slot_bytes + HEADER_BYTES + first_block * self._block_nbytes
        blocks = self._slots[start : start + num_blocks * self._block_nbytes]
        blocks = blocks.view(num_blocks, self._block_nbytes)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        at = 0
        for region, pages in zip(self._regions, self._pages, strict=True):
            part = blocks[:, at : at + region.block_nbytes].view(pages.dtype)
            pairs.append((pages, part.view(num_blocks, region.num_runs, -1)))
            at += region.block_nbytes
        return pairs


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
