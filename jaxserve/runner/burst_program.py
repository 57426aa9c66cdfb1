"""run_burst: several decode steps as one program, for which the host is asked once.

The program loops over the steps: what one samples, the next one computes. The loop's body is compiled once, however
many steps there are. All that it changes is donated state, so that a CUDA graph of it plays between fixed addresses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models import Model
from jaxserve.runner.step_layout import FROM_DEVICE, StepLayout
from jaxserve.runner.step_program import DeviceState, forward_fields, patch_tables, sample_rows
from jaxserve.sampling.metadata import COLUMN, Feature, SamplingMetadata, make_table
from jaxserve.sampling.sampler import SamplerOutput

BURST_SAMPLERS = (Feature.RANDOM, Feature.TOP_K, Feature.NONE)
"""What programs of bursts hold of the sampler; none of them has a branch."""


def run_burst(
    params: dict[str, jax.Array],
    state: DeviceState,
    buffer: jax.Array | None,
    *,
    model: Model,
    layout: StepLayout,
    num_slots: int,
    decode_only: bool,
    features: Feature,
    fewest_logits: int = 1,
) -> tuple[SamplerOutput, DeviceState]:
    """``layout.num_steps`` decode steps.

    Args:
        params: the model's weights.
        state: donated.
        buffer: the packed host input, int32 [layout.size]; None: it is in ``state.buffers.step_input``.
        model, layout, num_slots, decode_only: as ``run_step`` has them.
        features: one of ``BURST_SAMPLERS``.
        fewest_logits: rows of logits at least.

    Returns:
        tokens as int32 [steps * R], those of a step together; without log probabilities, and with the last step's
        imbalance of experts.
    """
    fixed = buffer is None
    fields = layout.split(state.buffers.step_input[: layout.size] if buffer is None else buffer)
    num_rows, num_steps = layout.bucket.num_rows, layout.num_steps
    tables = patch_tables(state.block_tables, fields)
    token_ids = state.buffers.token_ids if fixed else jnp.zeros(num_steps * num_rows, jnp.int32)
    num_logits = max(num_rows, fewest_logits)

    def step(index: jax.Array, carry: Any) -> Any:
        kv_caches, sampler, token_ids, _ = carry
        now = fields_at(fields, index)
        computed = forward_fields(
            params, kv_caches, tables, sampler.last_token_ids, now, model=model, layout=layout, num_slots=num_slots,
            decode_only=decode_only,
        )  # fmt: skip
        rows = [(0, num_logits - num_rows), (0, 0)]
        live = jnp.arange(num_logits)[:, None] < fields["live_rows"][index]
        table = jnp.where(live, jnp.pad(now["sampling"], rows), make_table(sampler.max_num_seqs)[-1])
        sampling = SamplingMetadata.from_packed(table, fields["step_features"][0])
        sampled, sampler = sample_rows(
            params,
            sampler,
            jnp.pad(computed.last, rows),
            sampling,
            model=model,
            max_logprobs=0,
            features=features,
        )
        token_ids = jax.lax.dynamic_update_slice(token_ids, sampled.token_ids[:num_rows], (index * num_rows,))
        return computed.kv_caches, sampler, token_ids, computed.expert_imbalance

    imbalance = (jnp.zeros(1, jnp.float32),) if model.has_experts else ()
    carry = (state.kv_caches, state.sampler, token_ids, imbalance)
    kv_caches, sampler, token_ids, imbalance = jax.lax.fori_loop(0, num_steps, step, carry)
    # Not a bare copy, which would be one on another stream.
    sampled = SamplerOutput(jnp.maximum(token_ids[: num_steps * num_rows], -1), None, imbalance)
    buffers = replace(state.buffers, token_ids=token_ids) if fixed else state.buffers
    return sampled, DeviceState(kv_caches, tables, sampler, buffers)


def fields_at(fields: dict[str, jax.Array], index: jax.Array) -> dict[str, jax.Array]:
    """The host's input of a burst, as the host would have sent it for its step ``index`` alone.

    The rows that still take part come first, so the others become padding.
    """
    live = fields["live_rows"][index]
    return fields | {
        "query_start_loc": jnp.minimum(fields["query_start_loc"], live),
        "distribution": jnp.minimum(fields["distribution"], live),
        "num_computed_tokens": fields["num_computed_tokens"] + index,
        "token_ids": jnp.where(index == 0, fields["token_ids"], FROM_DEVICE),
        "sampling": fields["sampling"].at[:, COLUMN["positions"]].add(index),
    }
