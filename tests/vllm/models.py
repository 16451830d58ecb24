"""Small models with random weights, for what SmolLM2 does not have: windows, MLA, several ranks.

The weights are large enough that a token depends on its whole prefix: with the usual scale a random
model says one token for ever, whatever its KV holds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 1024
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SCALE = 0.08


def qwen3() -> Any:
    """Full attention; heads and layers can be split over two ranks."""
    from transformers import Qwen3Config

    return Qwen3Config(
        **_COMMON, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32
    )


def gemma3() -> Any:
    """Five layers of sliding windows to one of full attention, as Gemma 3 has them."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **_COMMON,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=160,
        sliding_window_pattern=6,
        query_pre_attn_scalar=32,
    )


def mistral() -> Any:
    """A sliding window in every layer: no group of full attention at all."""
    from transformers import MistralConfig

    return MistralConfig(
        **_COMMON,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=96,
    )


def deepseek_v2() -> Any:
    """MLA: one latent vector a token in place of keys and values."""
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **_COMMON,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        # The only size that vLLM's reference kernel on a CPU knows: 512 + 64.
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=3,
        moe_intermediate_size=64,
    )


def granite_hybrid() -> Any:
    """A recurrent state (Mamba 2) in every other layer."""
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **_COMMON,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        layer_types=["mamba", "attention", "mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=32,
    )


def make_model(folder: Path, config: Callable[[], Any]) -> str:
    """Write the model of `config()` with random weights into `folder`, always the same ones."""
    import torch
    from transformers import AutoModelForCausalLM

    path = folder / config.__name__
    if (path / "config.json").exists():
        return str(path)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, _SCALE)
            elif "norm" not in name:
                weight.normal_(0, 0.02)
    model.save_pretrained(path)
    return str(path)
