"""EnginePrograms: which programs an engine has, and all sizes that they are compiled for but those of its cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from jaxserve.config import EngineConfig
from jaxserve.runner.batch_builder import BatchBuilder
from jaxserve.runner.buckets import BucketTable
from jaxserve.runner.bursts import choose_bursts
from jaxserve.runner.invariance import CompilerOptions, Invariance
from jaxserve.runner.placement import Placement
from jaxserve.runner.program_store import ProgramStore
from jaxserve.runner.program_variants import (
    FEWEST_LOGITS,
    BurstVariant,
    ProgramStyle,
    burst_variants,
    step_variants,
)
from jaxserve.runner.programs import LIBRARY_PRODUCTS, UNTUNED, ProgramShapes, StepPrograms
from jaxserve.runner.served_model import ServedModel
from jaxserve.runner.step_layout import head_size
from jaxserve.runner.weight_traffic import weight_bytes_read
from jaxserve.step import BurstLimits


class EnginePrograms:
    """Cuts an engine's steps into programs, and makes those for a cache once its size is known.

    Args:
        config: with the platform's defaults filled in.
        served: the model.
        placement: where it is served.
        invariance: what is done so that outputs depend on their requests alone.
        open_store: from ``description`` to where programs are kept between starts.

    Attributes:
        style: how steps are cut.
        builder: the bucket table of the platform, and what packs batches for it.
    """

    def __init__(
        self,
        config: EngineConfig,
        served: ServedModel,
        placement: Placement,
        invariance: Invariance,
        open_store: Callable[[str], ProgramStore],
    ) -> None:
        self.served, self.placement = served, placement
        self.style = ProgramStyle.of(invariance.platform)
        self._config, self._invariance, self._open_store = config, invariance, open_store
        self.builder = self._make_builder()

    def for_cache(self, num_blocks: int, max_model_len: int) -> StepPrograms:
        """All programs, none of them lowered yet.

        Args:
            num_blocks: of a rank's cache, the dummy included.
            max_model_len: tokens of the longest request.
        """
        variants = step_variants(self.builder.table, self.style)
        bursts = burst_variants(self.builder, self.style)
        shapes = self._shapes(num_blocks, max_model_len)
        if self.style.fixed_addresses:
            shapes = self._with_buffers(shapes, bursts)
        return StepPrograms(
            self.served.model, self.builder, shapes, variants, self._open_store(self.description()), self.placement,
            *self._compiler_options(), bursts,
        )  # fmt: skip

    def _compiler_options(self) -> tuple[CompilerOptions, CompilerOptions]:
        """``StepPrograms``' for large and untuned programs."""
        if self._invariance.platform != "gpu":
            return (), ()
        return LIBRARY_PRODUCTS, UNTUNED

    def description(self) -> str:
        """All of this engine that its programs depend on beside their shapes."""
        served, model = self.served, self.served.model
        return repr((
            served.hf_config, served.dtype, self._invariance.platform, served.backend.name, sorted(model.specs.items()),
            sorted(map(repr, model.attention_options)), self._config.parallel_config,
            self._invariance, model.context.peer_all_reduce,
        ))  # fmt: skip

    def _make_builder(self) -> BatchBuilder:
        scheduler = self._config.scheduler_config
        assert scheduler.max_num_seqs is not None
        assert scheduler.max_num_batched_tokens is not None
        table = BucketTable.build(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            decode_programs=self.style.decode_programs,
            fine=self.style.fixed_addresses,
            trimmed=scheduler.enable_chunked_prefill and self.placement.num_ranks == 1,
            fewest_rows=self._invariance.fewest_rows,
            shared=self._invariance.enabled,
        )
        return BatchBuilder(table, self.served.block_size, scheduler.max_num_seqs, self._bursts())

    def _bursts(self) -> BurstLimits | None:
        """The bursts that pay here: see ``choose_bursts``."""
        read = partial(weight_bytes_read, self.served.model, self.placement.mesh)
        return choose_bursts(
            self._config,
            platform=self._invariance.platform,
            block_size=self.served.block_size,
            bytes_read=lambda num_rows: read(num_rows, self.served.experts_per_token),
        )

    def _shapes(self, num_blocks: int, max_model_len: int) -> ProgramShapes:
        served, model, block_size = self.served, self.served.model, self.served.block_size
        vocab, max_logprobs = model.vocab_size, self._config.model_config.max_logprobs
        return ProgramShapes(
            max_num_seqs=self.builder.max_num_seqs,
            vocab_size=vocab,
            max_logprobs=vocab if max_logprobs < 0 else min(max_logprobs, vocab),
            num_blocks=num_blocks,
            block_size=block_size,
            max_blocks_per_row=-(-max_model_len // block_size),
            kv_cache_shapes=tuple(
                served.backend.kv_cache_shape(num_blocks, block_size, spec.num_kv_heads, spec.head_size)
                for spec in served.specs
            ),
            kv_cache_dtype=served.cache_dtype,
            num_ranks=self.placement.num_ranks,
            block_axis=served.backend.block_axis(),
            split_kv_heads=not model.has_latents,
            has_experts=model.has_experts,
        )

    def _with_buffers(self, shapes: ProgramShapes, bursts: list[BurstVariant]) -> ProgramShapes:
        """With the sizes of what lies between the programs of a step, at addresses that never change."""
        builder, table, model = self.builder, self.builder.table, self.served.model
        return replace(
            shapes,
            fixed_input=max(
                head_size(FEWEST_LOGITS),
                *(layout.size for layout in builder.layouts.values()),
                *(layout.size for layout in builder.burst_layouts.values()),
            ),
            fixed_tokens=table.mixed[-1].num_tokens,
            fixed_rows=max(FEWEST_LOGITS, *(bucket.num_rows for bucket in table.buckets)),
            fixed_burst=max((burst.num_steps * burst.bucket.num_rows for burst in bursts), default=0),
            hidden_size=model.hidden_size,
            dtype=model.dtype,
        )
