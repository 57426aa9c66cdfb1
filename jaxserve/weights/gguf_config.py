"""A GGUF file's metadata in the words of config.json and generation_config.json."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.weights.gguf import GGUFFile

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF architecture to Hugging Face's. Mistral arrives as ``llama``."""
REFUSED_KEYS = (
    "expert_count", "attention.scale", "attn_logit_softcapping", "final_logit_softcapping",
    "embedding_scale", "residual_scale", "logit_scale",
)  # fmt: skip
"""Features that some files of these architectures carry and that would change every output if ignored."""
SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """config.json of a GGUF file.

    Raises:
        UnsupportedModelError: an architecture, or a rope scaling, that is not mapped.
        CheckpointError: a key that every such file must have is missing.
    """
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {architecture!r} is not supported; supported are {', '.join(ARCHITECTURES)}."
        )
    keys = _Keys(file, architecture)
    for refused in REFUSED_KEYS:
        if keys.get(refused):
            raise UnsupportedModelError(
                f"{file.path}: {architecture}.{refused} is {keys.get(refused)}, which is not supported."
            )
    window = keys.get("attention.sliding_window")
    if window and architecture != "llama":
        raise UnsupportedModelError(f"{file.path}: {architecture}.attention.sliding_window is not supported.")
    name = "MistralForCausalLM" if architecture == "llama" and window else ARCHITECTURES[architecture]
    heads = keys.require("attention.head_count")
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": architecture,
        "vocab_size": _vocab_size(file),
        "hidden_size": keys.require("embedding_length"),
        "intermediate_size": keys.require("feed_forward_length"),
        "num_hidden_layers": keys.require("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": _head_size(keys, heads),
        "max_position_embeddings": keys.require("context_length"),
        "rms_norm_eps": float(keys.require("attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_parameters": _rope_parameters(file, keys),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if window:
        config["sliding_window"] = window
    return config


def gguf_generation_config(file: GGUFFile) -> dict[str, Any]:
    """generation_config.json of a GGUF file: every id that ends a turn, and the file's sampling defaults."""
    metadata = file.metadata
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [metadata[f"tokenizer.ggml.{name}"] for name in names if f"tokenizer.ggml.{name}" in metadata]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    if "tokenizer.ggml.bos_token_id" in metadata:
        config["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    for gguf_name, name in SAMPLING_KEYS.items():
        if f"general.sampling.{gguf_name}" in metadata:
            config[name] = metadata[f"general.sampling.{gguf_name}"]
    return config


class _Keys:
    """The metadata under the architecture's prefix."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, name: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{name}", default)

    def require(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise CheckpointError(f"{self.file.path} has no metadata {self.architecture}.{name}.")
        if isinstance(value, list):
            raise UnsupportedModelError(
                f"{self.file.path}: {self.architecture}.{name} differs between layers."
            )
        return value


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding: the metadata's own count may leave out padding."""
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} lacks the tensor token_embd.weight.")
    return file.tensors["token_embd.weight"].shape[0]


def _head_size(keys: _Keys, heads: int) -> int:
    size = keys.get("attention.key_length", keys.require("embedding_length") // heads)
    value_size = keys.get("attention.value_length", size)
    if value_size != size:
        raise UnsupportedModelError(
            f"{keys.file.path}: keys of {size} and values of {value_size} elements a head are not supported."
        )
    return size


def _rope_parameters(file: GGUFFile, keys: _Keys) -> dict[str, Any]:
    rotated, size = keys.get("rope.dimension_count"), _head_size(keys, keys.require("attention.head_count"))
    parameters: dict[str, Any] = {
        "rope_theta": float(keys.get("rope.freq_base", 10000.0)),
        "rope_type": "default",
    }
    if rotated is not None and rotated != size:
        parameters["partial_rotary_factor"] = rotated / size
    if "rope_freqs.weight" in file.tensors:
        factors = file.read("rope_freqs.weight").astype(np.float32)
        return parameters | {"rope_type": "freq_factors", "factors": factors.tolist()}
    scaling = keys.get("rope.scaling.type", "none")
    if scaling == "none":
        return parameters
    parameters["rope_type"] = scaling
    parameters["factor"] = float(keys.get("rope.scaling.factor", 1.0))
    original = keys.get("rope.scaling.original_context_length")
    if original is not None:
        parameters["original_max_position_embeddings"] = original
    attention_factor = keys.get("rope.scaling.attn_factor", 1.0)
    if attention_factor != 1.0:
        raise UnsupportedModelError(
            f"{file.path}: rope.scaling.attn_factor {attention_factor} is not supported."
        )
    return parameters
