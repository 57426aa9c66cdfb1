"""``jaxserve convert MODEL OUT``: save a model in the engine-ready form, which ``jaxserve serve OUT`` starts from."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config import ModelConfig
from jaxserve.config.cli_flags import add_config_flags, config_from_flags
from jaxserve.errors import CheckpointError
from jaxserve.logs import configure_logging

if TYPE_CHECKING:
    from jaxserve.weights.resolve import ModelFiles

COPIED = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "*.tiktoken",
    "additional_chat_templates/*.jinja",
    "LICENSE*",
)
"""Files of a Hugging Face folder that a server reads beside the weights."""
NOT_COPIED = (".index.json",)
FLAGS = ("dtype", "revision")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "positional_model", metavar="MODEL", help="Hugging Face folder, hub id, or .gguf file."
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="Folder to write; must not exist, or be empty.")
    add_config_flags(parser, [ModelConfig], only=FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Convert. Needs memory for about 2 GiB of weights at a time, and no accelerator."""
    configure_logging(None)
    config = config_from_flags(ModelConfig, arguments)
    out: Path = arguments.out.expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists already and is no empty folder: name a new one.")

    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # devices are for those who serve
    from jaxserve.weights.resolve import resolve_model

    files = resolve_model(arguments.positional_model, config.revision)
    if files.format == "orbax":
        raise CheckpointError(f"{files.path} is converted already.")
    started = time.monotonic()
    with _removed_if_it_fails(out):
        size = convert_weights(files, out, config.dtype)
        copy_files(files, out)
    print(
        f"{out}: {size / 2**20:,.0f} MiB of weights in {time.monotonic() - started:.1f} s. jaxserve serve {out}"
    )
    return 0


@contextlib.contextmanager
def _removed_if_it_fails(out: Path) -> Generator[None, None, None]:
    """A folder that holds the whole result or nothing: half of it could be taken for a model."""
    existed = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        if existed:
            out.mkdir(exist_ok=True)
        raise


def convert_weights(files: ModelFiles, out: Path, dtype: str) -> int:
    """Write the weights, a few at a time, in ``dtype`` (auto: the checkpoint's); bytes of them.

    The type of a scaled cache's model is built, so that the checkpoint's scales for a float8 cache are kept too.
    """
    from jaxserve.models import build
    from jaxserve.weights.checkpoint import open_checkpoint
    from jaxserve.weights.loader import check_tensors, stream_params
    from jaxserve.weights.orbax_store import save_params
    from pallas_kernels.dispatch import BlockedBackend
    from pallas_kernels.kv_cache_update.quantized import FLOAT8

    if dtype == "auto":
        dtype = str(files.config.get("dtype") or files.config.get("torch_dtype") or "bfloat16")
    model = build(files.config, BlockedBackend(), dtype, kv_cache_dtype=FLOAT8)
    checkpoint = open_checkpoint(files.path, files.format)
    check_tensors(checkpoint, model.weight_map, files)
    params = stream_params(model.specs, model.weight_map, checkpoint)
    save_params(out, model.specs, model.weight_map, params)
    return model.param_bytes()


def copy_files(files: ModelFiles, out: Path) -> None:
    """Config, tokenizer and templates: copied, or (of a GGUF file) written out of its metadata."""
    if files.format == "hf":
        for path in _matching(files.path):
            target = out / path.relative_to(files.path)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        # What was quantized is stored as it was decoded.
        _write(out / "config.json", {k: v for k, v in files.config.items() if k != "quantization_config"})
        return
    from jaxserve.tokenizer.load import load_tokenizer, resolve_eos_token_ids

    tokenizer = load_tokenizer(files.path, files.format)
    eos = resolve_eos_token_ids(tokenizer, files.config, files.generation_config)
    _write(out / "config.json", files.config)
    _write(out / "generation_config.json", {**files.generation_config, "eos_token_id": eos})
    tokenizer.backend.save(str(out / "tokenizer.json"))
    templates = [{"name": name, "template": text} for name, text in tokenizer.chat_templates.items()]
    _write(out / "tokenizer_config.json", {**tokenizer.special_tokens_map, "chat_template": templates})


def _matching(folder: Path) -> Iterable[Path]:
    found = {path for pattern in COPIED for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if not path.name.endswith(NOT_COPIED))


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
