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
from jaxserve.runner.placement import BY_RANK, REPLICATED, Placement, cache_spec
from jaxserve.runner.program_store import ProgramStore
from jaxserve.runner.step_program import (
    PATCH_CHUNK,
    SCORE_CHUNK,
    DecodeBuffers,
    DeviceState,
    StepOutput,
    add_row_history,
    patch_block_tables,
    put_step_input,
    reset_rows,
    run_decode_step,
    run_step,
    score_prompt,
    set_row_bias,
    slice_hidden,
    take_sampled,
)
from jaxserve.sampling import state as sampler_state
from jaxserve.sampling.logprobs import LogprobArrays
from jaxserve.sampling.metadata import ALL_FEATURES, Feature
from jaxserve.sampling.sampler import SamplerOutput
from jaxserve.sampling.state import SamplerState, mask_words, state_shapes
from pallas_kernels.kv_cache_update.quantized import ScaledCache, abstract_cache

Abstract = jax.ShapeDtypeStruct
ONE_DEVICE = Placement()


@dataclass(frozen=True)
class ProgramShapes:
    """All sizes that the programs are compiled for, as one device of one rank has them."""

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
    num_ranks: int = 1
    """Data parallel ranks: every device holds what all of them sampled."""
    block_axis: int = 1
    """Of ``kv_cache_shapes``."""
    split_kv_heads: bool = True
    """Tensor-parallel devices hold other heads each, not the same latent."""
    has_experts: bool = False
    """The model has, and a step says how evenly they were used."""

    def state_specs(self) -> DeviceState:
        """How what lives on the devices lies on a mesh: a PartitionSpec for each leaf."""
        values = cache_spec(self.block_axis, split_heads=self.split_kv_heads)
        scales = cache_spec(0, split_heads=self.split_kv_heads)
        local = self.local_state()
        return DeviceState(
            kv_caches=[
                ScaledCache(values, scales) if isinstance(cache, ScaledCache) else values for cache in local.kv_caches
            ],
            block_tables=BY_RANK,
            sampler=jax.tree.map(lambda _: BY_RANK, local.sampler),
            decode=DecodeBuffers(BY_RANK, jax.tree.map(lambda _: REPLICATED, local.decode.sampled)),
        )  # fmt: skip

    def local_state(self) -> DeviceState:
        """Shapes of what lives on one device."""
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
        all_rows = self.num_ranks * self.decode_rows
        rows, top = (all_rows,), (all_rows, self.max_logprobs)
        logprobs = LogprobArrays(
            Abstract(rows, jnp.float32), Abstract(rows, jnp.int32), Abstract(top, jnp.int32), Abstract(top, jnp.float32)
        )  # fmt: skip
        imbalance = (Abstract((1,), jnp.float32),) if self.has_experts else ()
        return SamplerOutput(Abstract(rows, jnp.int32), logprobs, imbalance)


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
        state: shapes and shardings of what lives on the devices.
    """

    def __init__(
        self,
        model: Model,
        builder: BatchBuilder,
        shapes: ProgramShapes,
        variants: list[StepVariant],
        store: ProgramStore,
        placement: Placement = ONE_DEVICE,
    ) -> None:
        self.model, self.builder, self.shapes = model, builder, shapes
        self.variants, self.store, self.placement = variants, store, placement
        self._params = model.abstract_params(placement.mesh)
        self._param_specs = model.partition_specs()
        self._state_specs = shapes.state_specs()
        self.state = placement.abstract(shapes.local_state(), self._state_specs)
        self.compiled: dict[Any, Any] = {}

    def lower_step(self, variant: StepVariant) -> jax.stages.Lowered:
        """Trace and lower one step."""
        program, arguments = self.step(variant)
        return program.lower(*arguments)

    def step(self, variant: StepVariant) -> tuple[Any, tuple[Any, ...]]:
        """One step as a jitted function, and its abstract arguments: for whoever lowers it for another platform."""
        layout = self.builder.layouts[variant.bucket]
        options: dict[str, Any] = {
            "model": self.model, "layout": layout, "num_slots": self.shapes.num_blocks * self.shapes.block_size,
            "max_logprobs": self.shapes.max_logprobs, "features": variant.features,
        }  # fmt: skip
        specs = (self._param_specs, self._state_specs)
        if variant.fixed:
            step = partial(run_decode_step, **options)
            return self.placement.jit(step, specs, specs[1], donate=(1,)), (self._params, self.state)
        step = partial(run_step, **options, decode_only=variant.decode_only)
        program = self.placement.jit(
            step, (*specs, BY_RANK), (StepOutput(REPLICATED, BY_RANK), specs[1]), donate=(1,)
        )
        return program, (self._params, self.state, self._by_rank((layout.size,)))

    def _by_rank(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> Abstract:
        """An argument of which every rank has its own."""
        return self.placement.abstract(Abstract(shape, dtype), BY_RANK)

    def temporaries(self) -> int:
        """Bytes that the largest program needs beside its arguments."""

        def measure() -> int:
            analysis = self.lower_step(largest).compile().memory_analysis()
            outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            return analysis.temp_size_in_bytes + outputs

        largest = StepVariant(self.builder.table.buckets[-1])
        return self.store.remember(self.key(largest), measure)

    def key(self, program: object) -> tuple[object, ...]:
        """A program's key in the store, whose description covers the model and the device."""
        return (program, self.shapes, self.builder.max_num_seqs)

    def _lower_state_programs(self) -> dict[Any, Callable[[], jax.stages.Lowered]]:
        words = mask_words(self.shapes.vocab_size)
        bias = (sampler_state.MAX_LOGIT_BIAS,)
        one, history = (1,), (sampler_state.HISTORY_CHUNK,)
        lower = partial(self._lower_change, self._state_specs.sampler, self.state.sampler)
        lowerings: dict[Any, Callable[[], jax.stages.Lowered]] = {
            "reset_row": partial(lower, reset_rows, (one,)),
            "add_history": partial(lower, add_row_history, (one, history, one)),
            "set_bias_row": partial(
                lower, set_row_bias, (one, bias, bias), (jnp.int32, jnp.int32, jnp.float32)
            ),
        }
        for rows in sampler_state.MASK_ROWS:
            shapes = ((rows,), (rows, words))
            lowerings["set_mask_rows", rows] = partial(lower, sampler_state.set_mask_rows, shapes)
        patch = ((PATCH_CHUNK,),) * 3
        lowerings["patch"] = partial(
            self._lower_change, self._state_specs, self.state, patch_block_tables, patch
        )
        return lowerings | self._lower_decode_buffers(self.state.decode)

    def _lower_change(
        self,
        specs: Any,
        changed: Any,
        function: Callable[..., Any],
        shapes: tuple[tuple[int, ...], ...],
        dtypes: tuple[Any, ...] = (),
    ) -> jax.stages.Lowered:
        """Lower what changes a part of the state, which is donated, by arguments of these shapes (int32) a rank."""
        arguments = [
            self._by_rank(shape, dtype)
            for shape, dtype in zip(shapes, dtypes or (jnp.int32,) * len(shapes), strict=True)
        ]
        program = self.placement.jit(function, (specs, *(BY_RANK for _ in shapes)), specs, donate=(0,))
        return program.lower(changed, *arguments)

    def _lower_decode_buffers(self, buffers: DecodeBuffers) -> dict[Any, Callable[[], jax.stages.Lowered]]:
        """What moves a fixed decode step's input in and its output out, for each of their buckets."""
        lowerings: dict[Any, Callable[[], jax.stages.Lowered]] = {}
        for bucket in {variant.bucket: None for variant in self.variants if variant.fixed}:
            size = ((self.builder.layouts[bucket].size,),)
            lowerings["put_step_input", bucket.num_tokens] = partial(
                self._lower_change, BY_RANK, buffers.step_input, put_step_input, size
            )
            for with_logprobs in (False, True):
                rows = self.shapes.num_ranks * bucket.num_rows
                take = partial(take_sampled, num_rows=rows, with_logprobs=with_logprobs)
                program = self.placement.jit(take, (REPLICATED,), REPLICATED)
                key = ("take_sampled", bucket.num_tokens, with_logprobs)
                lowerings[key] = partial(program.lower, buffers.sampled)
        return lowerings

    def _lower_slice(self, bucket: Bucket) -> jax.stages.Lowered:
        program = self.placement.jit(slice_hidden, (BY_RANK, BY_RANK), BY_RANK)
        return program.lower(self._hidden(bucket.num_tokens), self._by_rank((1,)))

    def _lower_score(self) -> jax.stages.Lowered:
        score = partial(score_prompt, model=self.model, max_logprobs=self.shapes.max_logprobs)
        program = self.placement.jit(score, (self._param_specs, BY_RANK, BY_RANK), REPLICATED)
        return program.lower(self._params, self._hidden(SCORE_CHUNK), self._by_rank((SCORE_CHUNK,)))

    def _hidden(self, num_tokens: int) -> Abstract:
        return self._by_rank((num_tokens, self.model.hidden_size), self.model.dtype)

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
        keys = {key: self.key(key) for key in lowerings}
        compiled = compile_all({keys[key]: lower for key, lower in lowerings.items()}, self.store, progress)
        self.compiled = {key: compiled[stored] for key, stored in keys.items()}
