"""Tiny GGUF files as llama.cpp's converter would write them from the tiny checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_checkpoints import CHAT_TEMPLATE, EOS_TOKEN_ID, random_tensors, tiny_config

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """A Hugging Face tensor name in GGUF's words."""
    stem, suffix = name.rsplit(".", 1)
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{suffix}"


def interleave_halves(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order of q and k: per head, i of the first half, then i of the second."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def new_writer(path: Path, config: dict[str, Any]) -> gguf.GGUFWriter:
    """A writer that holds the metadata of a config, and a vocabulary of single bytes."""
    architecture = config["model_type"] if config["model_type"] != "mistral" else "llama"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"token{i}" for i in range(config["vocab_size"])])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_chat_template(CHAT_TEMPLATE)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tiny_gguf(
    path: Path, family: str = "llama", *, seed: int = 0, type_name: str = "F32", **overrides: Any
) -> dict[str, Any]:
    """Write the tiny checkpoint of a family as GGUF, matrices in ``type_name``; returns its config.json."""
    config = tiny_config(family, **overrides)
    writer = new_writer(path, config)
    for name, tensor in random_tensors(config, seed).items():
        if config["model_type"] in ("llama", "mistral") and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = interleave_halves(tensor, heads)
        quantization = gguf.GGMLQuantizationType[type_name if tensor.ndim > 1 else "F32"]
        data = gguf.quants.quantize(tensor, quantization)
        writer.add_tensor(gguf_name(name), data, raw_dtype=quantization)
    if config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    finish(writer)
    return config


def llama3_factors(config: dict[str, Any]) -> np.ndarray:
    """What each frequency is divided by: the converter stores Llama 3's scaling as this tensor only."""
    rope, size = config["rope_parameters"], config["head_dim"]
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    original = rope["original_max_position_embeddings"]
    smooth = (original / wavelengths - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    factors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors[wavelengths < original / rope["high_freq_factor"]] = 1.0
    factors[wavelengths > original / rope["low_freq_factor"]] = rope["factor"]
    return factors.astype(np.float32)
