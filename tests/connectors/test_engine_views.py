"""The caches that `tests/device/engine_caches.py` builds are those that vLLM itself builds.

Only where vLLM 0.29 or later is installed; the tests of layouts go through the same caches without.
"""

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)
torch = pytest.importorskip("torch", reason="vLLM needs it")

sys.path.append(str(Path(__file__).parents[1] / "device"))
from engine_caches import DENSE, LAYERS, ORDERS, TOKENS, Kind, one_allocation  # noqa: E402

with warnings.catch_warnings():
    # What importing vLLM 0.32 says of torch, in torch's own modules.
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
    from vllm.v1 import kv_cache_interface as interface

if not hasattr(interface, "create_kv_cache_views"):
    pytest.skip("before 0.29 each backend shapes its own cache", allow_module_level=True)

BLOCKS = 7
KINDS = {
    "dense": (DENSE, {}),
    "one head": (DENSE._replace(heads=1), {}),
    "scales inline": (Kind(2, 72, torch.int8), {"state_content_bytes": 72}),
    "padded": (DENSE._replace(padding=512), {"page_size_padded": DENSE.page + 512}),
}


def vllm_views(name, kind, extra, ratio):
    """One allocation's views, as vLLM plans and makes them."""
    spec = interface.FullAttentionSpec(
        block_size=TOKENS,
        num_kv_heads=kind.heads,
        head_size=kind.content_bytes // kind.dtype.itemsize // 2,
        dtype=kind.dtype,
        **extra,
    )
    layout = interface.KVCacheLayout[name]
    packed = LAYERS * spec.page_size_bytes if layout.is_block_outermost else None
    layer_stride, block_stride, *_ = interface.compute_layout_strides(
        spec, BLOCKS, LAYERS, layout, fixed_strides=(None, packed, None, None, None)
    )
    tensor = interface.KVCacheTensor(
        size=LAYERS * BLOCKS * spec.page_size_bytes,
        layers=[f"layer.{at}" for at in range(LAYERS)],
        layer_stride=layer_stride,
        block_stride=block_stride,
    )
    raw = torch.zeros(tensor.size, dtype=torch.int8)
    return interface.create_kv_cache_views(
        raw, spec, BLOCKS, layout, tensor, kernel_block_size=TOKENS // ratio
    )


def described(tensor):
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("kind_name", KINDS)
@pytest.mark.parametrize("name", ORDERS)
def test_the_same_shapes_strides_and_offsets(name, kind_name, ratio):
    kind, extra = KINDS[kind_name]
    try:
        theirs = vllm_views(name, kind, extra, ratio)
    except (AssertionError, ValueError):
        # vLLM does not make such a cache: padding inside a page, or blocks that can't be split.
        assert kind.padding or ratio > 1
        return
    _, ours = one_allocation(name, kind, ratio=ratio).cache(BLOCKS)
    assert [described(tensor) for tensor in ours] == [described(tensor) for tensor in theirs]
