"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.plan.make_plan import Plan
from jaxserve.plan.programs import CompiledProgram
from jaxserve.runner.kv_arrays import PROGRAM_RESERVE

GIB, MIB = 1 << 30, 1 << 20


def render(plan: Plan) -> str:
    """Lines for a terminal."""
    lines = [*_head(plan), "", *_memory(plan), "", *_cache(plan)]
    if plan.why_not is not None:
        lines += ["", f"Does not fit: {plan.why_not}"]
    if plan.programs:
        lines += ["", *_programs(plan)]
    if plan.step_collectives is not None:
        lines += ["", *_collectives(plan)]
    lines += ["", *_floors(plan), "", *_notes(plan)]
    return "\n".join(lines)


def _head(plan: Plan) -> Iterable[str]:
    sizes = plan.parallel
    parts = [f"tp {sizes['tensor_parallel_size']}", f"dp {sizes['data_parallel_size']}"]
    parts += [name for key, name in (("enable_expert_parallel", "expert parallel"),) if sizes[key]]
    parts += [name for key, name in (("sequence_parallel", "sequence parallel"),) if sizes[key]]
    topology = plan.topology
    yield f"{plan.model}: {plan.architecture}, {plan.num_params / 1e9:.2f} G parameters in {plan.dtype}"
    yield (
        f"{topology.name}: {topology.num_devices} x {topology.device_kind}, {plan.devices_used} used "
        f"({', '.join(parts)}); attention '{plan.attention}', cache {plan.kv_cache_dtype}"
    )
    if plan.why_portable:
        yield f"  {plan.why_portable}"


def _memory(plan: Plan) -> Iterable[str]:
    topology = plan.topology
    yield "Memory of a device, GiB"
    yield f"  for programs to use     {topology.hbm_bytes / GIB:9.2f}"
    yield f"  allowed                 {plan.budget_bytes / GIB:9.2f}"
    yield f"  weights                 {plan.device_weight_bytes / GIB:9.2f}   of {plan.weight_bytes / GIB:,.2f} in all"
    yield f"  sampler's state         {plan.state_bytes / GIB:9.2f}"
    yield f"  temporaries             {plan.temporary_bytes / GIB:9.2f}   {plan.temporaries_source}"
    yield f"  reserve                 {PROGRAM_RESERVE / GIB:9.2f}   for the programs' code and fragmentation"
    yield f"  KV cache                {plan.device_cache_bytes / GIB:9.2f}"


def _cache(plan: Plan) -> Iterable[str]:
    yield (
        f"KV cache: {plan.device_bytes_per_token:,.0f} bytes a token and device; {plan.cache_tokens:,} tokens in "
        f"{plan.cache_tokens // plan.block_size:,} blocks of {plan.block_size}"
    )
    for users in plan.users:
        yield f"  {users.requests:7,} requests of {users.context:,} tokens at once"


def _programs(plan: Plan) -> Iterable[str]:
    yield "Compiled for this topology by XLA:TPU; bytes of a device"
    yield "  program   T x R        layers   lower    compile  arguments  temporaries  not aliased"
    for program in plan.programs:
        yield _program(program)


def _collectives(plan: Plan) -> Iterable[str]:
    assert plan.step_collectives is not None
    yield f"Collectives of a decode step of all {plan.num_layers} layers, as its program has them; of a device"
    if not plan.step_collectives:
        yield "  none"
    for each in plan.step_collectives:
        yield f"  {each.count:5} {each.kind:18} {each.result_bytes / MIB:10.2f} MiB of results"
    sent = sum(each.sent_bytes for each in plan.step_collectives)
    if sent:
        topology = plan.topology
        seconds = sent / topology.link_bytes_per_second
        yield f"  sends {sent / MIB:,.1f} MiB at least: {seconds * 1e3:.2f} ms at {topology.link}'s peak"


def _program(program: CompiledProgram) -> str:
    shape = f"{program.num_tokens} x {program.num_rows}"
    rest = program.output_bytes - program.alias_bytes
    return (
        f"  {program.name:8}  {shape:11}  {program.num_layers:6}  {program.lower_seconds:6.1f} s "
        f"{program.compile_seconds:8.1f} s  {program.argument_bytes / GIB:5.2f} GiB "
        f"{program.temporary_bytes / MIB:8.1f} MiB {rest / MIB:8.1f} MiB"
    )


def _floors(plan: Plan) -> Iterable[str]:
    yield "Floors (peak bandwidth, peak bfloat16 FLOP/s, nothing else)"
    for floor in plan.floors:
        what = (
            f"decode, {floor.rows} x {floor.context:,} tokens"
            if floor.name == "decode"
            else f"a prompt of {floor.context:,} tokens"
        )
        yield (
            f"  {what:34} {floor.bandwidth_seconds * 1e3:9.2f} ms for {floor.bytes_read / GIB:8.2f} GiB, "
            f"{floor.flop_seconds * 1e3:9.2f} ms for {floor.flops / 1e12:9.2f} TFLOP"
            + (f"; {floor.seconds / floor.rows * 1e3:.3f} ms a token" if floor.name == "decode" else "")
        )


def _notes(plan: Plan) -> Iterable[str]:
    if plan.num_stored is not None:
        yield (
            f"{plan.num_stored} programs are stored for an engine with --num-gpu-blocks-override {plan.num_blocks + 1} "
            f"--max-model-len {plan.max_model_len} and these flags: see docs/plan.md."
        )
    elif plan.programs:
        yield (
            "decode is the largest decode step with the argmax alone, prefill the largest step with the whole sampler. "
            "They are not kept; --fill-cache compiles and stores every program: see docs/plan.md."
        )
    else:
        yield "Nothing was compiled: temporaries are estimated."
