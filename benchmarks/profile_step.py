"""Where a decode step's time goes on a GPU: its kernels by total time, the gaps between them, and the host's share.

    python benchmarks/profile_step.py --model qwen3-0.6b --rows 1,64      # 5 s a row count after the engine's start

``offline.py --profile 1,64`` does the same in the engine that it measures. All times are of one decode step, also where
one dispatch holds several.

wall     time from one dispatch to the next one's, over the traced steps
busy     time in which the device ran anything; the rest of wall is gaps
kernels  launches a step
host     time that the runner took to build and dispatch
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
from pathlib import Path
from typing import Any

import numpy as np
from parts import Parts

MODELS = Path(__file__).parent / "models"
SKIPPED, TRACED = 12, 20
"""Decode steps of all rows before the trace begins, and in it at the least."""
SLACK = 100
"""Further tokens of a row: dispatches of several steps end later, and some run ahead."""


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
            jax.profiler.start_trace(self._folder)
            self._tracing = True
        if self.steps >= TRACED and self._tracing:
            self.stop()
        return self._step()

    def stop(self) -> None:
        import jax

        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()

    def restore(self, core: Any) -> None:
        self.stop()
        core.step, self._runner.execute = self._step, self._execute


def device_events(folder: str) -> list[tuple[str, float, float]]:
    """(name, start us, duration us) of everything the device ran, by start."""
    import jax

    [file] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    events: list[tuple[str, float, float]] = []
    for plane in jax.profiler.ProfileData.from_file(file).planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    events += [(e.name, e.start_ns / 1e3, e.duration_ns / 1e3) for e in line.events]
    return sorted(events, key=lambda event: event[1])


def report(
    rows: int, traced: TracedSteps, events: list[tuple[str, float, float]], top: int
) -> dict[str, Any]:
    """Print, and return, where a step's time went, in us."""
    times, host, steps = (np.array(column) for column in zip(*traced.dispatches, strict=True))
    wall = 1e6 * float(np.median(np.diff(times) / steps[:-1])) if len(times) > 1 else float("nan")
    total: dict[str, float] = collections.defaultdict(float)
    count: dict[str, int] = collections.defaultdict(int)
    end = busy = 0.0
    for name, start, duration in events:
        name = re.sub(r"(_\d+)+$", "", name)[:90]
        total[name] += duration / traced.steps
        count[name] += 1
        busy += max(0.0, start + duration - max(start, end)) / traced.steps
        end = max(end, start + duration)
    found = {
        "rows": rows, "wall": wall, "busy": busy, "kernels": len(events) / traced.steps,
        "host": 1e6 * float(np.median(host / steps)), "steps a dispatch": float(np.mean(steps)), "times": dict(total),
    }  # fmt: skip
    print(
        f"{rows} rows: wall {wall:.0f} us, busy {busy:.0f}, kernels {found['kernels']:.0f}, runner's dispatch "
        f"{found['host']:.0f}, {found['steps a dispatch']:.1f} steps a dispatch"
    )
    for name in sorted(total, key=total.__getitem__, reverse=True)[:top]:
        print(f"  {total[name]:9.1f} us  {count[name] / traced.steps:6.1f} x  {name}", flush=True)
    return found


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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder of benchmarks/models, or a path")
    parser.add_argument("--rows", default="1")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--top", type=int, default=16)
    parser.add_argument("--limit", type=float, default=60, help="seconds of one row count")
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
    parts = Parts(options.output, options.limit)
    for rows in map(int, options.rows.split(",")):
        parts.run(f"{rows} rows", profile_rows, llm, rows, options.context, options.top)
    return parts.end()


if __name__ == "__main__":
    sys.exit(main())
