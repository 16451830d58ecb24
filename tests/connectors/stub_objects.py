"""Objects of a stub of vLLM (`engine_stub`), with what its release has of what is read."""

import torch
from vllm.config.cache import CacheConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.load import LoadConfig
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.vllm import VllmConfig
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.request import Request

BLOCK, HEADS, DIM = 16, 2, 32
PAGE_NBYTES = BLOCK * HEADS * 2 * DIM * 2


def made(cls, **values):
    """An object of a class of vLLM with those of `values` that this release's class has."""
    known = frozenset().union(*(getattr(base, "known", ()) for base in cls.__mro__))
    return cls(**{name: value for name, value in values.items() if name in known})


class HFConfig:
    def to_dict(self):
        return {"hidden_size": 64}


class Backend:
    @staticmethod
    def get_name():
        return "STUB_ATTN"


def vllm_config(settings):
    transfer = made(
        KVTransferConfig,
        kv_connector="KVKeepConnector",
        kv_connector_extra_config=settings,
        kv_load_failure_policy="recompute",
        is_kv_producer=True,
        is_kv_consumer=True,
    )
    model = made(
        ModelConfig,
        model="stub/model",
        model_weights="",
        revision="main",
        hf_config=HFConfig(),
        hf_overrides={},
        dtype=torch.float16,
        quantization=None,
        max_model_len=512,
        seed=0,
    )
    parallel = made(
        ParallelConfig,
        rank=0,
        world_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        data_parallel_size_local=1,
    )
    return made(
        VllmConfig,
        kv_transfer_config=transfer,
        model_config=model,
        parallel_config=parallel,
        cache_config=made(CacheConfig, cache_dtype="auto", calculate_kv_scales=False),
        load_config=made(LoadConfig, load_format="dummy", download_dir=None),
    )


def attention(window=None):
    """A layer's specification: full attention, or the last `window` tokens."""
    return made(
        specs.FullAttentionSpec if window is None else specs.SlidingWindowSpec,
        block_size=BLOCK,
        num_kv_heads=HEADS,
        head_size=DIM,
        dtype=torch.float16,
        page_size_bytes=PAGE_NBYTES,
        unpadded_page_size_bytes=PAGE_NBYTES,
        tokens_per_state=1,
        non_causal=False,
        sliding_window=window,
    )


def make_request(name, tokens):
    """A request that waits, with a prompt of `tokens`."""
    return made(
        Request,
        request_id=name,
        all_token_ids=list(tokens),
        num_tokens=len(tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        cache_salt=None,
        lora_request=None,
        mm_features=[],
        prompt_embeds=None,
        skip_reading_prefix_cache=False,
        is_finished=lambda: False,
    )
