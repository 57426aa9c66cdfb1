"""One tiny model for the engine's tests, and engines over it that are built once per set of arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve import LLM

ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 8, "num_gpu_blocks_override": 200}
"""Arguments of the tests' engines, where a test names no others: few, small programs."""
TIGHT = {"num_gpu_blocks_override": 26, "max_model_len": 200}
"""Besides these: a cache in which running requests take each other's blocks."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def make_llm(tiny_model: Path) -> Iterator[Callable[..., LLM]]:
    """``make_llm(**arguments)``: the same arguments give the same LLM."""
    built: dict[str, LLM] = {}

    def make(**arguments: Any) -> LLM:
        key = repr(sorted(arguments.items()))
        if key not in built:
            built[key] = LLM(str(tiny_model), **{**ENGINE, **arguments})
        return built[key]

    yield make
    for llm in built.values():
        llm.close()
