"""Where a step's time goes on a GPU: its kernels by total time, the gaps between them, and the host's share.

    python benchmarks/profile_step.py --model qwen3-0.6b --profile 1,64              # 5 s a row count after the start
    python benchmarks/profile_step.py --model llama-8b --profile 1x8192,16x2048      # rows x tokens: steps with prompts

``offline.py --profile 1,64,1x8192`` does the same in the engine that it measures. All times are of one step, also
where one dispatch holds several decode steps, or prompts take several: 16 x 2,048 tokens, at 8,192 a step, four.

wall     time from one dispatch to the next one's, over the traced steps; of prompts the time of ``generate``
busy     time in which the device ran anything; the rest of wall is gaps. Of decode steps wall is that of the steps
         after the device had nothing to do, and may be less
kernels  launches a step
host     time that the runner took to build and dispatch

Of prompts ``gaps`` are in all and between a run's first and last kernel, and kernels are also added up by kind, beside
operations a second of the model's work and beside floors: everything that is moved, once, at the rate of a copy. Where
a product's kernel does the activation too, that floor is no part of the fusions. A CPU's trace has no kernels, and its
busy is 0.
"""

from __future__ import annotations

import argparse
import collections
import glob
import json
import logging
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from parts import Parts

if TYPE_CHECKING:
    from offline import Shape

MODELS = Path(__file__).parent / "models"
SKIPPED, TRACED = 12, 20
"""Decode steps of all rows before the trace begins, and in it at the least."""
SLACK = 100
"""Further tokens of a row: dispatches of several steps end later, and some run ahead."""
RUNS = 3
"""Traced runs over prompts, and as many before without a trace."""
PAUSE = 0.1
"""Seconds between traced runs, more than a step is ever without a kernel: so runs are told apart."""
KINDS = {
    "attention": r"paged_(decode|prefill)|attention|mla",
    "products": r"nvjet|gemm|matmul|cutlass|cublas|splitk|grouped|mlp",
    "copies": r"^mem(cpy|set)|copy|transpose|paged_update",
    "fusions": r"fusion|^wrapped_|^(add|rms)_norm|split_heads",
}
"""Kind -> what the name of a kernel has: the first that fits."""
FLOORS = {"fusions": ("norms", "heads", "activation"), "copies": ("cache",)}
"""Kind -> what it does of ``Shape.moving_floors``."""
Event = tuple[str, float, float]
"""A kernel's or a copy's name, start us, duration us."""


class TracedSteps:
    """Stands in for ``llm._core.step``: traces some steps once every row decodes."""

    def __init__(self, core: Any, rows: int, folder: str) -> None:
        self._step, self._runner, self._rows, self._folder = core.step, core.runner, rows, folder
        self._execute = self._runner.execute
        self.dispatches: list[tuple[float, float, int]] = []
        """Of each traced dispatch: when it began, its seconds, and its decode steps."""
        self._seen = 0
        self._tracing = False
        core.step, self._runner.execute = self.step, self.execute

    @property
    def steps(self) -> int:
        return sum(steps for _, _, steps in self.dispatches)

    def execute(self, scheduler_output: Any) -> Any:
        began = time.perf_counter()
        result = self._execute(scheduler_output)
        if scheduler_output.num_decode_rows == self._rows:
            steps = getattr(scheduler_output, "num_decode_steps", 1)
            if self._tracing:
                self.dispatches.append((began, time.perf_counter() - began, steps))
            self._seen += steps
        return result

    def step(self) -> Any:
        import jax

        if self._seen >= SKIPPED and not self._tracing and not self.dispatches:
            jax.block_until_ready(self._runner.state)  # whole steps: none that began before
            jax.profiler.start_trace(self._folder, profiler_options=quiet())
            self._tracing = True
        if self.steps >= TRACED and self._tracing:
            self.stop()
        return self._step()

    def stop(self) -> None:
        import jax

        if self._tracing:
            self._tracing = False
            jax.block_until_ready(self._runner.state)  # and none that goes on
            jax.profiler.stop_trace()

    def restore(self, core: Any) -> None:
        self.stop()
        core.step, self._runner.execute = self._step, self._execute


class TimedDispatches:
    """Stands in for ``execute`` of a core's runner, and keeps the seconds of each dispatch."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._execute, self.seconds = runner, runner.execute, list[float]()
        runner.execute = self.execute

    def execute(self, scheduler_output: Any) -> Any:
        began = time.perf_counter()
        result = self._execute(scheduler_output)
        self.seconds.append(time.perf_counter() - began)
        return result

    def restore(self) -> None:
        self._runner.execute = self._execute


def quiet() -> Any:
    """A trace of no Python function, which would slow the host, and without the programs: those of a large model are
    more than a trace may hold."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.enable_hlo_proto = False
    return options


def device_events(folder: str) -> list[Event]:
    """Everything the device ran, by start."""
    import jax

    [file] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    events: list[Event] = []
    for plane in jax.profiler.ProfileData.from_file(file).planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    events += [(e.name, e.start_ns / 1e3, e.duration_ns / 1e3) for e in line.events]
    return sorted(events, key=lambda event: event[1])


def add_up(events: Sequence[Event], steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """us a step, and launches a step, by kernel."""
    total: dict[str, float] = collections.defaultdict(float)
    count: dict[str, float] = collections.defaultdict(float)
    for name, _, duration in events:
        name = re.sub(r"(_\d+|[_.]remat\d*)+$", "", name)[:90]
        total[name] += duration / steps
        count[name] += 1 / steps
    return total, count


def busy_and_gaps(events: Sequence[Event]) -> tuple[float, list[float]]:
    """us in which the device ran anything; us without, before each event but the first."""
    busy, gaps = 0.0, list[float]()
    end = events[0][1] if events else 0.0
    for _, start, duration in events:
        gaps.append(max(0.0, start - end))
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return busy, gaps[1:]


def print_kernels(total: dict[str, float], count: dict[str, float], top: int) -> None:
    for name in sorted(total, key=total.__getitem__, reverse=True)[:top]:
        print(f"  {total[name]:9.1f} us  {count[name]:6.1f} x  {name}", flush=True)


def report(rows: int, traced: TracedSteps, events: list[Event], top: int) -> dict[str, Any]:
    """Print, and return, where a decode step's time went, in us."""
    times, host, steps = (np.array(column) for column in zip(*traced.dispatches, strict=True))
    wall = 1e6 * float(np.median(np.diff(times) / steps[:-1])) if len(times) > 1 else float("nan")
    total, count = add_up(events, traced.steps)
    busy, _ = busy_and_gaps(events)
    found = {
        "rows": rows, "wall": wall, "busy": busy / traced.steps, "kernels": len(events) / traced.steps,
        "host": 1e6 * float(np.median(host / steps)), "steps a dispatch": float(np.mean(steps)), "times": total,
    }  # fmt: skip
    print(
        f"{rows} rows: wall {wall:.0f} us, busy {found['busy']:.0f}, kernels {found['kernels']:.0f}, runner's dispatch "
        f"{found['host']:.0f}, {found['steps a dispatch']:.1f} steps a dispatch"
    )
    print_kernels(total, count, top)
    return found


def kind_of(kernel: str) -> str:
    """One of ``KINDS``, or ``rest``."""
    return next((kind for kind, part in KINDS.items() if re.search(part, kernel, re.IGNORECASE)), "rest")


def print_kinds(kinds: dict[str, float], rows: int, tokens: int, steps: float, shape: Shape | None) -> None:
    """Each kind's us a step and share, and what the model's work says of it.

    Args:
        steps: that these prompts took.
    """
    operations, floors = dict[str, float](), dict[str, float]()
    if shape is not None:
        products, attention = shape.prefill_operations(rows, tokens)
        operations = {"products": products / steps, "attention": attention / steps}
        floors = {name: 1e6 * each / steps for name, each in shape.moving_floors(rows * tokens).items()}
    for kind in sorted(kinds, key=kinds.__getitem__, reverse=True):
        line = f"  {kind:9s} {kinds[kind]:9.1f} us  {kinds[kind] / sum(kinds.values()):6.1%}"
        if kind in operations:
            line += f"  {operations[kind] / kinds[kind] / 1e6:.0f} TFLOP/s"
        parts = {name: floors[name] for name in FLOORS.get(kind, ()) if floors.get(name)}
        if parts:
            named = ", ".join(f"{name} {each:.1f}" for name, each in parts.items())
            line += f"  floor {sum(parts.values()):.1f} us ({named})"
        print(line, flush=True)


def profile_rows(llm: Any, rows: int, context: int, top: int) -> dict[str, Any]:
    """Profile decode steps of ``rows`` rows after prompts of ``context`` tokens; see ``report``."""
    from jaxserve import SamplingParams

    while_prefilling = rows * context // 2048  # tokens of the first rows, at the least
    params = SamplingParams(
        temperature=0,
        max_tokens=SKIPPED + TRACED + SLACK + while_prefilling,
        ignore_eos=True,
        detokenize=False,
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, llm.info.vocab_size, context).tolist() for _ in range(rows)]
    with tempfile.TemporaryDirectory() as trace:
        traced = TracedSteps(llm._core, rows, trace)
        try:
            llm.generate(prompts, params, use_tqdm=False)
        finally:
            traced.restore(llm._core)
        if not traced.dispatches:
            raise RuntimeError(f"the {rows} rows never decoded together: the engine's steps are smaller")
        return report(rows, traced, device_events(trace), top)


def profile_prompts(llm: Any, rows: int, tokens: int, top: int, shape: Shape | None) -> dict[str, Any]:
    """Print, and return, where a step's time goes while ``rows`` prompts of ``tokens`` tokens are computed, in us."""
    import jax

    from jaxserve import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    rng = np.random.default_rng([rows, tokens])

    def run() -> float:
        prompts = [rng.integers(8, llm.info.vocab_size, tokens).tolist() for _ in range(rows)]
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    run()  # a warm one
    untraced = [run() for _ in range(RUNS)]
    with tempfile.TemporaryDirectory() as folder:
        dispatches = TimedDispatches(llm._core.runner)
        walls: list[float] = []
        try:
            with jax.profiler.trace(folder, profiler_options=quiet()):
                for _ in range(RUNS):
                    time.sleep(PAUSE)
                    walls.append(run())
        finally:
            dispatches.restore()
        return report_prompts(
            rows, tokens, walls, untraced, dispatches.seconds, device_events(folder), top, shape
        )


def report_prompts(
    rows: int, tokens: int, walls: list[float], untraced: list[float], dispatches: list[float], events: list[Event],
    top: int, shape: Shape | None,
) -> dict[str, Any]:  # fmt: skip
    """Print, and return, where a step's time went, in us.

    Args:
        walls, untraced: seconds of each run.
        dispatches: seconds of each of the traced runs' dispatches.
        events: of all traced runs.
    """
    steps = len(dispatches)
    total, count = add_up(events, steps)
    busy, gaps = busy_and_gaps(events)
    within = sorted(gaps)[: len(gaps) - len(walls) + 1]  # the others are between runs
    wall, without = (1e6 * float(np.median(each)) * len(walls) / steps for each in (walls, untraced))
    kinds: dict[str, float] = collections.defaultdict(float)
    for name, each in total.items():
        kinds[kind_of(name)] += each
    found = {
        "rows": rows, "tokens": tokens, "steps": steps / len(walls), "wall": wall, "untraced": without,
        "busy": busy / steps, "gaps": wall - busy / steps,
        "gaps within": sum(within) / steps, "kernels": len(events) / steps,
        "host": 1e6 * float(np.median(dispatches)), "kinds": kinds, "times": total, "counts": count,
    }  # fmt: skip
    print(
        f"{rows} x {tokens} tokens, {found['steps']:g} steps: wall {wall:.0f} us ({without:.0f} untraced), "
        f"busy {found['busy']:.0f}, gaps {found['gaps']:.0f} ({found['gaps within']:.0f} "
        f"between kernels), kernels {found['kernels']:.0f}, runner's dispatch {found['host']:.0f}"
    )
    print_kinds(kinds, rows, tokens, found["steps"], shape)
    print_kernels(total, count, top)
    return found


def profile(llm: Any, case: str, context: int, top: int, shape: Shape | None = None) -> dict[str, Any]:
    """Profile a case.

    Args:
        case: ``64``: steps of so many decoding rows; ``16x2048``: those of so many prompts of so many tokens.
        context: tokens before decoding rows' first step.
        top: kernels named.
        shape: of the model; None: nothing is said of its work.
    """
    rows, *tokens = map(int, case.split("x"))
    if not tokens:
        return profile_rows(llm, rows, context, top)
    return profile_prompts(llm, rows, *tokens, top, shape)


def scaled(case: str, scale: int) -> str:
    """The case with prompts shorter by so much."""
    rows, *tokens = case.split("x")
    return "x".join([rows, *(str(max(1, int(each) // scale)) for each in tokens)])


def shape_of(folder: Path) -> Shape | None:
    """What the model's work follows from; None, and a line, where its config does not say it as ``Shape`` reads it."""
    from offline import Shape

    try:
        return Shape.of(json.loads((folder / "config.json").read_text()))
    except (OSError, KeyError) as error:
        print(f"{folder}: operations and floors are left out: {error!r}", flush=True)
        return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder of benchmarks/models, or a path")
    parser.add_argument(
        "--profile", "--rows", default="1", help="decoding rows, and prompts as rows x tokens: 1,64,16x2048"
    )
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--top", type=int, default=16)
    parser.add_argument("--limit", type=float, default=60, help="seconds of one case")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    parser.add_argument("--arguments", type=json.loads, default={}, help="JSON of further LLM arguments")
    parser.add_argument("--verbose", action="store_true", help="show what the engine logs")
    options = parser.parse_args()
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8d ms %(message)s")
    from jaxserve import LLM

    folder = MODELS / options.model if (MODELS / options.model).is_dir() else Path(options.model)
    llm = LLM(
        str(folder), skip_tokenizer_init=True, load_format="dummy", enable_prefix_caching=False,
        **{"max_model_len": 16384, **options.arguments},
    )  # fmt: skip
    parts, shape = Parts(options.output, options.limit), shape_of(folder)
    for case in filter(None, options.profile.split(",")):
        name = case if "x" in case else f"{case} rows"
        parts.run(name, profile, llm, case, options.context, options.top, shape)
    return parts.end()


if __name__ == "__main__":
    sys.exit(main())
