"""Running a model over one sequence, in chunks, with a paged cache: what the runner does, in small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models import Model
from jaxserve.runner.placement import Placement, cache_spec
from pallas_kernels.dispatch import AttentionMetadata, AttentionOptions
from pallas_kernels.kv_cache_update.quantized import abstract_cache
from pallas_kernels.kv_cache_update.reference import kv_cache_update
from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention

BLOCK_SIZE = 8


class OracleBackend:
    """The float32 oracles as an attention backend."""

    name = "oracle"

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_size)

    def block_axis(self) -> int:
        return 1

    def prepare(self, metadata: AttentionMetadata, options: AttentionOptions, **sizes: Any) -> None:
        return None

    def update_and_attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv_cache: jax.Array,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
        plan: None = None,
    ) -> tuple[jax.Array, jax.Array]:
        kv_cache = kv_cache_update(kv_cache, k, v, metadata.slot_mapping)
        out = ragged_paged_attention(
            q,
            kv_cache,
            metadata,
            scale=options.scale,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            sinks=sinks,
        )
        return out, kv_cache


def one_row_metadata(start: int, num_tokens: int, padded: int, num_blocks: int) -> AttentionMetadata:
    """The batch of one row's tokens from ``start`` on, in blocks 1, 2, …, padded to T tokens."""
    live = np.arange(padded) < num_tokens
    positions = np.where(live, start + np.arange(padded), 0)
    out_of_range = (num_blocks + 1) * BLOCK_SIZE
    slots = np.where(live, positions + BLOCK_SIZE, out_of_range)
    decodes = int(num_tokens == 1)

    def array(values: object) -> jax.Array:
        return jnp.asarray(values, jnp.int32)

    return AttentionMetadata(
        seq_lens=array([start + num_tokens]),
        block_tables=array([np.arange(1, num_blocks + 1)]),
        query_start_loc=array([0, num_tokens]),
        distribution=array([decodes, decodes, 1]),
        slot_mapping=array(slots),
        positions=array(positions),
        row_ids=array(np.zeros(padded)),
    )


def _never_written(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    poison = jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 99
    return jnp.full(leaf.shape, poison, leaf.dtype)


def sequence_logits(
    model: Model,
    params: dict[str, jax.Array],
    token_ids: Sequence[int],
    chunks: Sequence[int],
    cache_dtype: object,
    mesh: Mesh | None = None,
) -> np.ndarray:
    """Logits [len(token_ids), V] of one sequence, in chunks of these lengths, padded to the longest."""
    assert sum(chunks) == len(token_ids)
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    shapes = [
        abstract_cache(
            model.cache_backend.kv_cache_shape(num_blocks + 1, BLOCK_SIZE, spec.num_kv_heads, spec.head_size),
            cache_dtype,
            num_blocks + 1,
            BLOCK_SIZE,
        )
        for spec in model.kv_cache_specs()
    ]
    caches = jax.tree.map(_never_written, shapes)

    step, _ = model_step(model, mesh)
    start, padded, parts = 0, max(chunks), []
    for length in chunks:
        tokens = np.zeros(padded, np.int32)
        tokens[:length] = token_ids[start : start + length]
        logits, caches = step(params, tokens, caches, one_row_metadata(start, length, padded, num_blocks))
        parts.append(np.asarray(logits)[:length])
        start += length
    return np.concatenate(parts)


def model_step(model: Model, mesh: Mesh | None):
    """The model as a jitted step over a mesh of tensor-parallel devices, and how its caches lie."""
    split = cache_spec(model.cache_backend.block_axis(), split_heads=not model.has_latents)
    specs = [split] * len(model.kv_cache_specs())

    def step(params, tokens, caches, metadata):
        hidden, caches = model.forward(params, tokens, metadata.positions, caches, metadata)
        return model.logits(params, hidden), caches

    in_specs = (model.partition_specs(), PartitionSpec(), specs, PartitionSpec())
    program = Placement(mesh).jit(step, in_specs, (PartitionSpec(None, "model"), specs))

    def run(*args):
        logits, caches = program(*args)
        return logits[:, : model.vocab_size], caches

    run.lower = program.lower
    return run, specs


def abstract_step(model: Model, mesh: Mesh, num_tokens: int):
    """A step and its abstract arguments over a mesh: what ahead-of-time compilation takes."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    step, specs = model_step(model, mesh)
    caches = [
        jax.ShapeDtypeStruct(
            model.cache_backend.kv_cache_shape(num_blocks + 1, BLOCK_SIZE, spec.num_kv_heads, spec.head_size),
            spec.dtype,
            sharding=NamedSharding(mesh, split),
        )
        for spec, split in zip(model.kv_cache_specs(), specs)
    ]
    whole = NamedSharding(mesh, PartitionSpec())
    metadata = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
        one_row_metadata(0, num_tokens, num_tokens, num_blocks),
    )
    tokens = jax.ShapeDtypeStruct((num_tokens,), jnp.int32, sharding=whole)
    return step, (model.abstract_params(mesh), tokens, caches, metadata)
