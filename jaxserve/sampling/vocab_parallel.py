"""Sampling where each device of a group holds a part of the vocabulary's logits.

Central idea: no device needs all rows of all logits. Greedy steps compare each device's best token. Everything else is
sampled by the one-device sampler on a share of the rows: one all-to-all turns [R, V / devices] into [R / devices, V].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.logprobs import LogprobArrays, compute_logprobs, no_logprobs
from jaxserve.sampling.metadata import Feature, SamplingMetadata
from jaxserve.sampling.sampler import SamplerOutput, choose, remember
from jaxserve.sampling.state import SamplerState
from jaxserve.sampling.top_tokens import max_and_index, without_nan


@dataclass(frozen=True)
class VocabParallel:
    """How logits are split: inside a ``shard_map``, over the devices of one mesh axis, in their order.

    Args:
        vocab_size: V; columns beyond it, on the last devices, are padding.
        devices: how many there are.
        axis: the mesh axis.
    """

    vocab_size: int
    devices: int
    axis: str

    def sample(
        self,
        logits: jax.Array,
        metadata: SamplingMetadata,
        state: SamplerState,
        *,
        max_logprobs: int,
        features: Feature,
    ) -> tuple[SamplerOutput, SamplerState]:
        """``sampler.sample``, with the same result on every device of the group.

        Args:
            logits: float32[R, columns], this device's.
            metadata, state: the same on every device of the group.
            max_logprobs, features: static.
        """
        if features == Feature.NONE:
            output = SamplerOutput(self._greedy(logits), no_logprobs(logits.shape[0], max_logprobs))
        else:
            own = SamplingMetadata(self._own_rows(metadata.packed), metadata.step_features)
            chosen = choose(self._exchange(logits), own, state, max_logprobs=max_logprobs, features=features)
            output = self._gather(chosen, logits.shape[0])
        return output, remember(output, metadata, state, features)

    def logprobs(self, logits: jax.Array, token_ids: jax.Array, num_top: int) -> LogprobArrays:
        """``logprobs.compute_logprobs`` of split logits, float32[N, columns], at ``token_ids`` int32[N]."""
        own = compute_logprobs(self._exchange(logits), self._own_rows(token_ids), num_top)
        return self._gather(own, logits.shape[0])

    def _greedy(self, logits: jax.Array) -> jax.Array:
        columns = logits.shape[1]
        first = lax.axis_index(self.axis) * columns
        real = first + jnp.arange(columns) < self.vocab_size
        best, place = max_and_index(jnp.where(real, without_nan(logits), -jnp.inf))
        bests, tokens = lax.all_gather((best, first + place), self.axis, axis=1)  # [R, devices]
        # The devices hold ascending ids: the first of equal logits is the lowest token.
        maximum, device = max_and_index(bests)
        token = jnp.take_along_axis(tokens, device[:, None], axis=1, mode="clip")[:, 0]
        return jnp.where(maximum > -jnp.inf, token, -1)

    def _exchange(self, logits: jax.Array) -> jax.Array:
        """[R, columns] to this device's rows, [ceil(R / devices), V]."""
        padded = self._pad_rows(logits)
        rows = lax.all_to_all(padded, self.axis, split_axis=0, concat_axis=1, tiled=True)
        return rows[:, : self.vocab_size]

    def _own_rows(self, values: jax.Array) -> jax.Array:
        """The part [ceil(R / devices), …] of [R, …] whose logits ``_exchange`` brings."""
        padded = self._pad_rows(values)
        rows = padded.shape[0] // self.devices
        return lax.dynamic_slice_in_dim(padded, lax.axis_index(self.axis) * rows, rows)

    def _pad_rows(self, values: jax.Array) -> jax.Array:
        """Rounded up to equal shares; rows of zeros are greedy and nobody reads them."""
        missing = -values.shape[0] % self.devices
        return jnp.pad(values, ((0, missing),) + ((0, 0),) * (values.ndim - 1))

    def _gather(self, own: Any, num_rows: int) -> Any:
        return jax.tree.map(lambda leaf: lax.all_gather(leaf, self.axis, tiled=True)[:num_rows], own)
