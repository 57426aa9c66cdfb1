"""Declaring parameters: an nnx.Param that carries its ParamSpec, and what every layer is built with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from pallas_kernels.all_reduce.dispatch import AllReduce
from pallas_kernels.all_reduce.peers import current_peers
from pallas_kernels.dense_matmul.dispatch import DenseMatmul
from pallas_kernels.dispatch import AttentionBackend
from pallas_kernels.grouped_matmul.dispatch import PORTABLE, GroupedMatmul
from pallas_kernels.mla_attention.dispatch import BlockedLatentBackend, LatentBackend
from pallas_kernels.rms_norm.dispatch import PLAIN, AddNorm, RMSNorm
from pallas_kernels.split_heads.dispatch import SplitHeads
from sharding import DEFAULT_RULES, ParamSpec, ShardingRules

TENSOR_AXIS = "model"
"""Mesh axis over which layers are split."""
DATA_AXIS = "data"
"""Mesh axis over which the requests of a step are split."""
SHARED_TOKENS = 64
"""Sequence parallelism begins at so many tokens a device; fewer gain nothing from it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackedWeight:
    """One of the weights [L, M] of norms: for ``AddNorm``, which finds it by itself.

    Args:
        weights: all of them.
        layer: int32[1], which it is.
    """

    weights: jax.Array
    layer: jax.Array


@dataclass(frozen=True)
class StreamNorm:
    """The residual stream that a part of a layer adds to, and the norm of the sum.

    Args:
        hidden: [T, M]; where tokens are shared, this device's of them.
        weight: [M], of the norm, or one of [L, M].
        eps: added to the mean square.
    """

    hidden: jax.Array
    weight: jax.Array | StackedWeight
    eps: float

    @property
    def vector(self) -> jax.Array:
        """The weight [M]."""
        weight = self.weight
        return weight.weights[weight.layer[0]] if isinstance(weight, StackedWeight) else weight


@dataclass(frozen=True)
class LayerContext:
    """What layers need beside the model's own config.

    Layers run inside one ``shard_map`` over the whole mesh: they see their device's part of every weight and of the
    batch, and say where devices exchange something, with the methods here. On one device these do nothing.

    Args:
        dtype: type of weights and activations.
        backend: attention over the paged cache.
        tensor_parallel_size: devices over which heads, feed-forward and vocabulary are split.
        data_parallel_size: groups of such devices, each with requests of its own.
        expert_parallel: experts are whole and spread over all devices.
        sequence_parallel: between layers each device of a group holds a part of a long step's tokens.
        rules: logical to mesh axes.
        ragged_exchange: the devices have ``jax.lax.ragged_all_to_all``: TPUs and GPUs do.
        latent_backend: attention over a paged cache of latents, for the models that have one.
        grouped_matmul: what multiplies experts' tokens by their matrices.
        dense_matmul: what multiplies tokens by weights where it can; None: XLA does all of that.
        split_heads: what parts queries, keys and values where it can, likewise.
        add_norm: what adds to the residual stream and norms it, of one device, where it can, likewise.
        peer_all_reduce: what adds up few tokens' partial results where it can; None: the platform's collective does.
        scaled_kv_cache: cached keys and values are multiplied by scales of the checkpoint (float8).
        batch_invariant: a token's bits must not depend on what else is in the step.
        rms_norm: of the residual stream, and of query and key heads.
        weight_first: few tokens are multiplied with the weight on the left, which is faster on CPUs.
    """

    dtype: np.dtype
    backend: AttentionBackend
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel: bool = False
    sequence_parallel: bool = False
    rules: ShardingRules = DEFAULT_RULES
    weight_first: bool = False
    batch_invariant: bool = False
    rms_norm: RMSNorm = PLAIN
    scaled_kv_cache: bool = False
    ragged_exchange: bool = False
    latent_backend: LatentBackend = BlockedLatentBackend()
    grouped_matmul: GroupedMatmul = PORTABLE
    dense_matmul: DenseMatmul | None = None
    split_heads: SplitHeads | None = None
    add_norm: AddNorm | None = None
    peer_all_reduce: AllReduce | None = None

    def param(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        scale: float = 0.02,
        mean: float = 0.0,
        dtype: np.dtype | None = None,
    ) -> nnx.Param[jax.Array]:
        """Declare a parameter, in the compute type by default. It is abstract: ``Model`` binds an array to it."""
        spec = ParamSpec(shape, self.dtype if dtype is None else dtype, axes, scale, mean)
        return cast(nnx.Param[jax.Array], nnx.Param(spec.abstract(), spec=spec))

    def all_reduce(
        self, partial: jax.Array, residual: jax.Array | None = None, *, meet: bool = False
    ) -> jax.Array:
        """The sum of the tensor-parallel devices' partial results.

        Args:
            partial: this device's.
            residual: added to the sum, which is rounded before.
            meet: by the platform's collective in any case. A program of ours has one at least: then the runtime lets
                no device begin before all have loaded their kernels, which may wait for one that runs already.
        """
        kernel = None if meet or self.tensor_parallel_size == 1 else self.peer_all_reduce
        if kernel is not None and kernel.why_not(partial.shape, partial.dtype) is None:
            return kernel(partial, current_peers(), residual)
        total = partial if self.tensor_parallel_size == 1 else lax.psum(partial, TENSOR_AXIS)
        return total if residual is None else residual + total

    def reduce_tokens(
        self, partial: jax.Array, residual: jax.Array | None = None, *, meet: bool = False
    ) -> jax.Array:
        """``all_reduce`` of [T, M]; where tokens are shared, each device keeps its own: [T / devices, M]."""
        if not self._shares(partial.shape[0]):
            return self.all_reduce(partial, residual, meet=meet)
        total = lax.psum_scatter(partial, TENSOR_AXIS, scatter_dimension=0, tiled=True)
        return total if residual is None else residual + total

    def normal(self, hidden: jax.Array, weight: jax.Array, eps: float, num_tokens: int) -> jax.Array:
        """All T tokens' RMS norms, [T, M], of the residual stream."""
        return self.gather_tokens(self.rms_norm(hidden, weight, eps), num_tokens)

    def add_and_norm(self, partial: jax.Array, stream: StreamNorm) -> tuple[jax.Array, jax.Array]:
        """``reduce_tokens`` onto the residual stream, and the ``normal`` of that."""
        num_tokens, kernel = partial.shape[0], self.peer_all_reduce
        plain = self.rms_norm == PLAIN and not self.batch_invariant and not self._shares(num_tokens)
        if kernel is not None and plain and kernel.why_not_norm(partial.shape, partial.dtype) is None:
            peers, weight = current_peers(), stream.weight
            if not isinstance(weight, StackedWeight):
                return kernel.with_norm(partial, peers, stream.hidden, weight, stream.eps)
            return kernel.with_norm(partial, peers, stream.hidden, weight.weights, stream.eps, weight.layer)
        add_norm = self.add_norm if self.tensor_parallel_size == 1 else None
        if add_norm is not None and isinstance(stream.weight, StackedWeight):
            weights, layer = stream.weight.weights, stream.weight.layer
            return add_norm(partial, stream.hidden, weights, layer, stream.eps)
        hidden = self.reduce_tokens(partial, stream.hidden)
        return hidden, self.normal(hidden, stream.vector, stream.eps, num_tokens)

    def adds_and_norms(self, num_tokens: int, size: int) -> bool:
        """A kernel does so for so many tokens: then norms' weights come as ``StackedWeight``."""
        if self.rms_norm != PLAIN or self.batch_invariant or self._shares(num_tokens):
            return False
        if self.tensor_parallel_size > 1:
            peers = self.peer_all_reduce
            return peers is not None and peers.why_not_norm((num_tokens, size), self.dtype) is None
        kernel = self.add_norm
        return kernel is not None and kernel.why_not(num_tokens, size, self.dtype) is None

    def gather_tokens(self, hidden: jax.Array, num_tokens: int) -> jax.Array:
        """All T tokens of what ``reduce_tokens`` left: [T, M]."""
        if hidden.shape[0] == num_tokens:
            return hidden
        return lax.all_gather(hidden, TENSOR_AXIS, tiled=True)

    def shard_index(self) -> jax.Array:
        """int32[]: which of the tensor-parallel devices this is."""
        return jnp.int32(0) if self.tensor_parallel_size == 1 else lax.axis_index(TENSOR_AXIS)

    def _shares(self, num_tokens: int) -> bool:
        devices = self.tensor_parallel_size
        enough = num_tokens % devices == 0 and num_tokens >= SHARED_TOKENS * devices
        return self.sequence_parallel and devices > 1 and enough


def value_of(param: nnx.Param[jax.Array] | None) -> jax.Array | None:
    """The array of a parameter that a model may lack."""
    return None if param is None else param[...]
