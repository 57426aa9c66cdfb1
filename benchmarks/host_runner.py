"""What a decode step through ``LLM`` costs the host with the real model runner, in us of CPU time, when its compiled
programs cost nothing.

    python benchmarks/host_runner.py --rows 1 8 64 256

A tiny model is compiled as for GPUs (two programs a step, between fixed addresses) and decodes; then its programs are
replaced by what gives their last results back. What is left is Python: scheduler, batch, choice of programs, reading,
outputs and metrics. Printed per number of rows: the whole step (median and 5th percentile, nothing else timed), then
its parts, whose sum is more, as they are timed one inside another. ``--programs`` keeps the programs: small ones, run
by this thread, which also leaves the caches as cold as serving does. ``--profile`` says where the time goes.
``host.py`` measures more rows, with text, beside its targets.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import thread_time_ns
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests" / "support")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from tiny_checkpoints import write_tiny_checkpoint  # noqa: E402

from jaxserve import LLM, SamplingParams  # noqa: E402
from jaxserve.runner.pending_step import DispatchedStep  # noqa: E402
from jaxserve.runner.program_variants import HeadVariant, ProgramStyle, StepVariant  # noqa: E402

BLOCK_SIZE = 16
PARTS = (
    "schedule", "build", "choose", "run", "copies", "execute", "read", "update", "stats", "core", "outputs", "metrics",
)  # fmt: skip
"""``execute`` holds build to copies, ``core`` all from schedule to stats."""


def make_llm(model: Path, rows: int, steps: int) -> LLM:
    """An engine in whose batch so many rows decode for so many steps and more."""
    ProgramStyle.of = classmethod(lambda cls, platform: cls(decode_programs=True, fixed_addresses=True))  # type: ignore[method-assign]
    length = min(512, steps + 64)
    llm = LLM(
        str(model), max_model_len=length, max_num_seqs=max(rows, 8), max_num_batched_tokens=max(rows, 64),
        block_size=BLOCK_SIZE, num_gpu_blocks_override=rows * (length // BLOCK_SIZE + 1) + 8, skip_tokenizer_init=True,
        num_scheduler_steps=1,
    )  # fmt: skip
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=length - 4, detokenize=False)
    llm.enqueue([[5, 6, 7]] * rows, params)
    for _ in range(16):
        llm._step()
    return llm


def replace_programs(llm: LLM) -> None:
    """Put what costs nothing in the place of the programs that decode steps run."""
    compiled = llm._core.runner.programs.compiled  # type: ignore[attr-defined]
    for key, program in compiled.items():
        if isinstance(key, StepVariant):
            compiled[key] = lambda params, kv_caches, tables, buffers, last: (kv_caches, tables, buffers)
        elif isinstance(key, HeadVariant):
            compiled[key] = _last_result(program)
        elif isinstance(key, tuple) and key[0] == "put_step_input":
            compiled[key] = lambda old, new: old


def _last_result(head: Callable[..., Any]) -> Callable[..., Any]:
    results: list[Any] = []

    def call(params: Any, sampler: Any, buffers: Any) -> Any:
        if not results:
            output, sampler = head(params, sampler, buffers)
            results.append(jax.block_until_ready(output))
        return results[0], sampler

    return call


def time_parts(llm: LLM, times: dict[str, float]) -> None:
    """From now on the parts' ns are added to ``times``."""

    def timed(owner: Any, function: str, part: str) -> None:
        inner = getattr(owner, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            started = thread_time_ns()
            try:
                return inner(*args, **kwargs)
            finally:
                times[part] = times.get(part, 0.0) + thread_time_ns() - started

        setattr(owner, function, call)

    core = llm._core
    runner, scheduler = core.runner, core.scheduler
    timed(scheduler, "schedule", "schedule")
    timed(runner.builder, "build", "build")  # type: ignore[attr-defined]
    timed(runner.programs, "choose", "choose")  # type: ignore[attr-defined]
    timed(runner.programs, "run", "run")  # type: ignore[attr-defined]
    timed(DispatchedStep, "start_copies", "copies")
    timed(runner, "execute", "execute")
    timed(DispatchedStep, "result", "read")
    timed(scheduler, "update_from_output", "update")
    timed(scheduler, "stats", "stats")
    timed(core, "step", "core")
    timed(llm._outputs, "process_outputs", "outputs")
    timed(llm._metrics, "record_stats", "metrics")


def measure(llm: LLM, steps: int) -> list[float]:
    """us of the whole step, median and 5th percentile, then of its parts."""
    totals: list[float] = []
    for _ in range(steps):
        started = thread_time_ns()
        llm._step()
        totals.append(thread_time_ns() - started)
    times: dict[str, float] = {}
    samples: dict[str, list[float]] = {part: [] for part in PARTS}
    results = DispatchedStep.start_copies, DispatchedStep.result
    time_parts(llm, times)
    for _ in range(steps):
        times.clear()
        llm._step()
        for part in PARTS:
            samples[part].append(times[part])
    DispatchedStep.start_copies, DispatchedStep.result = results  # type: ignore[method-assign]
    whole = [float(np.median(totals)), float(np.percentile(totals, 5))]
    return [ns / 1e3 for ns in (*whole, *(float(np.median(samples[part])) for part in PARTS))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=150, help="steps measured, twice; at most 200")
    parser.add_argument("--programs", action="store_true", help="run the programs too")
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead")
    arguments = parser.parse_args()
    steps = min(arguments.steps, 200)

    print(f"jax {jax.__version__}, load average {os.getloadavg()[0]:.1f}, us of CPU time")
    print(" ".join(f"{name:>9}" for name in ("rows", "step", "fast", *PARTS)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_checkpoint(Path(folder), "llama", num_hidden_layers=1)
        for rows in arguments.rows:
            with make_llm(model, rows, 2 * steps + 20) as llm:
                if not arguments.programs:
                    replace_programs(llm)
                for _ in range(4):
                    llm._step()
                if arguments.profile:
                    with cProfile.Profile() as profile:
                        for _ in range(steps):
                            llm._step()
                    pstats.Stats(profile).sort_stats("tottime").print_stats(30)
                    continue
                cells = " ".join(f"{cell:9.1f}" for cell in measure(llm, steps))
                print(f"{rows:>9} {cells}", flush=True)


if __name__ == "__main__":
    main()
