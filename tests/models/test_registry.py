"""Finding families, and refusing by name what is not implemented."""

import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from model_harness import OracleBackend
from tiny_checkpoints import FAMILIES, tiny_config

from jaxserve.errors import UnsupportedModelError
from jaxserve.models import build
from jaxserve.models.interface import CausalLM
from jaxserve.models.registry import discover, find_family, supported_architectures

pytestmark = pytest.mark.device


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        build(config, OracleBackend(), jnp.float32)
    return str(caught.value)


def test_supported_architectures() -> None:
    assert supported_architectures() == [
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "GptOssForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    ]
    assert find_family({"architectures": ["Unknown", "Qwen3ForCausalLM"]}).ARCHITECTURES == (
        "Qwen3ForCausalLM",
    )


def test_an_unsupported_architecture_names_itself_and_the_supported_ones() -> None:
    message = refused({"architectures": ["GPT2LMHeadModel"]})
    assert "GPT2LMHeadModel is not supported" in message
    assert "LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM" in message
    assert "model_type 'bert'" in refused({"model_type": "bert"})
    assert "model_type None" in refused({"architectures": None})


@pytest.mark.parametrize("family", FAMILIES)
def test_models_keep_the_contract(family: str) -> None:
    model = build(tiny_config(family), OracleBackend(), jnp.bfloat16)
    assert isinstance(model._module, CausalLM)
    assert model.vocab_size == 320
    assert model.max_position_embeddings == 512
    assert model.param_bytes() == sum(spec.size_bytes for spec in model.specs.values())
    specs = model.kv_cache_specs()
    assert len(specs) == 3
    assert (specs[0].dtype, specs[0].dtype_bytes) == ("bfloat16", 2)
    assert model.kv_cache_specs("float32")[0].dtype_bytes == 4
    assert {source.target for source in model.weight_map} == set(model.specs)
    assert model.abstract_params().keys() == model.specs.keys()


@pytest.mark.parametrize(
    "family, windows",
    [
        ("llama", [None] * 3),
        ("mistral", [None] * 3),
        ("mistral_window", [8] * 3),
        ("qwen2", [None] * 3),
        ("qwen2_window", [None, 8, 8]),
        ("qwen3_window", [5, None, 5]),
    ],
)
def test_sliding_windows(family: str, windows: list[int | None]) -> None:
    model = build(tiny_config(family), OracleBackend(), jnp.float32)
    assert [spec.sliding_window for spec in model.kv_cache_specs()] == windows


def test_mistral_without_the_key_has_the_first_release_s_window() -> None:
    config = tiny_config("mistral")
    del config["sliding_window"]
    assert build(config, OracleBackend(), jnp.float32).kv_cache_specs()[0].sliding_window == 4096


@pytest.mark.parametrize(
    "family, overrides, message",
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("llama", {"hidden_size": None}, "has no 'hidden_size'"),
        ("llama", {"hidden_size": "64"}, "'hidden_size' must be a positive integer, got '64'"),
        ("llama", {"num_hidden_layers": 0}, "'num_hidden_layers' must be a positive integer, got 0"),
        ("llama", {"vocab_size": True}, "'vocab_size' must be a positive integer, got True"),
        (
            "llama",
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear"}},
            "rope type 'linear' needs the number 'factor'",
        ),
        ("llama", {"head_dim": 15}, "head size of 15"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("mistral", {"sliding_window": -1}, "'sliding_window' must be a positive integer, got -1"),
        ("qwen2_window", {"layer_types": ["full_attention"]}, "must name 3 of"),
        ("qwen3_window", {"layer_types": ["chunked_attention"] * 3}, "must name 3 of"),
        ("qwen3_window", {"sliding_window": None}, "has no 'sliding_window'"),
    ],
)
def test_refusals(family: str, overrides: dict[str, Any], message: str) -> None:
    assert message in refused(tiny_config(family, **overrides))


@pytest.mark.parametrize(
    "source, message",
    [
        ("", "must define ARCHITECTURES"),
        ("ARCHITECTURES = 'NotATuple'\ndef create(config, context): ...", "must define ARCHITECTURES"),
        ("ARCHITECTURES = ('A',)", "must define ARCHITECTURES"),
        ("ARCHITECTURES = ('Twice',)\ndef create(config, context): ...", "Twice is claimed by"),
    ],
)
def test_discovery_fails_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, source: str, message: str
) -> None:
    name = f"families_{abs(hash(source))}"
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "first.py").write_text("ARCHITECTURES = ('Twice',)\ndef create(config, context): ...\n")
    (package / "second.py").write_text(source)
    (package / "interface.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    request.addfinalizer(lambda: [sys.modules.pop(m) for m in list(sys.modules) if m.startswith(name)])
    with pytest.raises(TypeError, match=message):
        discover(name)
