"""jaxserve: an inference and serving engine for large language models, native to JAX/XLA.

The public names are imported when they are first used, so that ``import jaxserve`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxserve.version import __version__

if TYPE_CHECKING:
    from jaxserve.engine.async_engine import AsyncEngine
    from jaxserve.engine.llm import LLM
    from jaxserve.outputs import BeamSearchOutput, CompletionOutput, Logprob, RequestOutput
    from jaxserve.sampling_params import (
        BeamSearchParams,
        RepetitionDetection,
        RequestOutputKind,
        SamplingParams,
    )
    from jaxserve.structured_outputs_params import StructuredOutputsParams

_HOMES = {
    "LLM": "jaxserve.engine.llm",
    "AsyncEngine": "jaxserve.engine.async_engine",
    "BeamSearchParams": "jaxserve.sampling_params",
    "RepetitionDetection": "jaxserve.sampling_params",
    "SamplingParams": "jaxserve.sampling_params",
    "RequestOutputKind": "jaxserve.sampling_params",
    "StructuredOutputsParams": "jaxserve.structured_outputs_params",
    "BeamSearchOutput": "jaxserve.outputs",
    "RequestOutput": "jaxserve.outputs",
    "CompletionOutput": "jaxserve.outputs",
    "Logprob": "jaxserve.outputs",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "Logprob",
    "RepetitionDetection",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
