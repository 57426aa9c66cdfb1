"""What the host does in a step, in ms of CPU time, with a fake device: how light is all but the model?

    python benchmarks/host.py --rows 256 512 1024

The real EngineCore, scheduler, batch builder, reading of the results and detokenizing (with SmolLM2's
tokenizer) drive decoding rows; only the device is the tests' FakeRunner, whose time is not counted. Printed
per number of rows: the median of each part, their sum with everything between them, and how that grows. CPU
time of the one thread that does all this is what it takes on a quiet machine, and little else on a busy one.
Targets: under 1 ms at 256 decoding rows, and linear growth from there to 1,024. ``--profile`` says which
functions the time goes to, ``--check`` exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests" / "support")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from fake_runner import FakePendingStep, FakeRow, FakeRunner  # noqa: E402

from jaxserve.config import EngineConfig  # noqa: E402
from jaxserve.engine.core import EngineCore  # noqa: E402
from jaxserve.engine.front import Front  # noqa: E402
from jaxserve.engine.output_processor import OutputProcessor  # noqa: E402
from jaxserve.runner.batch_builder import BatchBuilder, StepBatch  # noqa: E402
from jaxserve.runner.buckets import BucketTable  # noqa: E402
from jaxserve.runner.input_batch import InputBatch  # noqa: E402
from jaxserve.runner.pending_step import DispatchedStep  # noqa: E402
from jaxserve.sampling.sampler import SamplerOutput  # noqa: E402
from jaxserve.sampling_params import RequestOutputKind, SamplingParams  # noqa: E402
from jaxserve.step import EngineCoreOutputs, ModelRunnerOutput, RunnerInfo, SchedulerOutput  # noqa: E402

TARGET_MS = 1.0
TARGET_ROWS = 256
LINEAR_SLACK = 1.25
"""How much more than proportional the growth may be before it does not count as linear."""
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 49152
TEXT = (
    "A delta is a record of all the weather that ever fell upstream: rain loosens the rock, streams roll the "
    "stones, and where the current slackens the sand drops. "
    "Un café, s'il vous plaît — 3.50 €, merci! 你好，世界 🙂\n"
)


@dataclass
class Clock:
    """Seconds spent in each part of the step at hand."""

    parts: dict[str, float] = field(default_factory=dict)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, with its time added to ``part``."""

        def call(*args: Any) -> Any:
            started = thread_time()
            try:
                return function(*args)
            finally:
                self.parts[part] = self.parts.get(part, 0.0) + thread_time() - started

        return call

    def take(self) -> dict[str, float]:
        parts, self.parts = self.parts, {}
        return parts


class HostRunner:
    """The model runner's host side over a fake device: real batches are built, and nothing reads them."""

    def __init__(
        self, clock: Clock, rows: int, block_size: int, sampler: Callable[[FakeRow, int], int]
    ) -> None:
        budget = max(2 * rows, 512)
        num_blocks = rows * (MAX_MODEL_LEN // block_size) + 1
        self.device = FakeRunner(
            num_blocks,
            block_size,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            sampler=sampler,
            check=False,
        )
        self.batch = InputBatch(rows, VOCAB_SIZE)
        self.builder = BatchBuilder(BucketTable.build(budget, rows), block_size, rows)
        self.max_num_seqs, self.max_num_batched_tokens = rows, budget
        self._build = clock.timed("build batch", self._update_and_build)
        self._compute = clock.timed("device", self._run_device)
        self._clock = clock

    def initialize(self) -> RunnerInfo:
        return self.device.initialize()

    def execute(self, scheduler_output: SchedulerOutput) -> HostStep:
        step, sampling_rows = self._build(scheduler_output)
        pending, token_ids = self._compute(scheduler_output, step)
        return HostStep(self._clock, pending, step, sampling_rows, token_ids)

    def _update_and_build(self, step: SchedulerOutput) -> tuple[StepBatch, list[tuple[int, str]]]:
        for request_id in (*step.preempted_request_ids, *step.finished_request_ids):
            self.batch.remove(request_id)
        for request in step.new_requests:
            self.batch.add(request)
        for cached in step.cached_requests:
            self.batch.extend(cached)
        built = self.builder.build(self.batch, step)
        num_decode, ids = step.num_decode_rows, built.request_ids
        rows = list(enumerate(ids[:num_decode]))
        rows += [(i, ids[i]) for i in range(num_decode, len(ids)) if ids[i] in step.samples]
        return built, rows

    def _run_device(self, step: SchedulerOutput, built: StepBatch) -> tuple[FakePendingStep, np.ndarray]:
        pending = self.device.execute(step)
        sampled = pending._output.sampled_token_ids
        token_ids = np.zeros(built.bucket.num_rows, np.int32)
        for row, request_id in enumerate(built.request_ids):
            if request_id in sampled:
                (token_ids[row],) = sampled[request_id]
        return pending, token_ids

    def recover(self) -> None:
        raise RuntimeError("A step failed.")

    def num_compilations(self) -> int:
        return 0

    def close(self) -> None:
        self.device.close()


class HostStep:
    """A step whose results are read as the real runner reads them, from arrays that are on the host."""

    def __init__(
        self,
        clock: Clock,
        pending: FakePendingStep,
        step: StepBatch,
        rows: list[tuple[int, str]],
        token_ids: Any,
    ) -> None:
        sampled = SamplerOutput(token_ids=token_ids, logprobs=None)  # type: ignore[arg-type]
        self._pending = pending
        self._step = DispatchedStep(pending._output.step_id, sampled, rows, {}, [], lambda sampled: None)
        self._device, self._read = (
            clock.timed("device", pending.result),
            clock.timed("read", self._step.result),
        )

    def result(self) -> ModelRunnerOutput:
        self._device()
        return self._read()


class HostBench:
    """An engine core and an output processor with ``rows`` requests that decode without end."""

    def __init__(self, front: Front, rows: int, block_size: int, streamed: bool) -> None:
        assert front.tokenizer is not None
        self.clock, self.rows = Clock(), rows
        text = front.tokenizer.encode(TEXT, add_special_tokens=False)
        runner = HostRunner(self.clock, rows, block_size, lambda row, _: text[len(row.token_ids) % len(text)])
        config = EngineConfig.from_kwargs(
            max_num_seqs=runner.max_num_seqs, max_num_batched_tokens=runner.max_num_batched_tokens
        )
        self.core = EngineCore(config, runner)
        scheduler = self.core.scheduler
        scheduler.schedule = self.clock.timed("schedule", scheduler.schedule)
        scheduler.update_from_output = self.clock.timed("update", scheduler.update_from_output)
        scheduler.stats = self.clock.timed("update", scheduler.stats)
        self.outputs = OutputProcessor(front.tokenizer)
        self.process = self.clock.timed("detokenize", self.outputs.process_outputs)
        kind = RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY
        inputs = front.input_processor(config, self.core.info)
        params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=MAX_MODEL_LEN - 64, output_kind=kind
        )
        rng = random.Random(0)
        for index in range(rows):
            prompt = [rng.choice(text) for _ in range(rng.randrange(16, 64))]
            request = inputs.process(f"cmpl-{index:024x}", prompt, params)
            self.outputs.add_request(request)
            self.core.add_request(request.core_requests[0])

    def step(self) -> EngineCoreOutputs:
        outputs = self.core.step()
        self.process(outputs.outputs, outputs.timestamp)
        return outputs

    def warm_up(self) -> None:
        """Until every row decodes."""
        while len(self.step().outputs) < self.rows:
            pass
        for _ in range(20):
            self.step()
        self.clock.take()

    def measure(self, steps: int) -> dict[str, float]:
        """Medians in ms: the parts, "total" (all that is not the device) and "wire" (serving only).

        Of the total also "fast", the 5th percentile, which a busy machine hardly changes, and "mean", which
        holds the garbage collector's pauses.
        """
        samples: dict[str, list[float]] = {}
        encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(EngineCoreOutputs)
        gc.collect()
        for _ in range(steps):
            started = thread_time()
            outputs = self.step()
            total = thread_time() - started
            parts = self.clock.take()
            device = parts.pop("device")
            assert len(outputs.outputs) == self.rows, "every row decodes in every step"
            parts["other"] = total - device - sum(parts.values())
            parts["total"] = total - device
            started = thread_time()
            decoder.decode(encoder.encode(outputs))
            parts["wire"] = thread_time() - started
            for part, seconds in parts.items():
                samples.setdefault(part, []).append(seconds * 1e3)
        medians = {part: float(np.median(values)) for part, values in samples.items()}
        totals = samples["total"]
        return {**medians, "fast": float(np.percentile(totals, 5)), "mean": float(np.mean(totals))}


PARTS = ("schedule", "build batch", "read", "update", "detokenize", "other", "total", "fast", "mean", "wire")


def print_row(rows: int, medians: dict[str, float]) -> None:
    cells = " ".join(f"{medians[part]:11.3f}" for part in PARTS)
    print(f"{rows:>6} {cells} {medians['total'] / rows * 1e3:9.2f}", flush=True)


def check_targets(results: dict[int, dict[str, float]]) -> bool:
    """Print whether the targets are met, as far as these rows say."""
    met = True
    if TARGET_ROWS in results:
        total = results[TARGET_ROWS]["total"]
        met = total < TARGET_MS
        print(
            f"{total:.3f} ms at {TARGET_ROWS} rows: {'met' if met else 'MISSED'} (target: < {TARGET_MS:g} ms)"
        )
    fewest, most = min(results), max(results)
    if most > fewest:
        growth, linear = results[most]["total"] / results[fewest]["total"], most / fewest
        ok = growth <= linear * LINEAR_SLACK
        met = met and ok
        print(
            f"{growth:.2f} x from {fewest} to {most} rows: {'met' if ok else 'MISSED'} (linear: {linear:.2f})"
        )
    return met


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--steps", type=int, default=200, help="steps measured per number of rows")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--model", default="", help="whose tokenizer; default: the packaged SmolLM2")
    parser.add_argument(
        "--streamed", action="store_true", help="make an output per row and step, as for streams"
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where the time goes, per number of rows"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    arguments = parser.parse_args()

    front = Front.load(EngineConfig.from_kwargs(model=arguments.model).model_config)
    print(f"ms of CPU time per step, median of {arguments.steps}; load average {os.getloadavg()[0]:.1f}")
    print(f"{'rows':>6} " + " ".join(f"{part:>11}" for part in PARTS) + f" {'us/row':>9}")
    results: dict[int, dict[str, float]] = {}
    for rows in arguments.rows:
        bench = HostBench(front, rows, arguments.block_size, arguments.streamed)
        bench.warm_up()
        results[rows] = bench.measure(arguments.steps)
        print_row(rows, results[rows])
        if arguments.profile:
            with cProfile.Profile() as profile:
                for _ in range(arguments.steps):
                    bench.step()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    print("total: all but the device; fast: its 5th percentile; mean: with garbage collections.")
    print("wire: msgpack to the serving process and back, in two processes, not part of the total.")
    met = check_targets(results)
    return 0 if met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
