"""StepPrograms: every compiled program of an engine, keyed by the bucket table, compiled before it serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models import Model
from jaxserve.runner.batch_builder import BatchBuilder
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.burst_program import run_burst
from jaxserve.runner.compilation import Compilation
from jaxserve.runner.invariance import CompilerOptions
from jaxserve.runner.placement import BY_RANK, REPLICATED, Placement, cache_spec
from jaxserve.runner.program_store import ProgramStore
from jaxserve.runner.program_variants import (
    FEWEST_LOGITS,
    SAMPLERS,
    BurstVariant,
    HeadVariant,
    StepVariant,
    head_variants,
)
from jaxserve.runner.step_program import (
    PATCH_CHUNK,
    SCORE_CHUNK,
    DeviceState,
    StepBuffers,
    StepOutput,
    add_row_history,
    patch_block_tables,
    put_step_input,
    reset_rows,
    run_forward,
    run_head,
    run_step,
    score_prompt,
    set_row_bias,
    slice_hidden,
)
from jaxserve.sampling import state as sampler_state
from jaxserve.sampling.metadata import ALL_FEATURES, Feature
from jaxserve.sampling.sampler import SamplerOutput
from jaxserve.sampling.state import SamplerState, mask_words, state_shapes
from pallas_kernels.kv_cache_update.quantized import ScaledCache, abstract_cache

Abstract = jax.ShapeDtypeStruct
ONE_DEVICE = Placement()


SPARE = 1
"""Elements of the buffers between a step's programs that no step writes. A buffer that is overwritten whole has no use
for what it held before: then it is not donated, so it moves; and XLA's partitioner (jax 0.11.2) crashes over it."""


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
    fixed_input: int = 0
    """Elements of the largest input of a step between fixed addresses; 0: no steps are."""
    fixed_tokens: int = 0
    """Tokens of the largest such step that may hold prompts."""
    fixed_rows: int = 0
    """Rows of the largest such step."""
    fixed_burst: int = 0
    """Tokens of the largest burst between fixed addresses."""
    hidden_size: int = 0
    """M; and ``dtype``, the hidden states' element type: of steps between fixed addresses."""
    dtype: Any = jnp.float32
    num_ranks: int = 1
    """Data parallel ranks: every device holds what all of them sampled."""
    block_axis: int = 1
    """Of ``kv_cache_shapes``."""
    split_kv_heads: bool = True
    """Tensor-parallel devices hold other heads each, not the same latent."""
    has_experts: bool = False
    """The model has, and a step says how evenly they were used."""

    @property
    def fixed(self) -> bool:
        """Steps are programs between fixed addresses."""
        return self.fixed_input > 0

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
            buffers=StepBuffers(
                BY_RANK, BY_RANK, BY_RANK, (REPLICATED,) * len(local.buffers.expert_imbalance), BY_RANK
            ),
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
            buffers=self._buffers(),
        )

    def _buffers(self) -> StepBuffers:
        spare = SPARE if self.fixed else 0
        imbalance = (Abstract((1 + spare,), jnp.float32),) if self.fixed and self.has_experts else ()
        return StepBuffers(
            step_input=Abstract((self.fixed_input + spare,), jnp.int32),
            hidden=Abstract((self.fixed_tokens + spare, self.hidden_size), self.dtype),
            last=Abstract((self.fixed_rows + spare, self.hidden_size), self.dtype),
            expert_imbalance=imbalance,
            token_ids=Abstract((self.fixed_burst + spare,), jnp.int32),
        )


LARGE_PRODUCTS = 256
"""Rows of products from which on ``LIBRARY_PRODUCTS`` holds."""
LIBRARY_PRODUCTS: CompilerOptions = (("xla_gpu_enable_triton_gemm", False),)
"""For large products on a GPU. XLA would compile dozens of its own for each, time them beside cuBLAS' and find none
that is faster. So are those of the logits, for any number of rows but one."""
UNTUNED: CompilerOptions = (("xla_gpu_autotune_level", 0),)
"""For the whole sampler and for scores, on a GPU: a hundred small kernels, of which XLA would compile several each to
find the fastest, in programs that few requests ask for. Logits take cuBLAS' first choice; they wait for memory anyway.
"""


class StepPrograms:
    """Lowers and compiles; afterwards a table of callables.

    Args:
        large_options: the compiler's, for programs whose products have ``LARGE_PRODUCTS`` rows or more, or are logits.
        untuned_options: further ones, for programs whose speed matters less than that of compiling them.
        bursts: further programs, of several decode steps.

    Attributes:
        compiled: key -> program. Keys are the ``StepVariant``s, ``HeadVariant``s and ``BurstVariant``s; the names of
            what changes parts of ``DeviceState`` (``reset_row``, ``patch`` and the like) and ``score``;
            ``("slice_hidden", T)``; and for fixed steps ``("put_step_input", elements)``.
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
        large_options: CompilerOptions = (),
        untuned_options: CompilerOptions = (),
        bursts: Sequence[BurstVariant] = (),
    ) -> None:
        self.bursts = bursts
        self._bursts = {(burst.bucket, burst.features): burst for burst in bursts}
        self.model, self.builder, self.shapes = model, builder, shapes
        self.variants, self.store, self.placement = variants, store, placement
        self.heads = head_variants(variants)
        self._large_options, self._untuned_options = large_options, untuned_options
        self._params = model.abstract_params(placement.mesh)
        self._param_specs = model.partition_specs()
        self._head_params = model.head_params() if self.heads else ()
        self._state_specs = shapes.state_specs()
        self.state = placement.abstract(shapes.local_state(), self._state_specs)
        self.compiled: dict[Any, Any] = {}
        self._making: Compilation | None = None
        self._options: dict[tuple[Bucket, int, bool], tuple[StepVariant, list[HeadVariant]]] = {}
        """What ``choose`` chooses from: it follows from the table alone."""

    def lower_step(self, variant: StepVariant) -> jax.stages.Lowered:
        """Trace and lower one step."""
        program, arguments = self.step(variant)
        return program.lower(*arguments)

    def step(self, variant: StepVariant) -> tuple[Any, tuple[Any, ...]]:
        """One step as a jitted function, and its abstract arguments: for whoever lowers it for another platform."""
        layout = self.builder.layouts[variant.bucket]
        options: dict[str, Any] = {
            "model": self.model, "layout": layout, "num_slots": self.shapes.num_blocks * self.shapes.block_size,
            "decode_only": variant.decode_only,
        }  # fmt: skip
        specs, state = self._state_specs, self.state
        if variant.fixed:
            changed = (specs.kv_caches, specs.block_tables, specs.buffers)
            program = self._placement(variant.bucket.num_tokens).jit(
                partial(run_forward, **options), (self._param_specs, *changed, specs.sampler.last_token_ids), changed,
                donate=(1, 2, 3),
            )  # fmt: skip
            arguments = (state.kv_caches, state.block_tables, state.buffers, state.sampler.last_token_ids)
            return program, (self._params, *arguments)
        step = partial(run_step, **options, max_logprobs=self.shapes.max_logprobs, features=variant.features)
        program = self.placement.jit(
            step, (self._param_specs, specs, BY_RANK), (StepOutput(REPLICATED, BY_RANK), specs), donate=(1,)
        )
        return program, (self._params, state, self._by_rank((layout.size,)))

    def lower_burst(self, variant: BurstVariant) -> jax.stages.Lowered:
        """Trace and lower one program of several decode steps."""
        layout = self.builder.burst_layouts[variant.bucket]
        burst = partial(
            run_burst, model=self.model, layout=layout, num_slots=self.shapes.num_blocks * self.shapes.block_size,
            decode_only=variant.decode_only, features=variant.features,
            fewest_logits=FEWEST_LOGITS if variant.fixed else 1,
        )  # fmt: skip
        specs, results = self._state_specs, (REPLICATED, self._state_specs)
        if variant.fixed:
            program = self.placement.jit(
                partial(burst, buffer=None), (self._param_specs, specs), results, donate=(1,)
            )
            return program.lower(self._params, self.state)
        program = self.placement.jit(burst, (self._param_specs, specs, BY_RANK), results, donate=(1,))
        return program.lower(self._params, self.state, self._by_rank((layout.size,)))

    def lower_head(self, variant: HeadVariant) -> jax.stages.Lowered:
        """Trace and lower the second half of a step."""
        head = partial(
            run_head, model=self.model, num_rows=variant.num_rows, max_logprobs=self.shapes.max_logprobs,
            features=variant.features,
        )  # fmt: skip
        specs = self._state_specs
        tuned = variant.features != ALL_FEATURES
        program = self._placement(LARGE_PRODUCTS, tuned=tuned).jit(
            head, (self.head_params(self._param_specs), specs.sampler, specs.buffers), (REPLICATED, specs.sampler),
            donate=(1,),
        )  # fmt: skip
        return program.lower(self.head_params(self._params), self.state.sampler, self.state.buffers)

    def _placement(self, num_rows: int, *, tuned: bool = True) -> Placement:
        """For a program whose products have so many rows, and whose kernels shall be the fastest."""
        options = self._large_options if num_rows >= LARGE_PRODUCTS else ()
        if not tuned:
            options = (*options, *self._untuned_options)
        return replace(self.placement, compiler_options=(*self.placement.compiler_options, *options))

    def head_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """Those of the params that heads take."""
        return {name: params[name] for name in self._head_params}

    def _by_rank(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> Abstract:
        """An argument of which every rank has its own."""
        return self.placement.abstract(Abstract(shape, dtype), BY_RANK)

    def temporaries(self, estimate: int | None) -> int:
        """Bytes that the largest program needs beside its arguments: remembered, or else estimated, or else measured.

        Measuring takes a compilation, for which all others would wait.
        """

        def measure() -> int:
            return _temporaries(self.lower_step(self.largest).compile()) if estimate is None else estimate

        return self.store.remember(self.key(self.largest), measure)

    def lacking(self, given: int) -> int | None:
        """What the largest programs need, once they are compiled, if it is more than ``given`` bytes; None if not."""
        needed = max(_temporaries(self.compiled[key]) for key in (self.largest, *self.heads[:1]))
        return needed if needed > given else None

    @property
    def largest(self) -> StepVariant:
        """The step program that needs most memory."""
        return next(variant for variant in self.variants if not variant.decode_only)

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
        layouts = [self.builder.layouts[each.bucket] for each in self.variants if each.fixed]
        layouts += [self.builder.burst_layouts[each.bucket] for each in self.bursts if each.fixed]
        for size in {layout.size: None for layout in layouts}:
            lowerings["put_step_input", size] = partial(
                self._lower_change, BY_RANK, self.state.buffers.step_input, put_step_input, ((size,),)
            )
        return lowerings

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

    def _lower_slice(self, num_tokens: int) -> jax.stages.Lowered:
        program = self.placement.jit(slice_hidden, (BY_RANK, BY_RANK), BY_RANK)
        return program.lower(self._hidden(num_tokens), self._by_rank((1,)))

    def _lower_score(self) -> jax.stages.Lowered:
        score = partial(score_prompt, model=self.model, max_logprobs=self.shapes.max_logprobs)
        program = self._placement(LARGE_PRODUCTS, tuned=False).jit(
            score, (self._param_specs, BY_RANK, BY_RANK), REPLICATED
        )
        return program.lower(self._params, self._hidden(SCORE_CHUNK), self._by_rank((SCORE_CHUNK,)))

    def _hidden(self, num_tokens: int) -> Abstract:
        return self._by_rank((num_tokens, self.model.hidden_size), self.model.dtype)

    def choose(
        self, bucket: Bucket, num_rows: int, *, features: int, decode_only: bool
    ) -> tuple[StepVariant, HeadVariant | None]:
        """The most special programs that can run a step.

        Args:
            bucket: the step's.
            num_rows: rows that there really are, of the rank that has most.
            features: what its rows ask of the sampler (``Feature``).
            decode_only: all of its rows have one token.
        """
        key = (bucket, int(features), decode_only)
        options = self._options.get(key)
        if options is None:
            options = self._options[key] = self._programs_for(*key)
        step, heads = options
        return step, next((head for head in heads if head.num_rows >= num_rows), None)

    def _programs_for(
        self, bucket: Bucket, features: int, decode_only: bool
    ) -> tuple[StepVariant, list[HeadVariant]]:
        """The step's program, and the heads that may follow it in ascending order of rows."""
        decode_only = decode_only and bucket in self.builder.table.decode
        held = next(held for held in reversed(SAMPLERS) if not features & ~held)
        if self.heads:
            heads = sorted(
                (head for head in self.heads if head.features == held), key=lambda head: head.num_rows
            )
            return StepVariant(bucket, Feature.NONE, decode_only, True), heads
        return StepVariant(bucket, held if decode_only else ALL_FEATURES, decode_only), []

    def run(
        self,
        step: StepVariant,
        head: HeadVariant | None,
        params: Any,
        state: DeviceState,
        buffer: jax.Array | np.ndarray,
    ) -> tuple[SamplerOutput, jax.Array, DeviceState]:
        """Dispatch a step.

        Args:
            step, head: of ``choose``.
            params: the weights.
            state: donated.
            buffer: the packed input.

        Returns:
            what was sampled, hidden states of the tokens (of more tokens than the step has, maybe), the new state.
        """
        program = self.compiled[step]
        if head is None:
            output, state = program(params, state, buffer)
            return output.sampled, output.hidden, state
        size = self.builder.layouts[step.bucket].size
        step_input = self.compiled["put_step_input", size](state.buffers.step_input, buffer)
        buffers = replace(state.buffers, step_input=step_input)
        kv_caches, tables, buffers = program(
            params, state.kv_caches, state.block_tables, buffers, state.sampler.last_token_ids
        )
        sampled, sampler = self.compiled[head](self.head_params(params), state.sampler, buffers)
        return sampled, buffers.hidden, DeviceState(kv_caches, tables, sampler, buffers)

    def choose_burst(self, bucket: Bucket, features: Feature) -> BurstVariant:
        """The program that runs a burst.

        Args:
            bucket: of its steps.
            features: what its rows ask of the sampler.
        """
        return self._bursts[bucket, features]

    def run_burst(
        self, burst: BurstVariant, params: Any, state: DeviceState, buffer: jax.Array | np.ndarray
    ) -> tuple[SamplerOutput, DeviceState]:
        """Dispatch a burst; ``run`` says the rest."""
        program = self.compiled[burst]
        if not burst.fixed:
            return program(params, state, buffer)
        size = self.builder.burst_layouts[burst.bucket].size
        step_input = self.compiled["put_step_input", size](state.buffers.step_input, buffer)
        return program(params, replace(state, buffers=replace(state.buffers, step_input=step_input)))

    def lower(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Begin to load what is stored and to lower the rest, on threads; ``compile`` or ``abandon`` ends it."""
        lowerings = {self.key(key): lower for key, lower in self._lowerings().items()}
        self._making = Compilation(lowerings, self.store, progress, lambda key: key[0])

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile everything in the table.

        Args:
            progress: called with (programs ready, programs in all), if ``lower`` was not told of one before.
        """
        try:
            if self._making is None:
                self.lower(progress)
            assert self._making is not None
            compiled = self._making.result()
        except BaseException:
            self.abandon()
            raise
        self._making = None
        self.compiled = {key[0]: program for key, program in compiled.items()}

    def abandon(self) -> None:
        """End what ``lower`` began."""
        if self._making is not None:
            self._making.cancel()
            self._making = None

    def _lowerings(self) -> dict[Any, Callable[[], jax.stages.Lowered]]:
        """What lowers each program. Those that compile longest come first."""
        lowerings: dict[Any, Callable[[], jax.stages.Lowered]] = {}
        for variant in self.variants:
            lowerings[variant] = partial(self.lower_step, variant)
        for burst in self.bursts:
            lowerings[burst] = partial(self.lower_burst, burst)
        for head in self.heads:
            lowerings[head] = partial(self.lower_head, head)
        whole = {variant.bucket.num_tokens for variant in self.variants if not variant.fixed}
        for num_tokens in sorted(whole) or [self.shapes.fixed_tokens + SPARE]:
            lowerings["slice_hidden", num_tokens] = partial(self._lower_slice, num_tokens)
        lowerings["score"] = self._lower_score
        return lowerings | self._lower_state_programs()


def _temporaries(program: jax.stages.Compiled) -> int:
    """Bytes that it needs beside its arguments."""
    analysis = program.memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
