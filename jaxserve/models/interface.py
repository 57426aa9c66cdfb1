"""What a causal language model is to the rest of jaxserve, and what a family's module must define."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from jaxserve.kv_cache_spec import KVCacheSpec
from jaxserve.layers.params import LayerContext
from jaxserve.weights.weight_map import WeightSource
from pallas_kernels.dispatch import AttentionMetadata, AttentionOptions
from pallas_kernels.kv_cache_update.quantized import KVCache


@runtime_checkable
class CausalLM(Protocol):
    """An nnx.Module whose parameters are declared by ParamSpecs (``LayerContext.param``)."""

    vocab_size: int
    """V: width of the logits."""
    hidden_size: int
    """M."""
    max_position_embeddings: int
    """Longest context the model was made for, in tokens."""
    num_heads: int
    """H, over all devices."""
    attention_options: frozenset[AttentionOptions]
    """Those of its layers, each once: what a backend must be able to do."""

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
    ) -> tuple[jax.Array, list[KVCache]]:
        """One step over T tokens.

        Args:
            token_ids: [T] int32, in the vocabulary (padding tokens too).
            positions: [T] int32 position of each token in its row; 0 for padding.
            kv_caches: one a layer, in the attention backend's layout.
            metadata: the ragged batch.

        Returns:
            ([T, M] hidden states ready for ``logits``, the updated caches).
        """
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[R, V] float32 scores of hidden states [R, M]."""
        ...

    def kv_cache_specs(self, dtype: str | None = None) -> list[KVCacheSpec]:
        """What each layer caches; ``dtype`` names the cache's element type, the compute type by default."""
        ...

    def weight_map(self) -> list[WeightSource]:
        """Every checkpoint tensor the model needs, by its Hugging Face name, and where it goes."""
        ...


@runtime_checkable
class CountsExperts(Protocol):
    """What a ``CausalLM`` is besides, if it has experts and says how evenly tokens met them."""

    has_experts: bool
    """Whether it has."""

    def run(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
    ) -> tuple[jax.Array, list[KVCache], list[jax.Array]]:
        """``CausalLM.__call__``, and of each layer with experts int32 [E]: the tokens that each of them got, of this
        rank's."""
        ...


class ModelFamily(Protocol):
    """A module of ``jaxserve.models``: discovered by the registry, named in no list."""

    ARCHITECTURES: tuple[str, ...]
    """The ``architectures`` entries of config.json that this family implements. A module may also define
    ``QUANTIZATION_METHODS``, the ``quant_method`` of quantized checkpoints that it reads."""

    def create(self, config: Mapping[str, Any], context: LayerContext) -> CausalLM:
        """Build the model, abstract, from a config.json.

        Raises:
            UnsupportedModelError: naming a feature of the config that is not implemented.
        """
        ...
