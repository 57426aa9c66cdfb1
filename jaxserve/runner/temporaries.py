"""What programs need of a device's memory beside arguments, by rule of thumb: to size a cache before compiling."""

from __future__ import annotations

import math

from jax.sharding import Mesh

from jaxserve.models import Model
from sharding import ParamSpec


def forward_temporaries(model: Model, num_tokens: int, experts_per_token: int, mesh: Mesh | None) -> int:
    """Bytes of a step's layers on one device: a layer's widest intermediate values beside the residual stream.

    Args:
        num_tokens: T.
        experts_per_token: of a model with experts; 1 otherwise.
        mesh: None for one device.
    """
    widest = 0
    for spec in model.specs.values():
        shape = device_shape(model, spec, mesh)
        if len(shape) < 2 or "vocab" in spec.axes or "layers" in spec.axes:
            continue
        used = math.prod(shape[:-1])
        if "expert" in spec.axes:  # each of a token's experts has a copy of it
            used = experts_per_token * (math.prod(shape[1:-1]) + model.hidden_size)
        widest = max(widest, used)
    if model.has_latents:  # queries are as wide as the latent
        heads = model.num_heads // model.context.tensor_parallel_size
        widest = max(widest, heads * model.kv_cache_specs()[0].head_size)
    return num_tokens * (2 * widest + 4 * model.hidden_size) * model.dtype.itemsize


def sampler_temporaries(model: Model, num_rows: int, copies: int, mesh: Mesh | None) -> int:
    """Bytes of the logits of so many rows on one device, in float32, held as often as ``copies`` says."""
    return num_rows * device_shape(model, model.specs["embedding"], mesh)[0] * 4 * copies


def device_shape(model: Model, spec: ParamSpec, mesh: Mesh | None) -> tuple[int, ...]:
    """A parameter's shape on one device."""
    if mesh is None:
        return spec.shape
    sharding = spec.abstract(mesh, model.context.rules).sharding
    assert sharding is not None
    return sharding.shard_shape(spec.shape)
