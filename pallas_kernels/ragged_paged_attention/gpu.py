"""The attention backend for Hopper GPUs: cache write, decode and prefill kernels behind the one contract.

A decode-only step is one kernel per layer (``gpu_decode``, which also writes the cache). A mixed step is three: the
cache write, the decoding rows, the others (``gpu_prefill``). How the work is cut is computed once per step, on the
device (``prepare``), and serves every layer with the same options.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu  # stored programs need its runtime, and tracing nothing imports nothing
import jax.numpy as jnp

from pallas_kernels.hopper import multiprocessors
from pallas_kernels.kv_cache_update.gpu import kv_cache_update
from pallas_kernels.kv_cache_update.quantized import (
    FLOAT8,
    INT8,
    KVCache,
    ScaledCache,
    quantize_tokens,
    scatter_scales,
    to_cache_type,
    values_of,
)
from pallas_kernels.ragged_paged_attention.gpu_decode import decode_attention
from pallas_kernels.ragged_paged_attention.gpu_decode_plan import (
    DecodeConfig,
    DecodePlan,
    columns_of,
    plan_decode,
)
from pallas_kernels.ragged_paged_attention.gpu_prefill import prefill_attention
from pallas_kernels.ragged_paged_attention.gpu_prefill_plan import (
    PrefillConfig,
    PrefillPlan,
    plan_prefill,
    tile_shape,
)
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.options import AttentionOptions

FIRST_JAX = (0, 11)
"""Mosaic GPU of earlier versions lacks references as kernel operands and transposed swizzled tiles."""

PORTABLE = "the portable path (backend 'blocked', plain XLA) serves it"


def device_why_not(device: jax.Device | None = None) -> str | None:
    """None where the kernels run on ``device`` (the first one), else why not."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < FIRST_JAX:
        return (
            f"the Hopper kernels need jax >= 0.11 (Python >= 3.12), this is jax {jax.__version__}; {PORTABLE}"
        )
    device = device or jax.devices()[0]
    if device.platform != "gpu":
        return f"the Hopper kernels need an NVIDIA GPU, this device is {device.platform!r}; {PORTABLE}"
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != "9.0":
        return f"the Hopper kernels need compute capability 9.0, {device.device_kind} has {capability}; {PORTABLE}"
    return None


def supported(
    head_size: int, group: int, block_size: int, dtype: Any, options: AttentionOptions, kv_dtype: Any = None
) -> str | None:
    """None where the kernels compute this, else why not and what does."""
    name = jnp.dtype(dtype).name
    if name not in ("bfloat16", "float16"):
        return f"the Hopper kernels take bfloat16 or float16, not {name}; {PORTABLE}"
    kv_name = name if kv_dtype is None else jnp.dtype(kv_dtype).name
    if kv_name not in (name, FLOAT8.name, INT8.name):
        return (
            f"the Hopper kernels read a cache of the queries' type, float8 or int8, not {kv_name}: "
            f"set --kv-cache-dtype to auto, fp8 or int8; {PORTABLE}"
        )
    if not 1 <= head_size <= 256:
        return f"the Hopper kernels take head sizes to 256, not {head_size}; {PORTABLE}"
    if kv_name == INT8.name and head_size > 192:
        return (
            f"the Hopper kernels lack the shared memory for an int8 cache of head size {head_size} (at most 192): "
            f"set --kv-cache-dtype to fp8; {PORTABLE}"
        )
    if not 1 <= group <= 16:
        return f"the Hopper kernels take 1 to 16 query heads per KV head, not {group}; {PORTABLE}"
    if block_size not in (8, 16, 32, 64, 128, 256):
        return (
            f"the Hopper kernels take block sizes 8, 16, 32, 64, 128 and 256, not {block_size}: "
            f"set --block-size to one of them; {PORTABLE}"
        )
    if not (options.scale > 0 and math.isfinite(options.scale)):
        return f"the Hopper kernels take a positive softmax scale, not {options.scale}; {PORTABLE}"
    return None


def stored_head_size(head_size: int) -> int:
    """Head size in the cache: the next multiple of 64, zeros behind. 80 and 96 are stored as 128."""
    return -(-head_size // 64) * 64


@functools.cache
def _tuning() -> dict[str, dict[str, dict[str, Any]]]:
    file = resources.files("pallas_kernels.ragged_paged_attention") / "gpu_tuning.json"
    return json.loads(file.read_text())


def _tuned(
    kernel: str,
    head_size: int,
    columns: int | None = None,
    block_size: int | None = None,
    *,
    narrow: bool = False,
) -> dict[str, int]:
    """The table's most particular entry.

    Args:
        kernel: ``decode`` or ``prefill``.
        columns, block_size: of decode's scores and of the cache; None where they do not matter or are not known.
        narrow: the cache has one byte an element.
    """
    size = stored_head_size(head_size)
    keys = [f"{size}/narrow"] * narrow + [f"{size}/{columns}/{block_size}", str(size)]
    entry = next(_tuning()[kernel][key] for key in keys if key in _tuning()[kernel])
    return {key: value for key, value in entry.items() if key != "source"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GpuPlan:
    """How one step's work is cut; made by ``prepare``. ``prefill`` is None in a decode-only step."""

    decode: DecodePlan
    prefill: PrefillPlan | None


@dataclass(frozen=True)
class GpuBackend:
    """Mosaic GPU kernels for Hopper. Stateless; static in the compiled step.

    Args:
        num_sms: multiprocessors to fill; None asks the first device.
        decode, prefill: configurations, where the tuning table's are not wanted.
        interpret: ``plgpu.InterpretGPUParams`` to run on a CPU, for tests.
    """

    num_sms: int | None = None
    decode: DecodeConfig | None = None
    prefill: PrefillConfig | None = None
    interpret: Any = None

    name = "mosaic_gpu"
    separate_paths = True

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Keys, then values: [2, num_blocks, K, block_size, stored head size]. Fill it with zeros or anything."""
        return (2, num_blocks, num_kv_heads, block_size, stored_head_size(head_size))

    def block_axis(self) -> int:
        return 1

    def prepare(
        self,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        *,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        kv_cache: KVCache | None = None,
    ) -> GpuPlan:
        """Cut one step's work, for every layer with these heads and this window.

        Call it once in the jitted step and hand it to each layer's ``update_and_attend``. It holds a reference
        (``jax.new_ref``), so it stays inside that step.

        Args:
            num_tokens: T of the step.
            num_heads, num_kv_heads, head_size: of the layer (on this device).
            kv_cache: its cache, of which shape and type matter; None costs every decode kernel a microsecond or so as
                it starts.
        """
        group = num_heads // num_kv_heads
        values = None if kv_cache is None else values_of(kv_cache)
        block_size = None if values is None else values.shape[3]
        narrow = values is not None and values.dtype.itemsize == 1
        decode = plan_decode(
            metadata,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            sliding_window=options.sliding_window,
            num_sms=self._num_sms(),
            config=self._decode(head_size, group, block_size, narrow),
        )
        decode = replace(decode, counters=jax.new_ref(decode.counters))
        if metadata.decode_only:
            return GpuPlan(decode=decode, prefill=None)
        prefill = plan_prefill(
            metadata,
            group=group,
            num_tokens=max(num_tokens, tile_shape(group).tokens_per_cta),
            sliding_window=options.sliding_window,
            config=self._prefill(head_size, narrow),
        )
        return GpuPlan(decode=decode, prefill=prefill)

    def update_and_attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
        plan: GpuPlan | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Write the new keys and values, then attend.

        Args:
            q: [T, H, D]; k, v: [T, K, D].
            kv_cache: of ``kv_cache_shape``, in q's type, float8, or int8 with its scales; changed in place where
                it is donated.
            metadata: the step's batch, rows ordered decode first.
            options: scale, window, soft cap.
            sinks: [H] extra logits of the softmax's denominator.
            plan: of ``prepare``, with the same options; None makes one for this layer alone.

        Returns:
            ([T, H, D], the updated cache). Padding tokens write nothing; their output is zero.

        Raises:
            ValueError: what the kernels cannot do (see ``supported``).
        """
        head_size, stored = q.shape[2], values_of(kv_cache).shape[4]
        group, block_size = q.shape[1] // k.shape[1], values_of(kv_cache).shape[3]
        reason = supported(head_size, group, block_size, q.dtype, options, values_of(kv_cache).dtype)
        if reason is not None:
            raise ValueError(reason)
        if plan is None:
            plan = self.prepare(
                metadata,
                options,
                num_tokens=q.shape[0],
                num_heads=q.shape[1],
                num_kv_heads=k.shape[1],
                head_size=head_size,
                kv_cache=kv_cache,
            )
        if stored != head_size:
            q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, stored - head_size))) for x in (q, k, v))
        scales, values = None, values_of(kv_cache)
        if isinstance(kv_cache, ScaledCache):
            (k, k_scales), (v, v_scales) = quantize_tokens(k), quantize_tokens(v)
            new = jnp.stack([k_scales, v_scales], axis=1)
            scales = scatter_scales(kv_cache.scales, new, metadata.slot_mapping)
        else:
            k, v = (to_cache_type(x, values.dtype) for x in (k, v))
        attend = self._decode_step if plan.prefill is None else self._mixed_step
        out, values = attend(q, k, v, values, metadata, options, sinks, plan, scales)
        return out[:, :, :head_size], values if scales is None else ScaledCache(values, scales)

    @functools.partial(jax.jit, static_argnums=(0, 6))
    def _decode_step(
        self, q: jax.Array, k: jax.Array, v: jax.Array, kv_cache: jax.Array, metadata: AttentionMetadata,
        options: AttentionOptions, sinks: jax.Array | None, plan: GpuPlan, scales: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        cache = jax.new_ref(kv_cache)
        out = decode_attention(
            q, k, v, cache, metadata, plan.decode, options, sinks, scales=scales, interpret=self.interpret
        )
        assert out is not None
        return out, jax.freeze(cache)

    @functools.partial(jax.jit, static_argnums=(0, 6))
    def _mixed_step(
        self, q: jax.Array, k: jax.Array, v: jax.Array, kv_cache: jax.Array, metadata: AttentionMetadata,
        options: AttentionOptions, sinks: jax.Array | None, plan: GpuPlan, scales: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        num_tokens, num_heads, _ = q.shape
        assert plan.prefill is not None
        least = tile_shape(num_heads // k.shape[1]).tokens_per_cta
        q = jnp.pad(q, ((0, max(least - num_tokens, 0)), (0, 0), (0, 0)))
        cache, out = jax.new_ref(kv_cache), jax.new_ref(jnp.empty(q.shape, q.dtype))
        num_sms = self._num_sms()
        live = metadata.query_start_loc[-1:]
        kv_cache_update(cache, k, v, metadata.slot_mapping, live, num_sms=num_sms, interpret=self.interpret)
        decode_attention(
            q, k, v, cache, metadata, plan.decode, options, sinks, out=out, scales=scales,
            interpret=self.interpret,
        )  # fmt: skip
        prefill_attention(
            q, cache, metadata, plan.prefill, options, sinks, out, num_sms=num_sms, scales=scales,
            interpret=self.interpret,
        )  # fmt: skip
        return jax.freeze(out)[:num_tokens], jax.freeze(cache)

    def _num_sms(self) -> int:
        return multiprocessors(self.num_sms)

    def _decode(self, head_size: int, group: int, block_size: int | None, narrow: bool) -> DecodeConfig:
        tuned = _tuned("decode", head_size, columns_of(group), block_size, narrow=narrow)
        return self.decode or DecodeConfig(**tuned)

    def _prefill(self, head_size: int, narrow: bool) -> PrefillConfig:
        return self.prefill or PrefillConfig(**_tuned("prefill", head_size, narrow=narrow))
