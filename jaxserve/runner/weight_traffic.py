"""What weights take of a device's memory, and what a step reads of them, which is what bounds a step of few tokens."""

from __future__ import annotations

import math

from jax.sharding import Mesh

from jaxserve.models import Model
from jaxserve.runner.temporaries import device_shape
from sharding import ParamSpec


def weight_bytes(model: Model, mesh: Mesh | None) -> int:
    """Bytes that all weights take on one device.

    Args:
        model: what is served.
        mesh: None for one device.
    """
    return sum(
        math.prod(device_shape(model, spec, mesh)) * spec.dtype.itemsize for spec in model.specs.values()
    )


def weight_bytes_read(model: Model, mesh: Mesh | None, num_tokens: int, experts_per_token: int) -> float:
    """Bytes of weights that one device reads in a step, the embedding's rows aside.

    Of experts they are those that some token chose, if all choose at random.

    Args:
        model: what is served.
        mesh: None for one device.
        num_tokens: of each data parallel rank.
        experts_per_token: of a model with experts; 1 otherwise.
    """
    return sum(
        math.prod(device_shape(model, spec, mesh))
        * spec.dtype.itemsize
        * _share_reached(model, spec, num_tokens, experts_per_token)
        for name, spec in model.specs.items()
        if not (name == "embedding" and "lm_head" in model.specs)
    )


def _share_reached(model: Model, spec: ParamSpec, num_tokens: int, experts_per_token: int) -> float:
    if "expert" not in spec.axes:
        return 1.0
    context = model.context
    tokens = num_tokens * context.data_parallel_size if context.expert_parallel else num_tokens
    return 1.0 - (1.0 - experts_per_token / spec.shape[spec.axes.index("expert")]) ** tokens
