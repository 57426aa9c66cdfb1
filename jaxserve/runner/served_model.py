"""ServedModel: an engine's model on the best kernels its devices have, and the types it computes in. No array is made.

Which kernels can serve a model depends on its heads, so it is built twice: on the attention that runs everywhere, which
tells the sizes, and again on the device's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.kv_cache_spec import KVCacheSpec
from jaxserve.layers.moe import expert_products
from jaxserve.models import Model, build
from jaxserve.runner.device_kernels import DeviceKernels
from jaxserve.runner.invariance import Invariance
from jaxserve.runner.kv_arrays import bytes_per_block
from jaxserve.runner.placement import Placement
from pallas_kernels.dispatch import AttentionBackend, AttentionSizes, BlockedBackend
from pallas_kernels.kv_cache_update.quantized import FLOAT8
from pallas_kernels.mla_attention.dispatch import LatentBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """A model and what of it the rest of the runner goes by.

    Args:
        hf_config: config.json with the user's overrides.
        model: on ``backend``.
        backend: its attention.
        why_no_kernels: why that is not the device's own; None if it is.
        specs: what each layer that attends keeps, as one device has it.
        dtype: of activations.
        cache_dtype: of the KV cache.
        block_size: tokens of its blocks.
    """

    hf_config: dict[str, Any]
    model: Model
    backend: AttentionBackend | LatentBackend
    why_no_kernels: str | None
    specs: list[KVCacheSpec]
    dtype: Any
    cache_dtype: Any
    block_size: int

    @property
    def experts_per_token(self) -> int:
        """1 without experts."""
        return int(self.hf_config.get("num_experts_per_tok") or 1)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes on one device, over all layers."""
        return bytes_per_block(self.specs, self.block_size, self.backend)


@dataclass(frozen=True)
class ModelBuilder:
    """Builds a ``ServedModel``.

    Args:
        config: with the platform's defaults filled in.
        placement: where it is served.
        kernels: what the devices offer.
        invariance: what is done so that outputs depend on their requests alone.
    """

    config: EngineConfig
    placement: Placement
    kernels: DeviceKernels
    invariance: Invariance

    def build(self, hf_config: dict[str, Any]) -> ServedModel:
        """Choose the types, build the model, and choose its kernels.

        Args:
            hf_config: config.json with the user's overrides.

        Raises:
            ConfigError, UnsupportedModelError: the model cannot be had like this.
        """
        block_size, asked = self.config.cache_config.block_size, self.config.cache_config.kv_cache_dtype
        assert block_size is not None
        dtype = self._compute_dtype(hf_config)
        cache_dtype = dtype if asked == "auto" else cache_type(asked)
        make = self._recipe(hf_config, dtype, cache_dtype)
        model = self._portable(make)
        self._tell_of_experts(model, dtype)
        devices = self.config.parallel_config.tensor_parallel_size
        specs = [spec.on_one_of(devices) for spec in model.kv_cache_specs(cache_dtype.name)]
        if model.has_latents:
            backend, why_not = self._latent_attention(model)
        else:
            sizes = AttentionSizes(
                num_heads=model.num_heads // devices,
                num_kv_heads=specs[0].num_kv_heads,
                head_size=specs[0].head_size,
                block_size=block_size,
                dtype=dtype,
                kv_dtype=cache_dtype,
            )
            backend, why_not = self._attention(model, sizes)
            if not isinstance(backend, BlockedBackend):
                model = make(backend, rms_norm=self.invariance.rms_norm(backend))
        self._check_length(model)
        return ServedModel(hf_config, model, backend, why_not, specs, dtype, cache_dtype, block_size)

    def _compute_dtype(self, hf_config: dict[str, Any]) -> Any:
        name = self.config.model_config.dtype
        if name == "auto":
            if self.kernels.platform == "cpu":
                return jnp.dtype("float32")  # XLA's bfloat16 products are several times slower on CPUs
            name = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16")
        return jnp.dtype(name)

    def _recipe(self, hf_config: dict[str, Any], dtype: Any, cache_dtype: Any) -> Callable[..., Model]:
        """What makes the model, all but its attention and norm."""
        parallel, kernels, invariance = self.config.parallel_config, self.kernels, self.invariance
        return partial(
            build, hf_config, dtype=dtype, kv_cache_dtype=cache_dtype,
            tensor_parallel_size=parallel.tensor_parallel_size, data_parallel_size=parallel.data_parallel_size,
            expert_parallel=parallel.enable_expert_parallel, sequence_parallel=parallel.sequence_parallel,
            ragged_exchange=kernels.platform != "cpu", latent_backend=kernels.latent_attention()[0],
            grouped_matmul=kernels.grouped_matmul()[0], dense_matmul=invariance.dense_matmul(kernels.dense_matmul()),
            peer_all_reduce=kernels.peer_all_reduce(self.placement.mesh),
            split_heads=None if invariance.enabled else kernels.split_heads(),
            add_norm=None if invariance.enabled else kernels.add_norm(), batch_invariant=invariance.enabled,
        )  # fmt: skip

    def _portable(self, make: Callable[..., Model]) -> Model:
        """The model on the attention that runs everywhere."""
        invariant = self.invariance.enabled
        # Weights come first for few tokens only, and so would change the order of summation with their number.
        first = self.kernels.platform == "cpu" and not invariant
        blocked = BlockedBackend(fixed_order=invariant)
        return make(blocked, weight_first=first, rms_norm=self.invariance.rms_norm(blocked))

    def _latent_attention(self, model: Model) -> tuple[LatentBackend, str | None]:
        backend, why_not = self.kernels.latent_attention()
        self._check_invariance(model, backend, why_not)
        if why_not is not None:
            logger.warning("Attention takes the portable path, which is slower: %s.", why_not)
        return backend, why_not

    def _attention(self, model: Model, sizes: AttentionSizes) -> tuple[AttentionBackend, str | None]:
        backend, why_not = self.kernels.attention(sizes, model.attention_options)
        self._check_invariance(model, backend, why_not)
        if why_not is not None:
            self._refuse_cache_type(replace(sizes, kv_dtype=sizes.dtype), model, why_not)
            logger.warning("Attention takes the portable path, which is slower: %s", why_not)
        return backend, why_not

    def _check_invariance(
        self, model: Model, backend: AttentionBackend | LatentBackend, why_no_kernels: str | None
    ) -> None:
        """Refuse ``batch_invariant`` where it would be asked for in vain."""
        if not self.invariance.enabled:
            return
        devices = self.config.parallel_config.num_devices
        if (why_not := self.invariance.why_not(model, backend, why_no_kernels, devices)) is not None:
            raise ConfigError(why_not, param="batch_invariant")
        if self.config.scheduler_config.max_num_batched_tokens == 1:
            raise ConfigError(
                "batch_invariant needs steps of at least 2 tokens; raise max_num_batched_tokens from 1.",
                param="max_num_batched_tokens",
            )

    def _refuse_cache_type(self, sizes: AttentionSizes, model: Model, why_not: str) -> None:
        """Refuse a cache type which alone keeps the model off its device's kernels: it would be silently slow.

        Args:
            sizes: as they would be with the default type.
            model: what asks.
            why_not: the reason.
        """
        asked = self.config.cache_config.kv_cache_dtype
        if asked != "auto" and self.kernels.attention(sizes, model.attention_options)[1] is None:
            raise ConfigError(
                f"kv_cache_dtype is {asked!r}, and {why_not} The default, 'auto', has kernels here.",
                param="kv_cache_dtype",
            )

    def _tell_of_experts(self, model: Model, dtype: Any) -> None:
        """Log which products of experts are left to the portable path, and why."""
        products = expert_products(model.specs.values(), self.placement.mesh, model.context.rules)
        if not products:
            return
        kernel, why_not = self.kernels.grouped_matmul()
        reasons = {kernel.why_not(*product, dtype) for product in products} | {why_not}
        for reason in sorted(filter(None, reasons)):
            logger.warning("Experts take the portable path, which is slower: %s", reason)

    def _check_length(self, model: Model) -> None:
        asked, longest = self.config.model_config.max_model_len, model.max_position_embeddings
        if isinstance(asked, int) and asked > longest:
            raise ConfigError(
                f"max_model_len is {asked}, but the model was made for {longest} tokens. Lower it.",
                param="max_model_len",
            )


def cache_type(name: str) -> Any:
    """The element type that ``kv_cache_dtype`` names: vLLM's fp8 is e4m3."""
    return FLOAT8 if name in ("fp8", "fp8_e4m3") else jnp.dtype(name)
