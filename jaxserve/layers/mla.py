"""Multi-head latent attention (DeepSeek-AI, 2024): one cached latent a token, from which all keys and values come.

A head's key is ``k_up latent`` and the rotated part that all heads share, its value is ``v_up latent``. Neither is ever
made: ``q . (k_up latent)`` is ``(k_up^T q) . latent``, and the sum of values is ``v_up`` of the sum of latents. So
attention is that of one KV head, the latent with the rotated part behind it, and its cache is whole on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.errors import ConfigError
from jaxserve.layers.linear import linear, onto_stream
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.params import LayerContext, StreamNorm, value_of
from jaxserve.layers.rope import RopeAngles
from pallas_kernels.dispatch import AttentionMetadata, AttentionOptions

LATENT_NORM_EPS = 1e-6
"""Of the norms of latents, whatever the model's own: the published code leaves it at this."""


@dataclass(frozen=True)
class MLAConfig:
    """Sizes of latent attention.

    Args:
        rank: of the latent that keys and values come from.
        rope_size: elements of a key and a query that are rotated, behind the others.
        nope_size: those that are not.
        value_size: of a head's value.
        query_rank: of the latent that queries come from; None: from the hidden state.
        bias: the products down to latents, and the output's, have biases.
        interleaved: rotated pairs are neighbours in the checkpoint; else half of ``rope_size`` apart.
    """

    rank: int
    rope_size: int
    nope_size: int
    value_size: int
    query_rank: int | None = None
    bias: bool = False
    interleaved: bool = True

    @property
    def query_size(self) -> int:
        """Of a head's query and key, unabsorbed."""
        return self.nope_size + self.rope_size

    @property
    def latent_size(self) -> int:
        """C: of what is cached, and of an absorbed query."""
        return self.rank + self.rope_size


class LatentAttention(nnx.Module):
    """One layer's attention.

    Weights, whole on every device: ``kv_down`` [rank + rope, M] and, with a query latent, ``q_down`` [query rank, M].
    Split by heads: ``q`` [H (nope + rope), query rank or M], ``kv_up`` [H (nope + value), rank], ``out`` [M, H value].
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        config: MLAConfig,
        options: AttentionOptions,
        context: LayerContext,
    ) -> None:
        check_heads(num_heads, context.tensor_parallel_size)
        rank, query_rank = config.rank, config.query_rank
        has_latent, has_bias = query_rank is not None, query_rank is not None and config.bias
        q_down = context.param((query_rank or 0, hidden_size), (None, "embed"))
        q_norm = context.param((query_rank or 0,), (None,), scale=0.0, mean=1.0)
        q_down_bias = context.param((query_rank or 0,), (None,), scale=0.0)
        self.q_down = q_down if has_latent else None
        self.q_norm = q_norm if has_latent else None
        self.q_down_bias = q_down_bias if has_bias else None
        self.q = context.param((num_heads * config.query_size, query_rank or hidden_size), ("heads", None))
        self.kv_down = context.param((config.latent_size, hidden_size), (None, "embed"))
        self.kv_norm = context.param((rank,), (None,), scale=0.0, mean=1.0)
        self.kv_up = context.param(
            (num_heads * (config.nope_size + config.value_size), rank), ("heads", None)
        )
        self.out = context.param((hidden_size, num_heads * config.value_size), ("embed", "heads"))
        self.kv_down_bias = context.param((config.latent_size,), (None,), scale=0.0) if config.bias else None
        self.out_bias = context.param((hidden_size,), ("embed",), scale=0.0) if config.bias else None
        self.config = config
        self.options = options
        self.context = context

    def __call__(
        self,
        x: jax.Array,
        rope: RopeAngles,
        kv_cache: jax.Array,
        metadata: AttentionMetadata,
        plan: Any,
        kv_scales: jax.Array | None,
        stream: StreamNorm,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Attend, with this device's heads.

        Args:
            x: [T, M], normalised.
            rope: the step's angles, of ``rope_size``.
            kv_cache: this layer's cache of latents.
            metadata: the step's batch.
            plan, kv_scales: None; what other layers' attention takes.
            stream: what the result is added to, and the norm of that.

        Returns:
            (the stream, [T, M], or this device's tokens of it where tokens are shared; its norms, [T, M]; the updated
            cache).
        """
        assert plan is None
        assert kv_scales is None
        config, num_tokens = self.config, x.shape[0]
        up = self.kv_up[...].reshape(-1, config.nope_size + config.value_size, config.rank)
        attended, kv_cache = self.context.latent_backend.update_and_attend(
            self._queries(x, up[:, : config.nope_size], rope), self._latents(x, rope), kv_cache, metadata,
            scale=self.options.scale, value_size=config.rank,
        )  # fmt: skip
        values = per_head(attended, up[:, config.nope_size :], transposed=True)
        values = values.reshape(num_tokens, -1)
        hidden, normal = onto_stream(values, self.out[...], value_of(self.out_bias), self.context, stream)
        return hidden, normal, kv_cache

    def _queries(self, x: jax.Array, k_up: jax.Array, rope: RopeAngles) -> jax.Array:
        """[T, H, C] queries to latents."""
        weight_first, nope = self.context.weight_first, self.config.nope_size
        if self.q_down is not None and self.q_norm is not None:
            x = linear(x, self.q_down[...], value_of(self.q_down_bias), weight_first=weight_first)
            x = rms_norm(x, self.q_norm[...], LATENT_NORM_EPS)
        q = linear(x, self.q[...], weight_first=weight_first).reshape(x.shape[0], -1, self.config.query_size)
        rotated = rope.rotate(q[:, None, :, nope:], interleaved=self.config.interleaved)[:, 0]
        return jnp.concatenate([per_head(q[:, :, :nope], k_up), rotated], axis=-1)

    def _latents(self, x: jax.Array, rope: RopeAngles) -> jax.Array:
        """[T, C] of the new tokens."""
        down = linear(
            x, self.kv_down[...], value_of(self.kv_down_bias), weight_first=self.context.weight_first
        )
        rank = self.config.rank
        rotated = rope.rotate(down[:, None, None, rank:], interleaved=self.config.interleaved)[:, 0, 0]
        return jnp.concatenate(
            [rms_norm(down[:, :rank], self.kv_norm[...], LATENT_NORM_EPS), rotated], axis=-1
        )


def check_heads(num_heads: int, tensor_parallel_size: int) -> None:
    """Refuse a number of heads that cannot be split evenly.

    Raises:
        ConfigError: naming both, and the sizes that fit.
    """
    if num_heads % tensor_parallel_size:
        fitting = [str(n) for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ConfigError(
            f"tensor_parallel_size {tensor_parallel_size} does not divide the {num_heads} query heads; sizes that do: "
            f"{', '.join(fitting)}.",
            param="tensor_parallel_size",
        )


def per_head(x: jax.Array, weight: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Each head's own product: [T, H, N] by [H, N, C] to [T, H, C]; ``transposed``, [T, H, C] to [T, H, N]."""
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    equation = "thc,hnc->thn" if transposed else "thn,hnc->thc"
    return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=x.dtype)
