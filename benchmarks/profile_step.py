"""Where a decode step's time goes on a GPU: its kernels by total time, the gaps between them, and the host's share.

python benchmarks/profile_step.py --model qwen3-0.6b --rows 1,64

wall     time from one step's dispatch to the next one's, over the traced steps
busy     time in which the device ran anything
kernels  launches a step
host     time that EngineCore.step took before it waited for the device (schedule, build, dispatch)
"""

from __future__ import annotations

import argparse
import collections
import glob
import json
import logging
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

MODELS = Path(__file__).parent / "models"
SKIPPED, TRACED = 12, 20
"""Steps after the last prefill before the trace begins, and in it."""


class TracedSteps:
    """Stands in for ``llm._core.step``: traces some steps once every row decodes."""

    def __init__(self, core: Any, rows: int, folder: str) -> None:
        self._step, self._runner, self._rows, self._folder = core.step, core.runner, rows, folder
        self._execute = self._runner.execute
        self.dispatched: list[float] = []
        self.host: list[float] = []
        self._seen = 0
        core.step, self._runner.execute = self.step, self.execute

    def execute(self, scheduler_output: Any) -> Any:
        began = time.perf_counter()
        result = self._execute(scheduler_output)
        if scheduler_output.num_decode_rows == self._rows:
            self._seen += 1
            if SKIPPED < self._seen <= SKIPPED + TRACED:
                self.dispatched.append(began)
                self.host.append(time.perf_counter() - began)
        return result

    def step(self) -> Any:
        import jax

        if self._seen == SKIPPED and not self.dispatched:
            jax.profiler.start_trace(self._folder)
        if len(self.dispatched) == TRACED and self._folder:
            jax.profiler.stop_trace()
            self._folder = ""
        return self._step()

    def restore(self, core: Any) -> None:
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


def report(rows: int, traced: TracedSteps, events: list[tuple[str, float, float]], top: int) -> None:
    wall = 1e6 * float(np.median(np.diff(traced.dispatched)))
    host = 1e6 * float(np.median(traced.host))
    total: dict[str, float] = collections.defaultdict(float)
    count: dict[str, int] = collections.defaultdict(int)
    end = busy = 0.0
    for name, start, duration in events:
        name = re.sub(r"(_\d+)+$", "", name)[:90]
        total[name] += duration / TRACED
        count[name] += 1
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    print(
        f"{rows} rows: wall {wall:.0f} us, busy {busy / TRACED:.0f}, kernels {len(events) / TRACED:.0f}, "
        f"runner's dispatch {host:.0f}"
    )
    for name in sorted(total, key=total.__getitem__, reverse=True)[:top]:
        print(f"  {total[name]:9.1f} us  {count[name] / TRACED:6.1f} x  {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder of benchmarks/models, or a path")
    parser.add_argument("--rows", default="1")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--top", type=int, default=16)
    parser.add_argument("--arguments", type=json.loads, default={}, help="JSON of further LLM arguments")
    parser.add_argument("--verbose", action="store_true", help="show what the engine logs")
    options = parser.parse_args()
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8d ms %(message)s")
    from jaxserve import LLM, SamplingParams

    folder = MODELS / options.model if (MODELS / options.model).is_dir() else Path(options.model)
    llm = LLM(
        str(folder), skip_tokenizer_init=True, load_format="dummy", enable_prefix_caching=False,
        **{"max_model_len": 16384, **options.arguments},
    )  # fmt: skip
    rng = np.random.default_rng(0)
    core: Any = llm._core
    for rows in map(int, options.rows.split(",")):
        while_prefilling = rows * options.context // 2048  # tokens of the first rows, at the least
        params = SamplingParams(
            temperature=0,
            max_tokens=SKIPPED + TRACED + 24 + while_prefilling,
            ignore_eos=True,
            detokenize=False,
        )
        prompts = [rng.integers(8, 30000, options.context).tolist() for _ in range(rows)]
        with tempfile.TemporaryDirectory() as trace:
            traced = TracedSteps(core, rows, trace)
            llm.generate(prompts, params, use_tqdm=False)
            traced.restore(core)
            report(rows, traced, device_events(trace), options.top)


if __name__ == "__main__":
    main()
