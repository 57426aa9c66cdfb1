"""From a config and a topology to a ``Plan``: what is computed, what is compiled, and in which order."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, OutOfMemoryError
from jaxserve.plan.floors import Floors, StepFloor
from jaxserve.plan.hardware import Topology
from jaxserve.plan.planned_runner import PlannedRunner
from jaxserve.plan.programs import (
    Collective,
    CompiledProgram,
    compile_program,
    planned_variants,
    traced_collectives,
)
from jaxserve.runner.kv_arrays import MIB, PROGRAM_RESERVE
from jaxserve.runner.temporaries import forward_temporaries, sampler_temporaries
from jaxserve.sampling.state import state_bytes

logger = logging.getLogger(__name__)

DEEPEST_COMPILED = 40
"""Layers up to which whole programs are compiled, unless told otherwise; of deeper models the first ``FEW_LAYERS``."""
FEW_LAYERS = 4
LOGIT_COPIES = 10
"""float32 copies of a step's logits that the whole sampler keeps, by the TPU compiler's account."""
COMPILE_CHOICES = ("all", "decode", "none")
LAYERS_KEY = "num_hidden_layers"


@dataclass(frozen=True)
class CompileOptions:
    """What to compile.

    Args:
        programs: ``all``, ``decode`` (no prefill: its temporaries are estimated) or ``none``.
        num_layers: compile so many of the first layers; None: all, or of a deep model the first few.
        traces: count the collectives of a step, for which the whole of it is traced.
        fill_cache: then compile every program of the engine for the cache's size, and store it for the real devices.
    """

    programs: str = "all"
    num_layers: int | None = None
    fill_cache: bool = False
    traces: bool = True


@dataclass(frozen=True)
class Users:
    """How many requests of so many tokens the cache holds at a time, over all ranks."""

    context: int
    requests: int


@dataclass(frozen=True)
class Plan:
    """A deployment's sizes, in bytes and tokens. ``a device`` is a JAX device; a rank is a data parallel one.

    Args:
        temporaries_source: where ``temporary_bytes`` is from: ``compiled``, ``compiled with N layers``, ``estimated``.
        why_not: None if it fits; else the engine's own error.
        num_blocks: of the cache of one rank, the dummy block not counted; 0 if it does not fit.
        step_collectives: of the largest decode step, all layers; None: not asked for.
        num_stored: programs in the store that an engine on the real devices looks into, where that was asked for.
    """

    model: str
    architecture: str
    topology: Topology
    parallel: Mapping[str, Any]
    devices_used: int
    dtype: str
    kv_cache_dtype: str
    attention: str
    why_portable: str | None
    num_params: int
    weight_bytes: int
    device_weight_bytes: int
    state_bytes: int
    temporary_bytes: int
    temporaries_source: str
    budget_bytes: int
    block_size: int
    device_bytes_per_token: float
    max_model_len: int
    num_blocks: int
    cache_tokens: int
    device_cache_bytes: int
    users: tuple[Users, ...]
    why_not: str | None
    programs: tuple[CompiledProgram, ...]
    num_layers: int
    step_collectives: tuple[Collective, ...] | None
    floors: tuple[StepFloor, ...]
    num_stored: int | None

    @property
    def fits(self) -> bool:
        return self.why_not is None


def make_plan(
    name: str,
    hf_config: Mapping[str, Any],
    config: EngineConfig,
    topology: Topology,
    *,
    contexts: Sequence[int] = (),
    options: CompileOptions = CompileOptions(),
) -> Plan:
    """Plan an engine.

    Args:
        name: of the model, to be printed.
        hf_config: its config.json.
        config: as for ``serve``; the platform's defaults are filled in here.
        topology: where it would run.
        contexts: lengths for which users are counted, beside ``max_model_len``.
        options: what to compile.

    Raises:
        ConfigError, UnsupportedModelError: as an engine's start would.
    """
    config = config.with_defaults_for(topology.platform, topology.hbm_bytes)
    if options.fill_cache and options.programs != "all":
        raise ConfigError(
            "fill_cache compiles every program: it cannot do so with fewer.", param="fill_cache"
        )
    compiles = options.programs != "none"
    runner = PlannedRunner(config, topology, dict(hf_config), compiles=compiles)
    estimated = estimate_temporaries(runner)
    why_not, num_blocks, temporaries, source = None, 0, estimated, "estimated"
    compiled: list[CompiledProgram] = []
    num_stored: int | None = None
    try:
        num_blocks = runner.num_blocks_for(estimated)
        if compiles:
            compiled = _compile(runner, dict(hf_config), config, topology, num_blocks, options)
            measured = next((program for program in compiled if program.name == "prefill"), None)
            if measured is not None:
                temporaries = measured.temporary_bytes + measured.output_bytes - measured.alias_bytes
                source = _source(measured, runner)
                num_blocks = runner.num_blocks_for(temporaries)
            if options.fill_cache:
                num_stored = fill_cache(runner, num_blocks)
        check_memory(runner, num_blocks, temporaries)
    except OutOfMemoryError as error:
        why_not, num_blocks = str(error), 0
    collectives = step_collectives(config, topology, dict(hf_config)) if options.traces else None
    return _describe(
        name,
        runner,
        num_blocks,
        temporaries,
        source,
        why_not,
        compiled,
        collectives,
        contexts,
        num_stored,
    )


def check_memory(runner: PlannedRunner, num_blocks: int, temporaries: int) -> None:
    """Compare all with what a device has: a cache whose size was asked for is not measured by anything else.

    Raises:
        OutOfMemoryError: saying what is too much.
    """
    cache = num_blocks * runner.served.block_bytes
    state = state_bytes(runner.builder.max_num_seqs, runner.model.vocab_size)
    total = runner.weight_bytes() + state + temporaries + PROGRAM_RESERVE + cache
    have = runner.topology.hbm_bytes
    if total > have:
        raise OutOfMemoryError(
            f"Weights ({runner.weight_bytes() / MIB:,.0f} MiB), state, programs and the cache asked for "
            f"({cache / MIB:,.0f} MiB) take {total / MIB:,.0f} MiB of a device that has {have / MIB:,.0f}: "
            "lower --kv-cache-memory-bytes or --num-gpu-blocks-override.",
            param="kv_cache_memory_bytes",
        )


def _source(program: CompiledProgram, runner: PlannedRunner) -> str:
    if program.num_layers == runner.num_layers:
        return "compiled"
    return f"compiled with {program.num_layers} of {runner.num_layers} layers"


def _compile(
    runner: PlannedRunner,
    hf_config: dict[str, Any],
    config: EngineConfig,
    topology: Topology,
    num_blocks: int,
    options: CompileOptions,
) -> list[CompiledProgram]:
    """The programs that ``options`` ask for."""
    layers = runner.num_layers
    few = options.num_layers
    if few is None:
        few = layers if layers <= DEEPEST_COMPILED else FEW_LAYERS
    if not 1 <= few <= layers:
        raise ConfigError(
            f"compile_layers must be from 1 to the model's {layers}, got {few}.", param="compile_layers"
        )
    some = runner
    if few != layers:
        some = PlannedRunner(config, topology, _with_layers(hf_config, few), compiles=True)
        some.max_model_len = runner.max_model_len
    programs = some.programs_for(num_blocks)

    def compiled(name: str) -> CompiledProgram:
        try:
            return compile_program(name, programs, planned_variants(programs)[name], few)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise OutOfMemoryError(f"The compiler refuses the {name} program: {error}") from error

    return [compiled(name) for name in ("prefill", "decode") if options.programs in ("all", name)]


def step_collectives(
    config: EngineConfig, topology: Topology, hf_config: dict[str, Any]
) -> tuple[Collective, ...]:
    """The collectives of the largest decode step, from its traced program; attention has none on any device."""
    if config.parallel_config.num_devices == 1:
        return ()
    runner = PlannedRunner(config, topology, hf_config, compiles=False, portable=True)
    programs = runner.programs_for(2)
    return traced_collectives(programs, planned_variants(programs)["decode"])


def fill_cache(runner: PlannedRunner, num_blocks: int) -> int:
    """Compile and store every program for a cache of so many blocks; how many there are.

    Raises:
        ConfigError: they would be of no use to an engine.
    """
    if (why_not := runner.why_not_stored()) is not None:
        raise ConfigError(f"The program store cannot be filled: {why_not}.", param="fill_cache")
    total = 0

    def progress(done: int, programs: int) -> None:
        nonlocal total
        total = programs
        logger.warning("Compiled %d of %d programs", done, programs)

    runner.programs_for(num_blocks).compile(progress)
    return total


def _with_layers(hf_config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """A config of the first layers alone."""
    kinds = hf_config.get("layer_types")
    shorter = {} if kinds is None else {"layer_types": list(kinds)[:num_layers]}
    return {**hf_config, LAYERS_KEY: num_layers, **shorter}


def estimate_temporaries(runner: PlannedRunner) -> int:
    """Bytes of the largest program's temporaries by rule of thumb: the engine's own, where it sizes its cache by one
    (on GPUs), else a layer's widest intermediate values beside the residual stream, and the sampler's copies of the
    logits."""
    if (own := runner.estimated_temporaries()) is not None:
        return own
    bucket = runner.builder.table.buckets[-1]
    per_token = runner.served.experts_per_token
    layers = forward_temporaries(runner.model, bucket.num_tokens, per_token, runner.mesh)
    return layers + sampler_temporaries(runner.model, bucket.num_rows, LOGIT_COPIES, runner.mesh)


def _describe(
    name: str,
    runner: PlannedRunner,
    num_blocks: int,
    temporaries: int,
    source: str,
    why_not: str | None,
    compiled: Sequence[CompiledProgram],
    collectives: tuple[Collective, ...] | None,
    contexts: Sequence[int],
    num_stored: int | None,
) -> Plan:
    served, model, ranks = runner.served, runner.model, runner.placement.num_ranks
    size, block_bytes = served.block_size, served.block_bytes
    usable = max(0, num_blocks - 1)
    longest = runner.max_model_len
    lengths = sorted({length for length in contexts if length <= model.max_position_embeddings} | {longest})
    users = tuple(Users(length, ranks * (usable // math.ceil(length / size))) for length in lengths)
    floors = Floors(runner)
    most = runner.builder.max_num_seqs
    context = lengths[0]
    at_once = max(1, min(most, users[0].requests // ranks)) if usable else most
    parallel = runner.config.parallel_config
    return Plan(
        model=name,
        architecture=", ".join(served.hf_config.get("architectures") or ["?"]),
        topology=runner.topology,
        parallel={
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "data_parallel_size": parallel.data_parallel_size,
            "enable_expert_parallel": parallel.enable_expert_parallel,
            "sequence_parallel": parallel.sequence_parallel,
        },
        devices_used=parallel.num_devices,
        dtype=served.dtype.name,
        kv_cache_dtype=served.cache_dtype.name,
        attention=served.backend.name,
        why_portable=served.why_no_kernels,
        num_params=sum(math.prod(spec.shape) for spec in model.specs.values()),
        weight_bytes=model.param_bytes(),
        device_weight_bytes=runner.weight_bytes(),
        state_bytes=state_bytes(most, model.vocab_size),
        temporary_bytes=temporaries,
        temporaries_source=source,
        budget_bytes=runner.budget_bytes(),
        block_size=size,
        device_bytes_per_token=block_bytes / size,
        max_model_len=longest,
        num_blocks=usable,
        cache_tokens=ranks * usable * size,
        device_cache_bytes=num_blocks * block_bytes,
        users=users,
        why_not=why_not,
        programs=tuple(compiled),
        num_layers=runner.num_layers,
        step_collectives=collectives,
        floors=(floors.decode(1, context), floors.decode(at_once, context), floors.prefill(context)),
        num_stored=num_stored,
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values."""
    import dataclasses

    value = dataclasses.asdict(replace(plan, parallel=dict(plan.parallel)))
    for floor, given in zip(value["floors"], plan.floors, strict=True):
        floor["seconds"] = given.seconds
    return {"fits": plan.fits, **value}
