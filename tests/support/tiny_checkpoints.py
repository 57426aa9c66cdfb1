"""Tiny random checkpoints of every family as Hugging Face folders, the same everywhere, without torch.

``write_tiny_checkpoint(folder, "qwen3")`` writes config.json, generation_config.json, model.safetensors and
a real byte-level tokenizer with a chat template.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2

BASE_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 0,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "dtype": "float32",
}

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "use_sliding_window": False,
    "head_dim": 32,
}

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "sliding_window": None,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
}
QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "use_sliding_window": False,
    "qkv_bias": True,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "use_sliding_window": False,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "head_dim": 32,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1500.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
        "original_max_position_embeddings": 32,
    },
}
DEEPSEEK_V2 = MLA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
DEEPSEEK_V3 = MLA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 20,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama_tied_mha": LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama_mqa_biased": LLAMA | {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "llama3": LLAMA
    | {
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama_linear": LLAMA
    | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "mistral": MISTRAL | {"head_dim": 24},
    "mistral_window": MISTRAL | {"sliding_window": 8, "num_attention_heads": 8},
    "qwen2": QWEN2 | {"tie_word_embeddings": True},
    "qwen2_window": QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen2_yarn": QWEN2
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "qwen3": QWEN3 | {"tie_word_embeddings": True},
    "qwen3_window": QWEN3
    | {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE | {"mlp_only_layers": [1]},
    "qwen3_moe": QWEN3_MOE | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 8},
    "gpt_oss": GPT_OSS,
    "deepseek_v2": DEEPSEEK_V2 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "deepseek_v2_groups": DEEPSEEK_V2
    | {
        "q_lora_rank": 20,
        "attention_bias": True,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 4.0,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": DEEPSEEK_V3,
}
"""Name to what it changes in ``BASE_CONFIG``."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER_TEXT = (
    "the quick brown fox jumps over the lazy dog and then the dog sleeps in the sun",
    "a model reads tokens one after another and writes the next one",
    "numbers such as 10, 100 and 1000 and signs such as ( ) [ ] { } are common in code",
)


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """config.json of a family, with some of its keys replaced."""
    return BASE_CONFIG | FAMILIES[family] | overrides


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with this config, by Hugging Face name."""
    hidden, ffn, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    qkv_bias = config["attention_bias"] or config["model_type"] in ("qwen2", "qwen2_moe")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes[f"{name}.input_layernorm.weight"] = (hidden,)
        shapes[f"{name}.post_attention_layernorm.weight"] = (hidden,)
        if "kv_lora_rank" in config:
            shapes |= _latent_shapes(config, f"{name}.self_attn")
        for part, outputs in (("q", queries), ("k", keys), ("v", keys)):
            if "kv_lora_rank" in config:
                break
            shapes[f"{name}.self_attn.{part}_proj.weight"] = (outputs, hidden)
            if qkv_bias:
                shapes[f"{name}.self_attn.{part}_proj.bias"] = (outputs,)
            if config["model_type"] in ("qwen3", "qwen3_moe") and part != "v":
                shapes[f"{name}.self_attn.{part}_norm.weight"] = (size,)
        if "kv_lora_rank" not in config:
            shapes[f"{name}.self_attn.o_proj.weight"] = (hidden, queries)
        if config["attention_bias"]:
            shapes[f"{name}.self_attn.o_proj.bias"] = (hidden,)
        if _has_experts(config, layer):
            shapes |= _expert_shapes(config, name)
        else:
            shapes |= _mlp_shapes(f"{name}.mlp", hidden, ffn, config["mlp_bias"])
    return shapes


def _mlp_shapes(name: str, hidden: int, ffn: int, bias: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for part, shape in {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}.items():
        shapes[f"{name}.{part}_proj.weight"] = shape
        if bias:
            shapes[f"{name}.{part}_proj.bias"] = shape[:1]
    return shapes


def _latent_shapes(config: dict[str, Any], name: str) -> dict[str, tuple[int, ...]]:
    """A layer's latent attention, but the output's bias."""
    hidden, heads, rank, rope = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim")
    )
    nope, value, query_rank = config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "o_proj.weight": (hidden, heads * value),
    }
    queries = heads * (nope + rope)
    if query_rank is None:
        shapes["q_proj.weight"] = (queries, hidden)
    else:
        shapes["q_a_proj.weight"] = (query_rank, hidden)
        shapes["q_a_layernorm.weight"] = (query_rank,)
        shapes["q_b_proj.weight"] = (queries, query_rank)
    if config["attention_bias"]:
        shapes["kv_a_proj_with_mqa.bias"] = (rank + rope,)
        if query_rank is not None:
            shapes["q_a_proj.bias"] = (query_rank,)
    return {f"{name}.{part}": shape for part, shape in shapes.items()}


def _has_experts(config: dict[str, Any], layer: int) -> bool:
    if "n_routed_experts" in config:
        return layer >= config["first_k_dense_replace"] and layer % config["moe_layer_freq"] == 0
    if config["model_type"] in ("mixtral", "gpt_oss"):
        return True
    every = config.get("decoder_sparse_step")
    return bool(every) and layer not in config["mlp_only_layers"] and (layer + 1) % every == 0


def _expert_shapes(config: dict[str, Any], name: str) -> dict[str, tuple[int, ...]]:
    """The router and experts of a layer."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    kind, block = config["model_type"], f"{name}.mlp"
    if kind == "gpt_oss":
        experts = config["num_local_experts"]
        return {
            f"{name}.self_attn.sinks": (config["num_attention_heads"],),
            f"{block}.router.weight": (experts, hidden),
            f"{block}.router.bias": (experts,),
            f"{block}.experts.gate_up_proj": (experts, hidden, 2 * ffn),
            f"{block}.experts.gate_up_proj_bias": (experts, 2 * ffn),
            f"{block}.experts.down_proj": (experts, ffn, hidden),
            f"{block}.experts.down_proj_bias": (experts, hidden),
        }
    if kind == "mixtral":
        block, experts = f"{name}.block_sparse_moe", config["num_local_experts"]
        shapes = {f"{block}.gate.weight": (experts, hidden)}
        for expert in range(experts):
            for part, shape in {"w1": (ffn, hidden), "w2": (hidden, ffn), "w3": (ffn, hidden)}.items():
                shapes[f"{block}.experts.{expert}.{part}.weight"] = shape
        return shapes
    experts = config["n_routed_experts"] if "kv_lora_rank" in config else config["num_experts"]
    shapes = {f"{block}.gate.weight": (experts, hidden)}
    for expert in range(experts):
        shapes |= _mlp_shapes(f"{block}.experts.{expert}", hidden, config["moe_intermediate_size"])
    if kind == "qwen2_moe":
        shapes |= _mlp_shapes(f"{block}.shared_expert", hidden, config["shared_expert_intermediate_size"])
        shapes[f"{block}.shared_expert_gate.weight"] = (1, hidden)
    if "kv_lora_rank" in config:
        shared = config["n_shared_experts"] * config["moe_intermediate_size"]
        shapes |= _mlp_shapes(f"{block}.shared_experts", hidden, shared)
    if config.get("topk_method") == "noaux_tc":
        shapes[f"{block}.gate.e_score_correction_bias"] = (experts,)
    return shapes


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Reproducible float32 values of a sensible scale (RandomState's stream is frozen by numpy's policy)."""
    values = np.random.RandomState(zlib.crc32(f"{seed}/{name}".encode())).standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 1.0 + 0.2 * values
    elif name.endswith(("bias", ".sinks")):
        values = 0.3 * values
    elif "embed_tokens" in name:
        values = 0.4 * values
    else:
        values = values * (1.5 / math.sqrt(shape[-1]))
    return values.astype(np.float32)


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """All tensors of a tiny checkpoint, float32."""
    return {name: random_tensor(name, shape, seed) for name, shape in tensor_shapes(config).items()}


SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str = "float32") -> None:
    """Write tensors as float32, float16 or bfloat16 (which safetensors' numpy side cannot write)."""
    element = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.size * element.itemsize
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.astype(element)).tobytes())


def write_sharded_safetensors(folder: Path, tensors: dict[str, np.ndarray], num_files: int) -> None:
    """Write tensors over several files with an index, as large checkpoints are."""
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(num_files):
        file_name = f"model-{i + 1:05}-of-{num_files:05}.safetensors"
        part = {name: tensors[name] for name in names[i::num_files]}
        write_safetensors(folder / file_name, part)
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer of 320 ids with ChatML's special tokens and template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TOKENIZER_TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_tiny_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    tokenizer: bool = True,
    num_files: int = 1,
    **overrides: Any,
) -> Path:
    """Write a checkpoint folder and return it.

    Args:
        folder: made if it is not there.
        family: a key of ``FAMILIES``.
        seed: of the weights.
        dtype: type of the stored weights: float32, float16 or bfloat16.
        tokenizer: write tokenizer.json and tokenizer_config.json too.
        num_files: safetensors files; more than one get an index (float32 only).
        overrides: keys of config.json to replace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, dtype=dtype, **overrides)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation_config = {"bos_token_id": 0, "eos_token_id": [EOS_TOKEN_ID], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    tensors = random_tensors(config, seed)
    if num_files > 1:
        write_sharded_safetensors(folder, tensors, num_files)
    else:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
    if tokenizer:
        write_tokenizer(folder)
    return folder
