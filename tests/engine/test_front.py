"""What the front says when it cannot load a model, and where sampling defaults come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.config import ModelConfig
from jaxserve.engine.front import Front, read_generation_config, sampling_defaults
from jaxserve.errors import ConfigError, JaxserveError, UnsupportedModelError

OF_MODEL = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}


def folder(path: Path, architecture: str) -> ModelConfig:
    """A model without a tokenizer."""
    path.mkdir()
    config = {"architectures": [architecture], "model_type": "x", "vocab_size": 8}
    (path / "config.json").write_text(json.dumps(config))
    return ModelConfig(str(path), load_format="dummy")


def test_an_unsupported_architecture_is_said_before_the_missing_tokenizer(tmp_path: Path):
    with pytest.raises(UnsupportedModelError, match="NobodysModel"):
        Front.load(folder(tmp_path / "m", "NobodysModel"))


def test_a_missing_tokenizer_is_said_of_a_model_that_could_be_served(tmp_path: Path):
    with pytest.raises(JaxserveError, match="tokenizer") as caught:
        Front.load(folder(tmp_path / "m", "LlamaForCausalLM"))
    assert not isinstance(caught.value, UnsupportedModelError)


@pytest.mark.parametrize(("source", "expected"), [("auto", OF_MODEL), ("jaxserve", {}), ("vllm", {})])
def test_named_generation_configs(source: str, expected: dict[str, object]):
    assert read_generation_config(source, OF_MODEL) == expected


def test_the_generation_config_of_a_folder(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"top_k": 5}')
    assert read_generation_config(str(tmp_path), OF_MODEL) == {"top_k": 5}


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_usable_generation_config(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_generation_config(str(tmp_path), OF_MODEL)
    assert caught.value.param == "generation_config"


def test_the_servers_override_wins_over_the_models_defaults():
    config = ModelConfig(override_generation_config={"temperature": 0.1, "max_new_tokens": 7})
    assert sampling_defaults(config, OF_MODEL) == {"temperature": 0.1, "top_p": 0.9, "max_tokens": 7}
