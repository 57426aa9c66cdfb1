"""StepPrograms: every compiled program of an engine, keyed by the bucket table, compiled before it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models import Model
from jaxserve.runner.batch_builder import BatchBuilder
from jaxserve.runner.buckets import Bucket, BucketTable
from jaxserve.runner.compilation import compile_all
from jaxserve.runner.program_store import ProgramStore
from jaxserve.runner.step_program import (
    PATCH_CHUNK,
    SCORE_CHUNK,
    DecodeBuffers,
    DeviceState,
    patch_block_tables,
    put_step_input,
    run_decode_step,
    run_step,
    score_prompt,
    slice_hidden,
    take_sampled,
)
from jaxserve.sampling import state as sampler_state
from jaxserve.sampling.logprobs import LogprobArrays
from jaxserve.sampling.metadata import ALL_FEATURES, Feature
from jaxserve.sampling.sampler import SamplerOutput
from jaxserve.sampling.state import SamplerState, mask_words, state_shapes
from pallas_kernels.kv_cache_update.quantized import abstract_cache

Abstract = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class ProgramShapes:
    """All sizes that the programs are compiled for."""

    max_num_seqs: int
    vocab_size: int
    max_logprobs: int
    num_blocks: int
    block_size: int
    max_blocks_per_row: int
    kv_cache_shapes: tuple[tuple[int, ...], ...]
    kv_cache_dtype: Any
    decode_input: int = 0
    """Elements of the largest input of a decode step with fixed addresses."""
    decode_rows: int = 0
    """Rows of the largest such step."""

    def abstract_state(self) -> DeviceState:
        """Shapes of what lives on the device."""
        return DeviceState(
            kv_caches=[
                abstract_cache(shape, self.kv_cache_dtype, self.num_blocks, self.block_size)
                for shape in self.kv_cache_shapes
            ],
            block_tables=Abstract((self.max_num_seqs, self.max_blocks_per_row), jnp.int32),
            sampler=SamplerState(**state_shapes(self.max_num_seqs, self.vocab_size)),
            decode=DecodeBuffers(Abstract((self.decode_input,), jnp.int32), self._sampled()),
        )

    def _sampled(self) -> SamplerOutput:
        rows, top = (self.decode_rows,), (self.decode_rows, self.max_logprobs)
        logprobs = LogprobArrays(
            Abstract(rows, jnp.float32), Abstract(rows, jnp.int32), Abstract(top, jnp.int32), Abstract(top, jnp.float32)
        )  # fmt: skip
        return SamplerOutput(Abstract(rows, jnp.int32), logprobs)

    def allocate_state(self) -> DeviceState:
        """Zeros in these shapes: uninitialised memory may hold NaN, which masking does not stop."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract_state())


@dataclass(frozen=True)
class StepVariant:
    """One step program: a bucket, with all that a step may hold or without what it need not.

    Args:
        bucket: its shape.
        features: what of the sampler it holds.
        decode_only: rows of one token alone.
        fixed: the decode step between fixed addresses (``run_decode_step``).
    """

    bucket: Bucket
    features: Feature = ALL_FEATURES
    decode_only: bool = False
    fixed: bool = False


DECODE_FEATURES = (ALL_FEATURES, Feature.TOP_K, Feature.NONE)
"""The samplers of decode steps: everything, which has branches; random with a top-k, and greedy, which have none."""


@dataclass(frozen=True)
class ProgramStyle:
    """How a platform's steps are cut into programs.

    Args:
        decode_programs: compile steps that only decode on their own, one for each of ``DECODE_FEATURES``. Accelerators
            gain from it: a branch costs them a round trip to the host. On CPUs one program serves all.
        fixed_addresses: those programs run between buffers that never move, which CUDA graphs gain from.
    """

    decode_programs: bool
    fixed_addresses: bool

    @classmethod
    def of(cls, platform: str) -> ProgramStyle:
        return cls(decode_programs=platform != "cpu", fixed_addresses=platform == "gpu")


def step_variants(table: BucketTable, style: ProgramStyle) -> list[StepVariant]:
    """Every step program, the largest first: they compile longest."""
    variants: list[StepVariant] = []
    for bucket in reversed(table.buckets):
        if bucket in table.decode:
            variants += [
                StepVariant(bucket, features, True, style.fixed_addresses) for features in DECODE_FEATURES
            ]
        if bucket in table.mixed:
            variants.append(StepVariant(bucket))
    return variants


class StepPrograms:
    """Lowers and compiles; afterwards a table of callables.

    Attributes:
        compiled: key -> program. Keys are the ``StepVariant``s; the names of what changes parts of ``DeviceState``
            (``reset_row``, ``patch`` and the like) and ``score``; ``("slice_hidden", T)``; and for fixed decode steps
            ``("put_step_input", T)`` and ``("take_sampled", T, with logprobs)``.
        store: where programs are kept between starts.
    """

    def __init__(
        self,
        model: Model,
        builder: BatchBuilder,
        shapes: ProgramShapes,
        params: Any,
        variants: list[StepVariant],
        store: ProgramStore,
    ) -> None:
        self.model, self.builder, self.shapes = model, builder, shapes
        self.variants, self.store = variants, store
        self._params = jax.tree.map(lambda x: Abstract(x.shape, x.dtype), params)
        self.compiled: dict[Any, Any] = {}

    def lower_step(self, variant: StepVariant) -> jax.stages.Lowered:
        """Trace and lower one step."""
        layout = self.builder.layouts[variant.bucket]
        options: dict[str, Any] = {
            "model": self.model, "layout": layout, "num_slots": self.shapes.num_blocks * self.shapes.block_size,
            "max_logprobs": self.shapes.max_logprobs, "features": variant.features,
        }  # fmt: skip
        state = self.shapes.abstract_state()
        if variant.fixed:
            step = partial(run_decode_step, **options)
            return jax.jit(step, donate_argnums=(1,)).lower(self._params, state)
        step = partial(run_step, **options, decode_only=variant.decode_only)
        return jax.jit(step, donate_argnums=(1,)).lower(
            self._params, state, Abstract((layout.size,), jnp.int32)
        )

    def temporaries(self) -> int:
        """Bytes that the largest program needs beside its arguments."""

        def measure() -> int:
            analysis = self.lower_step(largest).compile().memory_analysis()
            outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            return analysis.temp_size_in_bytes + outputs

        largest = StepVariant(self.builder.table.buckets[-1])
        return self.store.remember(self._key(largest), measure)

    def _key(self, program: object) -> tuple[object, ...]:
        """A program's key in the store, whose description covers the model and the device."""
        return (program, self.shapes, self.builder.max_num_seqs)

    def _lower_state_programs(self) -> dict[Any, Callable[[], jax.stages.Lowered]]:
        state = self.shapes.abstract_state()
        sampler = state.sampler
        scalar = Abstract((), jnp.int32)
        int32 = partial(Abstract, dtype=jnp.int32)
        words = mask_words(self.shapes.vocab_size)
        bias = sampler_state.MAX_LOGIT_BIAS
        history = int32((sampler_state.HISTORY_CHUNK,))
        arguments: dict[Any, tuple[Callable[..., Any], tuple[Abstract, ...]]] = {
            "reset_row": (sampler_state.reset_row, (scalar,)),
            "add_history": (sampler_state.add_history, (scalar, history, scalar)),
            "set_bias_row": (
                sampler_state.set_bias_row,
                (scalar, int32((bias,)), Abstract((bias,), jnp.float32)),
            ),
        }
        for rows in sampler_state.MASK_ROWS:
            masks = (int32((rows,)), int32((rows, words)))
            arguments["set_mask_rows", rows] = (sampler_state.set_mask_rows, masks)
        lowerings: dict[Any, Callable[[], jax.stages.Lowered]] = {
            name: partial(jax.jit(function, donate_argnums=(0,)).lower, sampler, *args)
            for name, (function, args) in arguments.items()
        }
        patch = int32((PATCH_CHUNK,))
        lowerings["patch"] = partial(
            jax.jit(patch_block_tables, donate_argnums=(0,)).lower, state, patch, patch, patch
        )
        return lowerings | self._lower_decode_buffers(state.decode)

    def _lower_decode_buffers(self, buffers: DecodeBuffers) -> dict[Any, Callable[[], jax.stages.Lowered]]:
        """What moves a fixed decode step's input in and its output out, for each of their buckets."""
        lowerings: dict[Any, Callable[[], jax.stages.Lowered]] = {}
        for bucket in {variant.bucket: None for variant in self.variants if variant.fixed}:
            size = Abstract((self.builder.layouts[bucket].size,), jnp.int32)
            put = jax.jit(put_step_input, donate_argnums=(0,))
            lowerings["put_step_input", bucket.num_tokens] = partial(put.lower, buffers.step_input, size)
            for with_logprobs in (False, True):
                take = jax.jit(partial(take_sampled, num_rows=bucket.num_rows, with_logprobs=with_logprobs))
                key = ("take_sampled", bucket.num_tokens, with_logprobs)
                lowerings[key] = partial(take.lower, buffers.sampled)
        return lowerings

    def _lower_slice(self, bucket: Bucket) -> jax.stages.Lowered:
        return jax.jit(slice_hidden).lower(self._hidden(bucket.num_tokens), Abstract((), jnp.int32))

    def _lower_score(self) -> jax.stages.Lowered:
        score = partial(score_prompt, model=self.model, max_logprobs=self.shapes.max_logprobs)
        return jax.jit(score).lower(
            self._params, self._hidden(SCORE_CHUNK), Abstract((SCORE_CHUNK,), jnp.int32)
        )

    def _hidden(self, num_tokens: int) -> Abstract:
        return Abstract((num_tokens, self.model.hidden_size), self.model.dtype)

    def choose(self, bucket: Bucket, *, features: Feature, decode_only: bool) -> StepVariant:
        """The most special program that can run a step.

        Args:
            bucket: the step's.
            features: what its rows ask of the sampler.
            decode_only: all of its rows have one token.
        """
        if decode_only and bucket in self.builder.table.decode:
            held = next(held for held in reversed(DECODE_FEATURES) if not features & ~held)
            return StepVariant(bucket, held, True, self.shapes.decode_rows > 0)
        return StepVariant(bucket)

    def run(
        self, variant: StepVariant, params: Any, state: DeviceState, buffer: jax.Array, *, with_logprobs: bool
    ) -> tuple[SamplerOutput, jax.Array | None, DeviceState]:
        """Dispatch a step.

        Args:
            variant: of ``choose``.
            params: the weights.
            state: donated.
            buffer: the packed input.
            with_logprobs: whether anybody will read the logprobs.

        Returns:
            what was sampled, the hidden states (None for a fixed decode step), the new state.
        """
        program = self.compiled[variant]
        if not variant.fixed:
            output, state = program(params, state, buffer)
            return output.sampled, output.hidden, state
        size = variant.bucket.num_tokens
        step_input = self.compiled["put_step_input", size](state.decode.step_input, buffer)
        state = program(params, replace(state, decode=DecodeBuffers(step_input, state.decode.sampled)))
        return self.compiled["take_sampled", size, with_logprobs](state.decode.sampled), None, state

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile everything in the table."""
        lowerings: dict[Any, Callable[[], jax.stages.Lowered]] = {}
        for variant in self.variants:
            lowerings[variant] = partial(self.lower_step, variant)
        for bucket in {variant.bucket: None for variant in self.variants if not variant.fixed}:
            lowerings["slice_hidden", bucket.num_tokens] = partial(self._lower_slice, bucket)
        lowerings["score"] = self._lower_score
        lowerings |= self._lower_state_programs()
        keys = {key: self._key(key) for key in lowerings}
        compiled = compile_all({keys[key]: lower for key, lower in lowerings.items()}, self.store, progress)
        self.compiled = {key: compiled[stored] for key, stored in keys.items()}
