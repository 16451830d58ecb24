"""The test at start: random bytes through the copier must land where the engine looks for them.

A layout that was read wrongly gives wrong answers without any error. So before the first
request a few free blocks get random content, travel through a slot to other blocks, and are
compared through the engine's own view of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvkeep.device.copier import CopyRun, PageCopier
from kvkeep.device.layout import BlockLayout
from kvkeep.device.reference import grouped_copier
from kvkeep.errors import LayoutError
from kvkeep.memory.pool import ALIGNMENT, HEADER_BYTES

_BLOCKS = 2


def check_copies(
    groups: Sequence[tuple[BlockLayout, Sequence[torch.Tensor]]],
    by_storage: Mapping[int, torch.Tensor],
) -> None:
    """Copy blocks there and back through a slot; raise `LayoutError` if any bit differs.

    `groups`: each KV group's layout and its layers' paged caches. Nothing may be in them yet: the
    last few blocks are overwritten, and put back as they were.
    """
    # All groups through one slot, so that each one's place in it is tested as well.
    nbytes = sum(_BLOCKS * layout.block_nbytes for layout, _ in groups)
    slot_bytes = HEADER_BYTES + -(-nbytes // ALIGNMENT) * ALIGNMENT
    slots = torch.zeros(slot_bytes, dtype=torch.uint8)
    copier = grouped_copier(
        [(layout, _BLOCKS) for layout, _ in groups], by_storage, slots, slot_bytes=slot_bytes
    )
    # One at a time: groups share memory, since a block belongs to one group.
    for number, (layout, tensors) in enumerate(groups):
        _check_group(copier, number, layout, tensors)


def _check_group(
    copier: PageCopier, group: int, layout: BlockLayout, tensors: Sequence[torch.Tensor]
) -> None:
    if layout.num_blocks < 2 * _BLOCKS + 1:
        raise LayoutError(f"{layout.num_blocks} KV blocks are too few for the self-test")
    last = layout.num_blocks - 1
    sources = tuple(last - at for at in range(_BLOCKS))
    targets = tuple(last - _BLOCKS - at for at in range(_BLOCKS))
    views = [_bytes_by_block(tensor, layout.num_blocks) for tensor in tensors]
    touched = list(sources + targets)
    kept = [view[touched].clone() for view in views]
    try:
        for view in views:
            for block in sources:
                view[block] = torch.randint_like(view[block], 256)
            for block in targets:
                view[block] = 0
        copier.gather([CopyRun((0,), 0, sources, group)]).wait()
        # Block by block, so that a chunk's part alone must land right as well.
        for at, block in enumerate(targets):
            copier.scatter([CopyRun((0,), at, (block,), group)]).wait()
        for number, view in enumerate(views):
            for source, target in zip(sources, targets, strict=True):
                if not torch.equal(view[source], view[target]):
                    raise LayoutError(
                        f"self-test: layer {number} of {len(views)} came back changed (shape "
                        f"{tuple(tensors[number].shape)}, strides {tensors[number].stride()})"
                    )
    finally:
        for view, before in zip(views, kept, strict=True):
            view[touched] = before


def _bytes_by_block(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """The engine's own tensor, one entry of axis 0 a block; not by way of `BlockLayout`."""
    raw = tensor.view(torch.uint8) if tensor.stride(-1) == 1 else tensor
    if raw.shape[0] % num_blocks != 0:
        raw = raw.transpose(0, 1)
    return raw.view(num_blocks, raw.shape[0] // num_blocks, *raw.shape[1:])
