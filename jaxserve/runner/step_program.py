"""The jitted programs of a model: the step, and the small ones that keep the device's state. All shapes are fixed.

What lives on the device between steps is ``DeviceState``; it is donated to every program that changes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.layers.params import DATA_AXIS, TENSOR_AXIS
from jaxserve.models import Model
from jaxserve.runner.step_layout import StepLayout, split_head
from jaxserve.sampling.logprobs import LogprobArrays, compute_logprobs
from jaxserve.sampling.metadata import ALL_FEATURES, Feature, SamplingMetadata, make_table
from jaxserve.sampling.sampler import SamplerOutput, sample
from jaxserve.sampling.state import SamplerState, add_history, reset_row, set_bias_row
from jaxserve.sampling.vocab_parallel import VocabParallel
from pallas_kernels.dispatch import AttentionMetadata
from pallas_kernels.kv_cache_update.quantized import KVCache

PATCH_CHUNK = 1024
"""Block table entries that one ``patch_block_tables`` call sets."""
SCORE_CHUNK = 64
"""Prompt positions that one ``score_prompt`` call scores."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBuffers:
    """What the programs of a step between fixed addresses leave for each other: see ``run_forward``.

    T and R are the largest step's. Where a step is one program, all of them are empty.
    """

    step_input: jax.Array
    """int32[the largest layout]: the packed host input."""
    hidden: jax.Array
    """[T, M]: hidden states of the last step that held prompts, which prompt scoring reads."""
    last: jax.Array
    """[R, M]: those of each row's last token."""
    expert_imbalance: tuple[jax.Array, ...]
    """As ``SamplerOutput`` has it."""
    token_ids: jax.Array
    """int32[the largest burst's]: what its steps sampled so far."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """KV caches (one a layer), block tables int32 [S, B], what the sampler remembers, buffers within a step."""

    kv_caches: list[KVCache]
    block_tables: jax.Array
    sampler: SamplerState
    buffers: StepBuffers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """Per batch row of all ranks what was sampled, and this rank's hidden states [T, M], which prompt scoring reads."""

    sampled: SamplerOutput
    hidden: jax.Array


def set_block_tables(tables: jax.Array, rows: jax.Array, columns: jax.Array, blocks: jax.Array) -> jax.Array:
    """Set entries (row, column) of [S, B] to block ids; rows out of range are dropped."""
    return tables.at[rows, columns].set(blocks, mode="drop")


def patch_tables(tables: jax.Array, fields: dict[str, jax.Array]) -> jax.Array:
    """The block tables with the entries that came with a step's input."""
    return set_block_tables(tables, fields["patch_rows"], fields["patch_columns"], fields["patch_blocks"])


def attention_metadata(
    fields: dict[str, jax.Array], tables: jax.Array, layout: StepLayout, num_slots: int, decode_only: bool
) -> AttentionMetadata:
    """Per-token and per-row index arrays from the few numbers the host sends."""
    num_tokens, num_rows = layout.bucket.num_tokens, layout.bucket.num_rows
    starts = fields["query_start_loc"]
    computed = fields["num_computed_tokens"]
    token_index = jnp.arange(num_tokens, dtype=jnp.int32)
    if decode_only:
        row_ids = token_index
    else:
        row_ids = jnp.sum(token_index[:, None] >= starts[None, 1:], axis=1, dtype=jnp.int32)
        row_ids = jnp.minimum(row_ids, num_rows - 1)
    live = token_index < starts[-1]
    positions = jnp.where(live, token_index - starts[row_ids] + computed[row_ids], 0)
    block_tables = tables.at[fields["row_index"]].get(mode="fill", fill_value=0)
    blocks = block_tables[row_ids, positions // layout.block_size]
    slots = blocks * layout.block_size + positions % layout.block_size
    return AttentionMetadata(
        seq_lens=jnp.where(starts[1:] > starts[:-1], computed + starts[1:] - starts[:-1], 0),
        block_tables=block_tables,
        query_start_loc=starts,
        distribution=fields["distribution"],
        slot_mapping=jnp.where(live, slots, num_slots),
        positions=positions,
        row_ids=row_ids,
        decode_only=decode_only,
    )


def vocab_parallel(model: Model) -> VocabParallel | None:
    """How the model's logits are split; None: they are not."""
    devices = model.context.tensor_parallel_size
    return None if devices == 1 else VocabParallel(model.vocab_size, devices, TENSOR_AXIS)


def gather_ranks(values: Any, model: Model) -> Any:
    """What each data parallel rank found, rank after rank, on every device: the host reads any of them."""
    if model.context.data_parallel_size == 1:
        return values
    return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, DATA_AXIS, tiled=True), values)


@dataclass(frozen=True)
class Forward:
    """What a step has before it samples."""

    fields: dict[str, jax.Array]
    """The host's input."""
    kv_caches: list[KVCache]
    block_tables: jax.Array
    hidden: jax.Array
    """[T, M]."""
    last: jax.Array
    """[R, M]: of each row's last token."""
    expert_imbalance: tuple[jax.Array, ...]


def forward(
    params: dict[str, jax.Array], kv_caches: list[KVCache], block_tables: jax.Array, last_token_ids: jax.Array,
    buffer: jax.Array, *, model: Model, layout: StepLayout, num_slots: int, decode_only: bool,
) -> Forward:  # fmt: skip
    """Embed and layers; the arguments are those of ``run_step``, with the parts of its state."""
    fields = layout.split(buffer)
    return forward_fields(
        params, kv_caches, patch_tables(block_tables, fields), last_token_ids, fields, model=model, layout=layout,
        num_slots=num_slots, decode_only=decode_only,
    )  # fmt: skip


def forward_fields(
    params: dict[str, jax.Array], kv_caches: list[KVCache], tables: jax.Array, last_token_ids: jax.Array,
    fields: dict[str, jax.Array], *, model: Model, layout: StepLayout, num_slots: int, decode_only: bool,
) -> Forward:  # fmt: skip
    """``forward`` of an input that is split already, with block tables that have its entries."""
    metadata = attention_metadata(fields, tables, layout, num_slots, decode_only)
    last_sampled = last_token_ids[fields["row_index"][metadata.row_ids]]
    token_ids = jnp.where(fields["token_ids"] < 0, last_sampled, fields["token_ids"])
    hidden, kv_caches, imbalance = model.forward_with_imbalance(
        params, token_ids, metadata.positions, kv_caches, metadata
    )
    last = hidden if decode_only else hidden[jnp.maximum(fields["query_start_loc"][1:] - 1, 0)]
    return Forward(fields, kv_caches, tables, hidden, last, imbalance)


def sample_rows(
    params: dict[str, jax.Array], sampler: SamplerState, last: jax.Array, sampling: SamplingMetadata, *, model: Model,
    max_logprobs: int, features: Feature,
) -> tuple[SamplerOutput, SamplerState]:  # fmt: skip
    """Logits of the hidden states ``last`` [R, M], and a token for each: of all ranks."""
    logits = model.logits(params, last)
    split = vocab_parallel(model)
    sampler_of = sample if split is None else split.sample
    sampled, sampler = sampler_of(logits, sampling, sampler, max_logprobs=max_logprobs, features=features)
    return gather_ranks(sampled, model), sampler


def run_step(
    params: dict[str, jax.Array],
    state: DeviceState,
    buffer: jax.Array,
    *,
    model: Model,
    layout: StepLayout,
    num_slots: int,
    max_logprobs: int,
    features: Feature = ALL_FEATURES,
    decode_only: bool = False,
) -> tuple[StepOutput, DeviceState]:
    """One whole step: embed, layers, logits of each row's last token, sampling. Of one rank, on one device.

    Args:
        params: the model's weights.
        state: donated.
        buffer: the packed host input, int32 [layout.size].
        model, layout: of this program.
        num_slots: slots of the cache (num_blocks * block_size): the first out-of-range one.
        max_logprobs: most likely tokens listed a row.
        features: what of the sampler to compile (``sample``).
        decode_only: compile for rows of one token alone.
    """
    computed = forward(
        params, state.kv_caches, state.block_tables, state.sampler.last_token_ids, buffer, model=model, layout=layout,
        num_slots=num_slots, decode_only=decode_only,
    )  # fmt: skip
    fields = computed.fields
    sampling = SamplingMetadata.from_packed(fields["sampling"], fields["step_features"][0])
    sampled, sampler = sample_rows(
        params,
        state.sampler,
        computed.last,
        sampling,
        model=model,
        max_logprobs=max_logprobs,
        features=features,
    )
    sampled = replace(sampled, expert_imbalance=computed.expert_imbalance)
    return StepOutput(sampled, computed.hidden), DeviceState(
        computed.kv_caches, computed.block_tables, sampler, state.buffers
    )


def run_forward(
    params: dict[str, jax.Array],
    kv_caches: list[KVCache],
    block_tables: jax.Array,
    buffers: StepBuffers,
    last_token_ids: jax.Array,
    *,
    model: Model,
    layout: StepLayout,
    num_slots: int,
    decode_only: bool,
) -> tuple[list[KVCache], jax.Array, StepBuffers]:
    """The first half of a step whose second is ``run_head``, between buffers that never move.

    A GPU runs a program's kernels as one CUDA graph, and has to rewrite that graph, which takes a millisecond, when
    the address of any argument or result is another one than last time. Here all of them but the weights are donated,
    hence stay where they are: ``put_step_input`` writes the input before, the head reads what is left in the buffers.

    Two programs and not one, because the halves vary by different things: layers by a step's tokens, the sampler by
    rows and by what they ask for. So each is compiled once, no sampler needs a branch that it could do without, which
    would make the host wait for the device, and the few results of the head may lie anywhere.

    Args:
        kv_caches, block_tables, buffers: donated.
        last_token_ids: the sampler's.
    """
    computed = forward(
        params, kv_caches, block_tables, last_token_ids, buffers.step_input[: layout.size], model=model, layout=layout,
        num_slots=num_slots, decode_only=decode_only,
    )  # fmt: skip
    # A bare copy would be one on another stream; zeroing what is padding makes it a kernel like the others.
    live = jnp.arange(layout.bucket.num_tokens) < computed.fields["query_start_loc"][-1]
    hidden = jnp.where(live[:, None], computed.hidden, 0)
    kept = replace(
        buffers,
        hidden=buffers.hidden if decode_only else _overwrite(buffers.hidden, hidden),
        last=_overwrite(buffers.last, hidden if decode_only else computed.last),
        expert_imbalance=tuple(map(_overwrite, buffers.expert_imbalance, computed.expert_imbalance)),
    )
    return computed.kv_caches, computed.block_tables, kept


def run_head(
    params: dict[str, jax.Array],
    sampler: SamplerState,
    buffers: StepBuffers,
    *,
    model: Model,
    num_rows: int,
    max_logprobs: int,
    features: Feature,
) -> tuple[SamplerOutput, SamplerState]:
    """The second half of a step: logits and sampling of what ``run_forward`` left.

    Args:
        params: those of the logits (``Model.head_params``).
        sampler: donated.
        buffers: read.
        num_rows: as many as the step has at least.
        max_logprobs, features: as ``run_step`` has them.

    Returns:
        what was sampled, without log probabilities where the sampler knows of none, and the sampler's state.
    """
    step_features, bucket_rows, table = split_head(buffers.step_input, num_rows)
    inside = jnp.arange(num_rows)[:, None] < bucket_rows
    padding = jnp.asarray(make_table(sampler.max_num_seqs)[-1])
    sampling = SamplingMetadata.from_packed(jnp.where(inside, table, padding), step_features[0])
    sampled, sampler = sample_rows(
        params,
        sampler,
        buffers.last[:num_rows],
        sampling,
        model=model,
        max_logprobs=max_logprobs,
        features=features,
    )
    if not features & Feature.LOGPROBS:
        sampled = replace(sampled, logprobs=None)
    return replace(sampled, expert_imbalance=tuple(each[:1] for each in buffers.expert_imbalance)), sampler


def put_step_input(step_input: jax.Array, buffer: jax.Array) -> jax.Array:
    """The next step's packed input, int32 [layout.size], into its place (donated)."""
    return _overwrite(step_input, buffer)


def _overwrite(buffer: jax.Array, values: jax.Array) -> jax.Array:
    """``buffer`` with ``values`` as its first rows."""
    return jax.lax.dynamic_update_slice_in_dim(buffer, values.astype(buffer.dtype), 0, axis=0)


def patch_block_tables(
    state: DeviceState, rows: jax.Array, columns: jax.Array, blocks: jax.Array
) -> DeviceState:
    """Set block table entries ahead of a step that brings more than its buffer holds. int32 [PATCH_CHUNK] each."""
    return replace(state, block_tables=set_block_tables(state.block_tables, rows, columns, blocks))


def reset_rows(state: SamplerState, row: jax.Array) -> SamplerState:
    """``reset_row``. Like all that a rank is told, the row comes as an array, int32[1]."""
    return reset_row(state, row[0])


def add_row_history(
    state: SamplerState, row: jax.Array, token_ids: jax.Array, is_output: jax.Array
) -> SamplerState:
    """``add_history`` with int32[1] for its scalars."""
    return add_history(state, row[0], token_ids, is_output[0])


def set_row_bias(state: SamplerState, row: jax.Array, ids: jax.Array, values: jax.Array) -> SamplerState:
    """``set_bias_row`` with int32[1] for its scalar."""
    return set_bias_row(state, row[0], ids, values)


def slice_hidden(hidden: jax.Array, start: jax.Array) -> jax.Array:
    """[T, M] -> the SCORE_CHUNK states from ``start`` (int32[1]); positions past the end repeat the last one."""
    index = jnp.minimum(start[0] + jnp.arange(SCORE_CHUNK), hidden.shape[0] - 1)
    return hidden[index]


def score_prompt(
    params: dict[str, jax.Array], hidden: jax.Array, token_ids: jax.Array, *, model: Model, max_logprobs: int
) -> LogprobArrays:
    """Log probabilities of the prompt tokens that follow SCORE_CHUNK positions of each rank."""
    split = vocab_parallel(model)
    score = compute_logprobs if split is None else split.logprobs
    return gather_ranks(score(model.logits(params, hidden), token_ids, max_logprobs), model)
