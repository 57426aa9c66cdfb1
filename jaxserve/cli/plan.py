"""``jaxserve plan MODEL --topology v6e-8 -tp 8``: sizes, fit and real TPU compilations, from a config alone."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

from jaxserve.config import (
    CacheConfig,
    CompilationConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from jaxserve.config.cli_flags import add_config_flags, flags_given, parse_size
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.logs import configure_logging

CONFIGS: list[type[Any]] = [ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, CompilationConfig]
FLAGS = {
    "revision", "dtype", "max_model_len", "hf_overrides", "max_logprobs", "block_size", "gpu_memory_utilization",
    "kv_cache_memory_bytes", "num_gpu_blocks_override", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens",
    "tensor_parallel_size", "data_parallel_size", "enable_expert_parallel", "sequence_parallel",
    "compile_cache_dir",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "positional_model", metavar="MODEL", help="Hugging Face folder, config.json, hub id, or .gguf file."
    )
    parser.add_argument("--topology", required=True, help="v5e-4, v5p-16, v6e-8, tpu7x-8, h200-8 and others.")
    parser.add_argument(
        "--context", type=parse_size, nargs="+", default=[], metavar="TOKENS",
        help="Count concurrent users for requests of these lengths too.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--no-compile", action="store_true", help="Arithmetic alone.")
    group.add_argument(
        "--compile", choices=("all", "decode"), default=None,
        help="Which programs to compile. Default: all where there is a compiler for the topology.",
    )  # fmt: skip
    parser.add_argument(
        "--compile-layers", type=int, metavar="N",
        help="Compile programs of the first N layers. Default: all of up to 40, else 4.",
    )  # fmt: skip
    parser.add_argument(
        "--fill-cache", action="store_true",
        help="Compile every program and store it for an engine on the real devices. Takes long.",
    )  # fmt: skip
    add_config_flags(parser, CONFIGS, only=FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. The exit code is 1 where it does not fit."""
    configure_logging("warning")
    if min(arguments.context, default=1) < 1:
        raise ConfigError(f"--context must be at least 1, got {min(arguments.context)}.", param="context")
    config = EngineConfig.from_kwargs(**flags_given(CONFIGS, arguments))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on a device
    from jaxserve.plan.hardware import find_topology
    from jaxserve.plan.make_plan import CompileOptions, as_json, make_plan
    from jaxserve.plan.report import render

    topology = find_topology(arguments.topology)
    programs = arguments.compile or ("none" if arguments.no_compile or topology.platform != "tpu" else "all")
    with only_errors_of("jaxserve.runner"):  # the plan says itself what a runner would warn of
        plan = make_plan(
            arguments.positional_model,
            read_config(arguments.positional_model, config.model_config.revision),
            config,
            topology,
            contexts=arguments.context,
            options=CompileOptions(programs, arguments.compile_layers, arguments.fill_cache),
        )
    print(json.dumps(as_json(plan), indent=2) if arguments.json else render(plan))
    return 0 if plan.fits else 1


@contextlib.contextmanager
def only_errors_of(name: str) -> Generator[None]:
    """Keep a logger's warnings back."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def read_config(model: str, revision: str | None) -> dict[str, Any]:
    """config.json of a model, or the file itself. No weights are fetched.

    Raises:
        CheckpointError: the file is no config.
    """
    path = Path(model).expanduser()
    if path.suffix == ".json" and path.is_file():
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from error
    from jaxserve.weights.resolve import resolve_model

    return resolve_model(model, revision, weights=False).config
