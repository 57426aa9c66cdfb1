"""The split-once form of a model: ParamSpecs by name, and pure functions over a flat dict of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError, UnsupportedModelError
from jaxserve.kv_cache_spec import KVCacheSpec
from jaxserve.layers.expert_parallel import expert_imbalance
from jaxserve.layers.params import DATA_AXIS, TENSOR_AXIS, LayerContext
from jaxserve.models.interface import CausalLM, CountsExperts
from jaxserve.models.registry import find_family
from jaxserve.weights.weight_map import WeightSource
from pallas_kernels.all_reduce.dispatch import AllReduce
from pallas_kernels.all_reduce.peers import reaching
from pallas_kernels.dense_matmul.dispatch import DenseMatmul
from pallas_kernels.dispatch import AttentionBackend, AttentionMetadata, AttentionOptions
from pallas_kernels.grouped_matmul.dispatch import PORTABLE, GroupedMatmul
from pallas_kernels.kv_cache_update.quantized import FLOAT8, KVCache
from pallas_kernels.mla_attention.dispatch import BlockedLatentBackend, LatentBackend
from pallas_kernels.rms_norm.dispatch import PLAIN as PLAIN_NORM
from pallas_kernels.rms_norm.dispatch import AddNorm, RMSNorm
from pallas_kernels.split_heads.dispatch import SplitHeads
from sharding import DEFAULT_RULES, ParamSpec, ShardingRules

BLOCKED_LATENTS = BlockedLatentBackend()
Params = dict[str, jax.Array]
"""Parameter name (``layers.0.attention.qkv``) to array: flat, so that dispatch walks few nodes."""
PEERS = "peers"
"""Among the params of a model with ``peer_all_reduce``, though no weight: int32[1, 1, 1 + 2 * devices] of each device
(``pallas_kernels.all_reduce.workspace.Workspaces``)."""
PEERS_SPEC = PartitionSpec(DATA_AXIS, TENSOR_AXIS)
"""How that lies on a mesh."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model without its weights.

    Args:
        specs: every parameter, in the order of the params dict.
        weight_map: where each checkpoint tensor goes.
        vocab_size: V, width of the logits.
        hidden_size: M.
        dtype: of weights and activations.
        max_position_embeddings: longest context the model was made for.
        num_heads: H, over all devices.
        context: how its layers are split, among others.
        attention_options: those of its layers, each once.
    """

    specs: dict[str, ParamSpec]
    weight_map: tuple[WeightSource, ...]
    vocab_size: int
    hidden_size: int
    dtype: np.dtype
    max_position_embeddings: int
    num_heads: int
    attention_options: frozenset[AttentionOptions]
    context: LayerContext = field(repr=False)
    _module: CausalLM = field(repr=False)
    _graphdef: Any = field(repr=False)
    _treedef: Any = field(repr=False)

    def abstract_params(self, mesh: Mesh | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and, on a mesh, shardings of the params."""
        params = {name: spec.abstract(mesh, self.context.rules) for name, spec in self.specs.items()}
        if self.context.peer_all_reduce is not None and mesh is not None:
            tensor, data = self.context.tensor_parallel_size, self.context.data_parallel_size
            sharding = NamedSharding(mesh, PEERS_SPEC)
            params[PEERS] = jax.ShapeDtypeStruct((data, tensor, 1 + 2 * tensor), jnp.int32, sharding=sharding)
        return params

    def partition_specs(self) -> dict[str, PartitionSpec]:
        """How each parameter lies on a mesh."""
        specs = {name: self.context.rules.partition_spec(spec.axes) for name, spec in self.specs.items()}
        return specs if self.context.peer_all_reduce is None else {**specs, PEERS: PEERS_SPEC}

    def param_bytes(self) -> int:
        """Bytes of all parameters over all devices."""
        return sum(spec.size_bytes for spec in self.specs.values())

    def kv_cache_specs(self, dtype: str | None = None) -> list[KVCacheSpec]:
        """What each layer caches; ``dtype`` names the cache's element type, the compute type by default."""
        return self._module.kv_cache_specs(dtype)

    @property
    def has_latents(self) -> bool:
        """Whether its layers cache latents, instead of keys and values."""
        return self.kv_cache_specs()[0].is_latent

    @property
    def cache_backend(self) -> AttentionBackend | LatentBackend:
        """The backend whose layout its caches have."""
        return self.context.latent_backend if self.has_latents else self.context.backend

    def forward(
        self,
        params: Params,
        token_ids: jax.Array,
        positions: jax.Array,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
    ) -> tuple[jax.Array, list[KVCache]]:
        """``CausalLM.__call__`` as a pure function: ([T, M] hidden states, the updated caches)."""
        with _peers_of(params):
            return self._bind(params)(token_ids, positions, kv_caches, metadata)

    @property
    def has_experts(self) -> bool:
        """Whether ``expert_imbalance`` is to be had."""
        return isinstance(self._module, CountsExperts) and self._module.has_experts

    def forward_with_imbalance(
        self,
        params: Params,
        token_ids: jax.Array,
        positions: jax.Array,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
    ) -> tuple[jax.Array, list[KVCache], tuple[jax.Array, ...]]:
        """``forward``, and how unevenly experts were used: float32 [1] (``expert_imbalance``); () without experts."""
        if not self.has_experts:
            return *self.forward(params, token_ids, positions, kv_caches, metadata), ()
        module = self._bind(params)
        assert isinstance(module, CountsExperts)
        with _peers_of(params):
            hidden, kv_caches, loads = module.run(token_ids, positions, kv_caches, metadata)
        return hidden, kv_caches, (expert_imbalance(jnp.stack(loads), self.context),)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """``CausalLM.logits`` as a pure function: [R, M] to [R, V] float32. Those of ``head_params`` will do."""
        return self._bind(params).logits(hidden)

    def head_params(self) -> tuple[str, ...]:
        """Names of the params that ``logits`` reads."""
        params = self.abstract_params()
        hidden = jax.ShapeDtypeStruct((1, self.hidden_size), self.dtype)
        jaxpr = jax.make_jaxpr(self.logits)(params, hidden).jaxpr
        read = {id(value) for equation in jaxpr.eqns for value in equation.invars}
        return tuple(name for name, value in zip(sorted(params), jaxpr.invars) if id(value) in read)

    def _bind(self, params: Params) -> CausalLM:
        # What is not there is not read (``head_params``).
        leaves = [params.get(name, spec) for name, spec in self.specs.items()]
        return nnx.merge(self._graphdef, self._treedef.unflatten(leaves))


def build(
    config: Mapping[str, Any],
    backend: AttentionBackend,
    dtype: Any = jnp.bfloat16,
    tensor_parallel_size: int = 1,
    *,
    data_parallel_size: int = 1,
    expert_parallel: bool = False,
    sequence_parallel: bool = False,
    ragged_exchange: bool = False,
    rules: ShardingRules = DEFAULT_RULES,
    weight_first: bool = False,
    batch_invariant: bool = False,
    rms_norm: RMSNorm = PLAIN_NORM,
    kv_cache_dtype: Any = None,
    latent_backend: LatentBackend = BLOCKED_LATENTS,
    grouped_matmul: GroupedMatmul = PORTABLE,
    dense_matmul: DenseMatmul | None = None,
    split_heads: SplitHeads | None = None,
    add_norm: AddNorm | None = None,
    peer_all_reduce: AllReduce | None = None,
) -> Model:
    """Build a model from its config.json: no array is made.

    Args:
        config: HF-style config (``resolve_model(...).config``).
        backend: attention backend, static in the compiled step.
        dtype: compute type of weights and activations.
        tensor_parallel_size, data_parallel_size, expert_parallel, sequence_parallel, ragged_exchange: as
            ``LayerContext`` has them. On more than one device the model's functions run inside a ``shard_map`` over a
            mesh of these sizes.
        rules: logical to mesh axes.
        weight_first: multiply few tokens with the weight on the left: for CPUs.
        batch_invariant, rms_norm: as ``LayerContext`` has them.
        kv_cache_dtype: of cached keys and values; None is ``dtype``.
        latent_backend: what takes the place of ``backend`` in models that cache latents.
        grouped_matmul: of experts.
        dense_matmul: of everything else, where it can; None is XLA.
        split_heads, add_norm: as ``LayerContext`` has them.
        peer_all_reduce: as ``LayerContext`` has it; then the params have ``PEERS``.

    Raises:
        UnsupportedModelError: an architecture, or a feature of the config, that is not implemented.
        ConfigError: sizes that the model's heads, feed-forward or experts do not allow, or experts spread where there
            are none.
    """
    family = find_family(config)
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed")
        if method not in getattr(family, "QUANTIZATION_METHODS", ()):
            raise UnsupportedModelError(f"quantized checkpoints (quant_method {method!r}) are not supported.")
    scaled = kv_cache_dtype is not None and jnp.dtype(kv_cache_dtype) == FLOAT8
    context = LayerContext(
        np.dtype(dtype), backend, tensor_parallel_size, data_parallel_size, expert_parallel, sequence_parallel,
        rules.for_experts() if expert_parallel else rules, weight_first=weight_first, scaled_kv_cache=scaled,
        batch_invariant=batch_invariant, rms_norm=rms_norm,
        ragged_exchange=ragged_exchange, latent_backend=latent_backend, grouped_matmul=grouped_matmul,
        dense_matmul=dense_matmul, split_heads=split_heads, add_norm=add_norm, peer_all_reduce=peer_all_reduce,
    )  # fmt: skip
    module = family.create(config, context)
    graphdef, state = nnx.split(module)
    variables, treedef = jax.tree.flatten_with_path(state, is_leaf=_is_variable)
    specs = {_name(path): variable.get_metadata()["spec"] for path, variable in variables}
    if expert_parallel and not any("expert" in spec.axes for spec in specs.values()):
        named = ", ".join(config.get("architectures") or ["the model"])
        raise ConfigError(
            f"enable_expert_parallel: {named} has no experts; leave it out.", param="enable_expert_parallel"
        )
    leaves_treedef = jax.tree.structure(state)
    assert leaves_treedef.num_leaves == len(specs) == treedef.num_leaves
    return Model(
        specs=specs,
        weight_map=tuple(module.weight_map()),
        vocab_size=module.vocab_size,
        hidden_size=module.hidden_size,
        dtype=context.dtype,
        max_position_embeddings=module.max_position_embeddings,
        num_heads=module.num_heads,
        context=context,
        attention_options=module.attention_options,
        _module=module,
        _graphdef=graphdef,
        _treedef=leaves_treedef,
    )


def _peers_of(params: Params) -> AbstractContextManager[None]:
    peers = params.get(PEERS)
    return reaching(None if peers is None else peers.reshape(-1))


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


def _name(path: tuple[Any, ...]) -> str:
    """``layers.0.attention.qkv`` from a tree path; a module's only parameter goes by the module's name."""
    parts = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    return ".".join(parts).removesuffix(".weight")
