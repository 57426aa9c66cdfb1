"""JaxModelRunner: the device side. Holds weights, caches and programs; turns a SchedulerOutput into one dispatch."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import time
from itertools import zip_longest
from pathlib import Path

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.models import Model
from jaxserve.models.functional import PEERS, PEERS_SPEC
from jaxserve.runner.batch_builder import StepBatch
from jaxserve.runner.cache_sizer import CacheSizer
from jaxserve.runner.compilation import CompilationCounter, program_folder
from jaxserve.runner.device_kernels import DeviceKernels
from jaxserve.runner.devices import device_memory, place, platform_name
from jaxserve.runner.engine_programs import EnginePrograms
from jaxserve.runner.invariance import Invariance
from jaxserve.runner.kv_arrays import MemoryBudget, device_budget, single_group
from jaxserve.runner.pending_step import DispatchedStep
from jaxserve.runner.preparation import Preparation
from jaxserve.runner.program_store import ProgramStore
from jaxserve.runner.program_variants import HeadVariant, StepVariant
from jaxserve.runner.prompt_scoring import PromptScorer
from jaxserve.runner.rank_batches import RankBatches, sampling_rows
from jaxserve.runner.served_model import ModelBuilder
from jaxserve.runner.small_chunks import SmallChunks
from jaxserve.runner.state_updates import StateUpdates
from jaxserve.runner.token_masks import changed_masks
from jaxserve.sampling.metadata import Feature
from jaxserve.step import RunnerInfo, SchedulerOutput
from jaxserve.weights.loader import load_params
from jaxserve.weights.resolve import ModelFiles, resolve_model
from pallas_kernels.dispatch import AttentionBackend
from pallas_kernels.mla_attention.dispatch import LatentBackend

__all__ = ["JaxModelRunner", "device_memory", "platform_name"]

logger = logging.getLogger(__name__)

WEIGHT_FORMATS = {"hf": "safetensors"}
"""``ModelFiles.format`` in the words of ``load_format``, where they differ."""


class JaxModelRunner:
    """One model on this program's devices. One thread calls everything.

    With data parallelism each rank has rows of its own; all of them share a step's bucket and program.

    Args:
        config: with the platform's defaults filled in (``EngineConfig.with_defaults_for``).

    Attributes:
        params: the weights.
        programs: all that it dispatches, compiled.
        state: what else lives on the devices (``DeviceState``); a step takes it and gives the next.
        startup_seconds: of each phase of ``initialize``.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.platform = platform_name()
        self.kernels = DeviceKernels(self.platform)
        self.counter = CompilationCounter()
        self.startup_seconds: dict[str, float] = {}
        self._small_chunks: SmallChunks | None = None

    @property
    def model(self) -> Model:
        """What is served."""
        return self.served.model

    @property
    def backend(self) -> AttentionBackend | LatentBackend:
        """The model's attention."""
        return self.served.backend

    # --- start ----------------------------------------------------------------------------------------------

    def initialize(self) -> RunnerInfo:
        """Load, size, compile, warm up.

        Raises:
            ConfigError, CheckpointError, ModelNotFoundError: saying what is wrong with what the user asked for.
        """
        config = self.config
        invariance = Invariance(config.compilation_config.batch_invariant, self.platform)
        self.placement = place(config.parallel_config, invariance.compiler_options)
        folder = program_folder(config.compilation_config.compile_cache_dir)
        files = resolve_model(
            config.model_config.model,
            config.model_config.revision,
            weights=config.model_config.load_format != "dummy",
        )
        hf_config = {**files.config, **config.model_config.hf_overrides}
        self.served = ModelBuilder(config, self.placement, self.kernels, invariance).build(hf_config)
        open_store = functools.partial(self._open_store, folder)
        programs = EnginePrograms(config, self.served, self.placement, invariance, open_store)
        self.builder = programs.builder
        preparation = Preparation(CacheSizer(config, programs, self._device_budget), programs)
        try:
            preparation.begin()
            self._load_weights(files)
            self._compile(preparation)
        finally:
            preparation.abandon()
        self._warm_up(programs.style.warm_up_runs)
        self.info = self._describe(invariance)
        self.counter.start()
        return self.info

    def _open_store(self, folder: Path | None, description: str) -> ProgramStore:
        """What is on disk of programs for this model on these devices; nothing for several processes, which must all
        compile the same ones."""
        return ProgramStore(folder if jax.process_count() == 1 else None, description, self.placement.devices)

    def _device_budget(self, temporaries: int) -> MemoryBudget | None:
        """Memory of the fullest device; None where devices do not tell."""
        share = self.config.cache_config.gpu_memory_utilization
        return device_budget(self.placement.local_devices, share, temporaries)

    def _load_weights(self, files: ModelFiles) -> None:
        started = time.monotonic()
        config, model = self.config.model_config, self.model
        mesh, rules, size = self.placement.mesh, model.context.rules, model.param_bytes() / (1 << 20)
        if config.load_format == "dummy":
            logger.info("Making %.0f MiB of random weights", size)
            from jaxserve.weights.dummy import dummy_params

            self.params = dummy_params(model.specs, seed=config.seed, mesh=mesh, rules=rules)
        else:
            if config.load_format not in ("auto", WEIGHT_FORMATS.get(files.format, files.format)):
                raise ConfigError(
                    f"load_format is {config.load_format!r}, but {files.path} holds {files.format} weights.",
                    param="load_format",
                )
            logger.info("Loading %s (%.0f MiB as %s)", files.path.name, size, self.served.dtype.name)
            self.params = load_params(model.specs, model.weight_map, files, mesh=mesh, rules=rules)
        if self.kernels.workspaces is not None:  # where tensor-parallel devices add up
            self.params[PEERS] = self.placement.put(self.kernels.workspaces.peers, PEERS_SPEC)
        jax.block_until_ready(self.params)
        self._note("weights", started)

    def _compile(self, preparation: Preparation) -> None:
        """Choose the cache's size, now that the weights are there, and compile for it."""
        started = time.monotonic()
        prepared = preparation.finish()
        self.programs = prepared.programs
        self.num_blocks, self.max_model_len = prepared.size.num_blocks, prepared.size.max_model_len
        self._note("compilation", started)

    def _warm_up(self, runs: int) -> None:
        """Allocate the state and run every program so many times on padding, with the arguments of serving."""
        started = time.monotonic()
        programs, vocab_size = self.programs, self.model.vocab_size
        max_num_seqs, ranks = self.builder.max_num_seqs, self.placement.num_ranks
        self._updates = StateUpdates(self.placement, programs.compiled, max_num_seqs, vocab_size)
        self._scorer = PromptScorer(self.placement, programs.compiled, self.params)
        self.state = self.placement.zeros(programs.state)
        self._make_small_chunks()
        heads, smallest_step = programs.heads or [None], programs.variants[-1]
        for _ in range(runs):
            for variant, head in zip_longest(programs.variants, heads, fillvalue=None):
                hidden = self._warm_up_step(variant or smallest_step, head or heads[-1])
                scored = self._scorer.warm_up(hidden)
            for burst in programs.bursts:
                buffer = self.placement.put_all([self.builder.padding(burst.bucket, burst=True)])
                _, self.state = programs.run_burst(burst, self.params, self.state, buffer)
        self.state = self._updates.warm_up(self.state)
        jax.block_until_ready((scored, self.state))
        self._rows = RankBatches(ranks, max_num_seqs, vocab_size)
        self._note("warm-up", started)

    def _make_small_chunks(self) -> None:
        """After the state, parts of which would take them."""
        if self.programs.shapes.fixed:
            self._small_chunks = SmallChunks(self.placement.local_devices)

    def _warm_up_step(self, variant: StepVariant, head: HeadVariant | None) -> jax.Array:
        """Run a step on padding; the hidden states."""
        padding = self.builder.padding(variant.bucket)
        buffer = self.placement.put_all([padding] * self.placement.num_ranks)
        _, hidden, self.state = self.programs.run(variant, head, self.params, self.state, buffer)
        return hidden

    def _describe(self, invariance: Invariance) -> RunnerInfo:
        """What the scheduler is told; how large the cache is, is logged."""
        served, ranks, block_size = self.served, self.placement.num_ranks, self.served.block_size
        tokens = ranks * (self.num_blocks - 1) * block_size
        cache_bytes = len(self.placement.devices) * self.num_blocks * served.block_bytes
        logger.info(
            "KV cache: %s tokens in %d blocks of %d (%.0f MiB), %.1f requests of %s tokens",
            f"{tokens:,}", ranks * (self.num_blocks - 1), block_size, cache_bytes / (1 << 20),
            tokens / self.max_model_len, f"{self.max_model_len:,}",
        )  # fmt: skip
        return RunnerInfo(
            num_blocks=self.num_blocks,
            block_size=block_size,
            max_model_len=self.max_model_len,
            vocab_size=served.model.vocab_size,
            kv_cache_groups=[single_group(served.specs)],
            kv_cache_bytes=cache_bytes,
            num_programs=len(self.programs.compiled),
            device=self._device_name(),
            data_parallel_size=ranks,
            separate_paths=invariance.separate_paths(served.backend),
            bursts=self.builder.bursts,
            step_sizes=self.builder.table.costly_sizes,
        )

    def _device_name(self) -> str:
        name = f"{jax.local_devices()[0].device_kind} ({self.platform})"
        count = len(self.placement.devices)
        return name if count == 1 else f"{count} x {name}"

    def _note(self, phase: str, started: float) -> None:
        seconds = time.monotonic() - started
        self.startup_seconds[phase] = round(seconds, 3)
        logger.info("%s: %.1f s", phase.capitalize(), seconds)

    # --- steps ----------------------------------------------------------------------------------------------

    def execute(self, scheduler_output: SchedulerOutput) -> DispatchedStep:
        """Dispatch one step without waiting for it.

        Raises:
            RuntimeError: it compiled something, where ``enforce_no_compile`` forbids that.
        """
        compilations = self.counter.count
        self._update_rows(scheduler_output)
        exhausted = self._send_masks(scheduler_output)
        scores = self._rows.scores_prompts(scheduler_output)
        num_rows = len(scheduler_output.num_scheduled_tokens)
        decode_only = not scores and scheduler_output.num_decode_rows == num_rows
        steps = self._rows.build(self.builder, scheduler_output, decode_only=decode_only)
        for rank, step in enumerate(steps):
            self.state = self._updates.patch(self.state, rank, step.early_patches)
        if scheduler_output.num_decode_steps > 1:
            dispatched = self._dispatch_burst(steps[0], scheduler_output)
        else:
            dispatched = self._dispatch(
                steps, scheduler_output, decode_only=decode_only, scores=scores, exhausted=exhausted
            )
        dispatched.start_copies()
        self._check_compilations(compilations)
        return dispatched

    def _update_rows(self, scheduler_output: SchedulerOutput) -> None:
        """Let requests leave their rows, join, go on and learn tokens, as the scheduler says."""
        for request_id in (*scheduler_output.preempted_request_ids, *scheduler_output.finished_request_ids):
            self._rows.remove(request_id)
        for request in scheduler_output.new_requests:
            row = self._rows.add(request)
            self.state = self._updates.prepare_row(self.state, request.data_rank, row)
        for request in scheduler_output.cached_requests:
            self._rows.of(request.request_id).extend(request)
        for request_id, token_ids in scheduler_output.appended_token_ids.items():
            self._append_tokens(request_id, token_ids)

    def _append_tokens(self, request_id: str, token_ids: list[int]) -> None:
        """Take tokens that were not sampled here, all but the first, for a row that goes on."""
        state = self._rows.of(request_id).append(request_id, token_ids)
        if state.request.sampling_params.needs_penalties:
            rank, new = self._rows.rank_of(request_id), np.asarray(token_ids[1:], np.int32)
            self.state = self._updates.add_history(self.state, rank, state.row, new, is_output=1)

    def _send_masks(self, scheduler_output: SchedulerOutput) -> set[str]:
        """Send the token masks that change; the requests that are left no token."""
        exhausted: set[str] = set()
        if scheduler_output.token_masks or self._rows.any_masked:
            for rank, batch in enumerate(self._rows.batches):
                masks = changed_masks(batch, scheduler_output, exhausted)
                self.state = self._updates.set_masks(self.state, rank, masks)
        return exhausted

    def _dispatch(
        self,
        steps: list[StepBatch],
        scheduler_output: SchedulerOutput,
        *,
        decode_only: bool,
        scores: bool,
        exhausted: set[str],
    ) -> DispatchedStep:
        """Dispatch one step of all ranks."""
        features = functools.reduce(operator.or_, (step.features for step in steps))
        num_rows = max(len(step.request_ids) for step in steps)
        variants = self.programs.choose(steps[0].bucket, num_rows, features=features, decode_only=decode_only)
        buffer = self.placement.put_all([step.buffer for step in steps])
        sampled, hidden, self.state = self.programs.run(*variants, self.params, self.state, buffer)
        rows_per_rank = len(sampled.token_ids) // len(steps)
        return DispatchedStep(
            step_id=scheduler_output.step_id,
            sampled=sampled,
            sampling_rows=sampling_rows(steps, scheduler_output, rows_per_rank),
            num_logprobs=self._rows.num_logprobs(steps),
            prompts=self._scorer.score(self._rows.batches, steps, hidden) if scores else [],
            on_tokens=self._rows.read_tokens,
            exhausted=exhausted,
            num_padded_tokens=len(steps) * steps[0].bucket.num_tokens,
        )

    def _dispatch_burst(self, step: StepBatch, scheduler_output: SchedulerOutput) -> DispatchedStep:
        """Dispatch several decode steps at once."""
        burst = self.programs.choose_burst(step.bucket, Feature(step.features))
        buffer = self.placement.put_all([step.buffer])
        sampled, self.state = self.programs.run_burst(burst, self.params, self.state, buffer)
        return DispatchedStep(
            step_id=scheduler_output.step_id,
            sampled=sampled,
            sampling_rows=list(enumerate(step.request_ids)),
            num_logprobs={},
            prompts=[],
            on_tokens=self._rows.read_tokens,
            num_padded_tokens=burst.num_steps * step.bucket.num_tokens,
            num_burst_tokens=scheduler_output.num_scheduled_tokens,
        )

    def _check_compilations(self, before: int) -> None:
        """Refuse what was compiled since there were ``before``, if that was asked for."""
        new = self.counter.count - before
        if new and self.config.compilation_config.enforce_no_compile:
            raise RuntimeError(f"A step compiled {new} program(s) after the engine was ready.")

    # --- end ------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """After a step failed: start again from empty rows and, where the step took it along, an empty cache."""
        self._rows.clear()
        jax.tree.map(lambda leaf: None if leaf.is_deleted() else leaf.delete(), self.state)
        if self._small_chunks is not None:
            self._small_chunks.close()
        self.state = self.placement.zeros(self.programs.state)
        self._make_small_chunks()

    def num_compilations(self) -> int:
        """Compilations since ``initialize`` returned."""
        return self.counter.count

    def close(self) -> None:
        """Free device memory, also where ``initialize`` failed half-way."""
        if self.kernels.workspaces is not None:
            with contextlib.suppress(Exception):  # a step that failed has ended as well
                jax.block_until_ready(getattr(self, "state", None))  # no device writes to its peers any more
            self.kernels.close()
        for leaf in jax.tree.leaves([getattr(self, name, None) for name in ("params", "state")]):
            if not leaf.is_deleted():
                leaf.delete()
        if self._small_chunks is not None:
            self._small_chunks.close()
        if hasattr(self, "programs"):
            self.programs.compiled = {}
