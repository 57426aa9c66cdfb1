"""The Hopper kernels on this machine's GPU: checked against the float32 oracle, then measured.

    python benchmarks/kernels.py                     # check and measure everything
    python benchmarks/kernels.py --sections decode   # some of: ceilings check invariance decode prefill mixed ...
    python benchmarks/kernels.py --sections sweep prefill_sweep --ours-only   # other configurations
    python benchmarks/kernels.py --json out.json     # the figures as data too
    python benchmarks/kernels.py --sections grouped --tiny   # whether it runs, interpreted, on any machine

Each section runs in processes of its own with a time limit, so one that hangs or crashes costs only itself; its figures
are printed and saved as they come. Those of attention and dense products run side by side: they check and compile at
the same time, and then measure one at a time. Seconds on an H200 with 16 cores: check 45, invariance 20, and beside
them decode, prefill and mixed together 90; grouped 60, dense 90, each sweep 100 to 150.

    kernel     median time of one launch, from the profiler
    layer      the whole operation as it stands in a layer: from the first kernel's start to the last one's end over
               the layers of one program, gaps included (cache write, attention, merge)
    of ceiling TB/s over a large copy's (bytes read and written), TFLOP/s over an 8,192-cubed matrix product's, in the
               same run

Beside ours: JAX's deprecated ``pallas.ops.gpu.paged_attention`` (the best of a few splits), a gather of the cache
by XLA, and for prefill cuDNN's dense attention, which knows no pages. Every layer of a program has its own cache, so
that the caches of one pass together exceed the L2.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import glob
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attention_checks
import attention_times
import numpy as np
from attention_times import BLOCK, HEAD_SIZE, KV_HEADS

sys.path.insert(0, str(Path(__file__).parents[1]))

SECTIONS = {
    "check": 240,
    "invariance": 120,
    "ceilings": 240,
    "decode": 240,
    "prefill": 240,
    "mixed": 240,
    "sweep": 240,
    "prefill_sweep": 240,
    "grouped": 300,
    "dense": 300,
    "dense_layers": 300,
    "grouped_sweep": 400,
    "dense_sweep": 300,
    "dense_bits": 200,
    "dense_invariant": 300,
}
"""Section: its time limit in seconds; of those that measure in turn, from when the first may begin."""

ATTENTION_TIMED = ("decode", "prefill", "mixed", "sweep", "prefill_sweep")
DENSE_TIMED = ("dense", "dense_layers", "dense_sweep", "dense_invariant")
OF_INVARIANCE = ("dense_bits", "dense_invariant")
IN_TURN = ("ceilings", *ATTENTION_TIMED, *DENSE_TIMED)
"""Sections that compile beside others and then wait for their turn to measure."""
TOGETHER = ("check", "invariance", *IN_TURN)

SHARDS = {
    "check": 8, "decode": 4, "prefill": 3, "sweep": 6, "prefill_sweep": 2, "dense": 5, "dense_layers": 3,
    "dense_sweep": 4, "dense_bits": 4, "dense_invariant": 4,
}  # fmt: skip
"""Sections that mostly compile, and so run as several processes at a time."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sections",
        nargs="+",
        default=[each for each in SECTIONS if "sweep" not in each and each not in OF_INVARIANCE],
        choices=list(SECTIONS),
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--override",
        default="{}",
        help='configuration, as {"decode": {...}, "prefill": {...}, "grouped": {...}, "dense": {"64": {...}}}; of '
        'dense_sweep: {"dense": {"sweep": {"8b": {"qkv": {"64": [{...}, ...]}}}}}',
    )
    parser.add_argument("--ours-only", action="store_true", help="leave out what ours is compared with")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="interpreted, without a GPU, in sizes for that; times mean nothing",
    )
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        globals()[f"section_{args.in_process}"](Context(json.loads(args.override), args.ours_only, args.tiny))
        return 0
    if args.tiny and (refused := set(args.sections) - {"grouped", *ATTENTION_TIMED}):
        parser.error(f"--tiny is not for --sections {' '.join(sorted(refused))}")
    records: list[dict[str, Any]] = []
    together = [each for each in TOGETHER if each in args.sections]
    for sections in ([together] if together else []) + [[s] for s in args.sections if s not in TOGETHER]:
        began = time.time()
        run_sections(sections, args, records)
        print(f"# {' '.join(sections)}: {time.time() - began:.0f} s", flush=True)
    report(records)
    if table := attention_times.markdown(records):
        print(table)
    return 1 if any(r["name"] == "FAILED" or r.get("wrong") for r in records) else 0


@dataclass
class Running:
    """One process of a section."""

    section: str
    process: subprocess.Popen[bytes]
    out: Any
    ready: Path
    failure: str = ""
    printed: int = 0
    """Records that have been shown."""

    def show(self) -> list[str]:
        """Its whole lines so far; records among them are printed once, so that an interrupted run leaves them."""
        written = os.pread(self.out.fileno(), os.fstat(self.out.fileno()).st_size, 0).decode(errors="replace")
        lines = [line for line in written.splitlines(keepends=True) if line.endswith("\n") or self.is_done()]
        records = [line.strip() for line in lines if line.startswith('{"section"')]
        for line in records[self.printed :]:
            print(line, flush=True)
        self.printed = len(records)
        return [line.rstrip("\n") for line in lines]

    def is_done(self) -> bool:
        return self.process.poll() is not None

    def stop(self, why: str) -> None:
        self.process.kill()
        self.process.wait()
        self.failure = why


def run_sections(sections: Sequence[str], args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """Run sections side by side in processes of their own; adds what they emitted, and a record of each failure.

    Those that measure are let go when the others are done and all of them are ready; a lock lets them in one by one.
    """
    with tempfile.TemporaryDirectory() as name:
        turns = Path(name)
        running = [each for section in sections for each in start(section, args, turns)]
        began, go = time.time(), turns / "go"
        while running:
            for each in [each for each in running if each.is_done()]:
                running.remove(each)
                records += collect(each)  # now, so that an interrupted run leaves what it found
                if args.json:
                    args.json.write_text(json.dumps(records, indent=1))
            for each in running:
                each.show()
            measuring = [each for each in running if each.section in IN_TURN]
            others = [each for each in running if each.section not in IN_TURN]
            if not go.exists() and not others and all(each.ready.exists() for each in measuring):
                go.touch()
                print(f"# compiled and checked after {time.time() - began:.0f} s", flush=True)
                began = time.time()
            for each in measuring + others:
                if time.time() - began > SECTIONS[each.section]:
                    each.stop(f"hung: stopped after {SECTIONS[each.section]} s")
            time.sleep(0.1)


def start(section: str, args: argparse.Namespace, turns: Path) -> list[Running]:
    shards = SHARDS.get(section, 1)
    command = [sys.executable, __file__, "--in-process", section, "--override", args.override]
    command += ["--ours-only"] if args.ours_only else []
    command += ["--tiny"] if args.tiny else []
    started = []
    for shard in range(shards):
        out, ready = tempfile.TemporaryFile("w+"), turns / f"{section}.{shard}"  # noqa: SIM115
        environment = {
            **os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "KERNELS_SHARD": f"{shard}/{shards}",
            "KERNELS_READY": str(ready),
        }  # fmt: skip
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        started.append(Running(section, process, out, ready))
    return started


def collect(each: Running) -> list[dict[str, Any]]:
    failure = each.failure or ("" if each.process.returncode == 0 else "failed")
    lines = each.show()
    records = [json.loads(line) for line in lines if line.startswith('{"section"')]
    if failure:
        records.append({"section": each.section, "name": "FAILED", "error": failure})
        print(f"{each.section}: {failure}")
    said = [line for line in lines if not line.startswith('{"section"')]
    said = said[-25:] if failure else [line for line in said if line.startswith("#")]
    print("\n".join(said), end="\n" if said else "", flush=True)
    return records


def report(records: list[dict[str, Any]]) -> None:
    ceiling = {r["name"]: r["value"] for r in records if r["section"] == "ceilings" and "value" in r}
    print(
        f"\nceilings: copy {ceiling.get('copy', 0):.2f} TB/s, product {ceiling.get('product', 0):.0f} TFLOP/s"
    )
    for r in records:
        if r["section"] in ("check", "invariance", "dense_bits") or "met" in r:
            print("  ".join(f"{key} {value}" for key, value in r.items() if key != "section"))
    print(
        f"{'shape':30} {'path':46} {'kernel us':>9} {'layer us':>9} {'rate':>13} {'ceiling':>8} {'target':>12}"
    )
    for r in records:
        if "kernel_us" not in r:
            if "path" in r and "error" in r:
                print(f"{r['name']:30} {r['path']:46} {r['error']}")
            continue
        unit = r["unit"]
        top = ceiling.get("copy" if unit == "TB/s" else "product")
        share = f"{r['rate'] / top:.0%}" if top else "-"
        rate = f"{r['rate']:.2f} {unit}" if unit == "TB/s" else f"{r['rate']:.0f} {unit}"
        print(
            f"{r['name']:30} {r['path']:46} {r['kernel_us']:9.1f} {r['layer_us']:9.1f} {rate:>13} {share:>8} "
            f"{r.get('target', ''):>12}" + (f"  error {r['error']}" if "error" in r else "")
        )


def emit(**record: Any) -> None:
    print(json.dumps(record), flush=True)


class Context:
    """JAX, our backend and random batches; only made in a section's process."""

    def __init__(self, override: dict[str, dict[str, int]], ours_only: bool, tiny: bool = False):
        import jax
        import jax.numpy as jnp

        from pallas_kernels.ragged_paged_attention import gpu
        from pallas_kernels.ragged_paged_attention.gpu_decode_plan import DecodeConfig
        from pallas_kernels.ragged_paged_attention.gpu_prefill_plan import PrefillConfig

        if not tiny and (why_not := gpu.device_why_not()) is not None:
            sys.exit(why_not)
        self.jax, self.jnp, self.ours_only, self.tiny = jax, jnp, ours_only, tiny
        self.grouped = override.get("grouped", {})
        self.dense = override.get("dense", {})
        decode, prefill = gpu._tuned("decode", HEAD_SIZE), gpu._tuned("prefill", HEAD_SIZE)
        interpret = None
        if tiny:
            from jax.experimental.pallas import mosaic_gpu as plgpu

            interpret = plgpu.InterpretGPUParams()
        self.tuned = gpu.GpuBackend(
            num_sms=2 if tiny else None,
            interpret=interpret,
            decode=DecodeConfig(**{**decode, **override["decode"]}) if "decode" in override else None,
            prefill=PrefillConfig(**{**prefill, **override["prefill"]}) if "prefill" in override else None,
        )
        self.stored_head_size = gpu.stored_head_size
        self.rng = np.random.default_rng(int(time.time_ns()) % 2**32)

    def await_turn(self) -> None:
        """Say that everything is compiled, and wait until this process may have the device to itself."""
        ready = os.environ.get("KERNELS_READY")
        if ready is None:
            return
        self.jax.block_until_ready(self.jnp.zeros(1) + 1)
        Path(ready).touch()
        while not Path(ready).with_name("go").exists():
            time.sleep(0.02)
        self.turn = open(Path(ready).with_name("turn"), "w")  # noqa: SIM115 - until the process ends
        fcntl.flock(self.turn, fcntl.LOCK_EX)

    def profile(self, run: Callable[[], Any]) -> Any:
        return profile(self, run)

    def kernel_and_layer(
        self, runs: Any, num_layers: int, match: Callable[[str], bool]
    ) -> tuple[float, float]:
        return kernel_and_layer(runs, num_layers, match)

    def random(self, *shape: int, dtype: Any = None) -> Any:
        key = self.jax.random.key(int(self.rng.integers(2**31)))
        return self.jax.random.normal(key, shape, dtype or self.jnp.bfloat16)

    def batch(self, rows, *, block_size=BLOCK, pad_tokens=0, pad_rows=0, decode_only=None):
        """Metadata of rows (context with the new tokens, new tokens), decoding rows first, in shuffled blocks.

        Returns (metadata, number of blocks, slots that hold cached tokens).
        """
        from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata

        live = sum(new for _, new in rows)
        num_rows = len(rows) + pad_rows
        num_tokens = live + pad_tokens
        needed = [-(-context // block_size) for context, _ in rows]
        num_blocks = sum(needed) + 1
        ids = self.rng.permutation(np.arange(1, num_blocks))
        tables = np.zeros((num_rows, max(needed, default=1)), np.int32)
        seq_lens, starts = np.zeros(num_rows, np.int32), np.zeros(num_rows + 1, np.int32)
        positions, row_ids = np.zeros(num_tokens, np.int32), np.full(num_tokens, num_rows - 1, np.int32)
        slots = np.full(num_tokens, num_blocks * block_size, np.int32)
        cached = []
        at = taken = 0
        for row, (context, new) in enumerate(rows):
            tables[row, : needed[row]] = ids[taken : taken + needed[row]]
            taken += needed[row]
            where = np.arange(context)
            slot = tables[row, where // block_size] * block_size + where % block_size
            cached.append(slot[: context - new])
            slots[at : at + new] = slot[context - new :]
            positions[at : at + new], row_ids[at : at + new] = where[context - new :], row
            seq_lens[row] = context
            at += new
            starts[row + 1] = at
        starts[len(rows) + 1 :] = at
        decode = next((i for i, (_, new) in enumerate(rows) if new != 1), len(rows))
        arrays = (
            seq_lens,
            tables,
            starts,
            np.asarray([decode, decode, len(rows)], np.int32),
            slots,
            positions,
            row_ids,
        )
        if decode_only is None:
            decode_only = decode == len(rows) and num_tokens == num_rows
        metadata = AttentionMetadata(*map(self.jnp.asarray, arrays), decode_only=decode_only)
        return metadata, num_blocks, np.concatenate([np.zeros(0, np.int64), *cached])

    def layers(self, num_layers, options, num_kv_heads=KV_HEADS, backend=None):
        """A program of some layers of our attention, each on its own cache, chained by the queries."""
        backend = backend or self.tuned

        @functools.partial(self.jax.jit, donate_argnums=3)
        def program(q, k, v, caches, metadata):
            plan = backend.prepare(
                metadata, options, num_tokens=q.shape[0], num_heads=q.shape[1], num_kv_heads=num_kv_heads,
                head_size=q.shape[2], kv_cache=caches[0],
            )  # fmt: skip
            out = []
            for cache in caches:
                q, cache = backend.update_and_attend(q, k, v, cache, metadata, options, None, plan)
                out.append(cache)
            return q, out

        return program


def profile(
    context: Context, run: Callable[[], Any], repeats: int = 6
) -> list[list[tuple[str, float, float]]]:
    """Device events (name, start us, duration us) of each of ``repeats`` runs, in order of start."""
    jax = context.jax
    if context.tiny:
        jax.block_until_ready(run())
        return [[("paged_update paged_decode paged_prefill", 0.0, 1.0)]]
    for _ in range(3):
        jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                jax.block_until_ready(run())
        [file] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(file)
        events = []
        for plane in data.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    events += [(e.name, e.start_ns / 1e3, e.duration_ns / 1e3) for e in line.events]
    events.sort(key=lambda e: e[1])
    per_run, rest = divmod(len(events), repeats)
    if rest or not events:
        raise RuntimeError(
            f"{len(events)} events in {repeats} equal runs: {sorted({e[0] for e in events})[:20]}"
        )
    return [events[n * per_run : (n + 1) * per_run] for n in range(repeats)]


def kernel_and_layer(runs, num_layers: int, match: Callable[[str], bool]) -> tuple[float, float]:
    """Median time of the matching kernels of one layer, and of a layer from first start to last end, in us."""
    kernel, layer = [], []
    for events in runs:
        ours = [e for e in events if match(e[0])]
        if not ours:
            continue
        kernel.append(sum(e[2] for e in ours) / num_layers)
        layer.append((ours[-1][1] + ours[-1][2] - ours[0][1]) / num_layers)
    if not kernel:
        names = sorted({e[0] for events in runs for e in events})
        raise RuntimeError(f"no kernel matched; the profile has {names[:20]}")
    return float(np.median(kernel)), float(np.median(layer))


def section_ceilings(context: Context) -> None:
    jax, jnp = context.jax, context.jnp
    context.await_turn()
    x = context.random(2**30)
    copy = jax.jit(jnp.copy)
    seconds = wall(context, lambda: copy(x), 5)  # noqa: F821
    emit(section="ceilings", name="copy", value=2 * x.nbytes / seconds / 1e12)
    del x
    a, b = context.random(8192, 8192), context.random(8192, 8192)
    product = jax.jit(jnp.dot)
    seconds = wall(context, lambda: product(a, b), 10)
    emit(section="ceilings", name="product", value=2 * 8192**3 / seconds / 1e12)


def wall(context: Context, run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a run, each waited for."""
    for _ in range(3):
        context.jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        context.jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return float(np.median(times))


# --- right -----------------------------------------------------------------------------------------------------


def section_check(context: Context) -> None:
    attention_checks.check(context, emit)


def section_invariance(context: Context) -> None:
    attention_checks.invariance(context, emit)


# --- fast ------------------------------------------------------------------------------------------------------


def section_decode(context: Context) -> None:
    attention_times.decode(context, emit)


def section_prefill(context: Context) -> None:
    attention_times.prefill(context, emit)


def section_mixed(context: Context) -> None:
    attention_times.mixed(context, emit)


def section_sweep(context: Context) -> None:
    """Decode under other configurations."""
    attention_times.sweep(context, emit)


def section_prefill_sweep(context: Context) -> None:
    """Prefill under other configurations."""
    attention_times.prefill_sweep(context, emit)


# --- experts ---------------------------------------------------------------------------------------------------


def product_times(context: Context, run: Callable[[], Any], products: int) -> tuple[float, float]:
    """us of one product's kernel (all kernels, where it is not ours), and of a product from first start to last end."""
    if context.tiny:
        began = time.perf_counter()
        context.jax.block_until_ready(run())
        us = (time.perf_counter() - began) * 1e6 / products
        return us, us
    runs = profile(context, run)
    _, layer = kernel_and_layer(runs, products, lambda name: True)
    ours = [name for name, _, _ in runs[0] if "grouped_matmul" in name]
    return kernel_and_layer(runs, products, lambda name: not ours or name in ours)[0], layer


def section_grouped(context: Context) -> None:
    import grouped_products

    size, interpret = grouped_products.Size(), None
    if context.tiny:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        size, interpret = grouped_products.TINY, plgpu.InterpretGPUParams()
    timed = functools.partial(product_times, context)
    grouped_products.run(context, emit, timed, size=size, override=context.grouped, interpret=interpret)


def section_grouped_sweep(context: Context) -> None:
    import grouped_products

    timed = functools.partial(product_times, context)
    grouped_products.sweep(context, emit, timed, size=grouped_products.Size())


def dense_times(context: Context, run: Callable[[], Any], products: int, name: str) -> tuple[float, float]:
    """us of the kernels of a product whose names hold ``name``, and of a product from first start to last end."""
    runs = profile(context, run)
    layer = kernel_and_layer(runs, products, lambda each: True)[1]
    return kernel_and_layer(runs, products, lambda each: name in each)[0], layer


def section_dense(context: Context) -> None:
    import dense_products

    dense_products.run(context, emit, functools.partial(dense_times, context))


def section_dense_layers(context: Context) -> None:
    import dense_layers

    def profiled(run: Callable[[], Any], layers: int) -> float:
        return kernel_and_layer(profile(context, run), layers, lambda name: True)[1]

    dense_layers.run(context, emit, profiled)


def section_dense_bits(context: Context) -> None:
    import dense_products

    dense_products.bits(context, emit)


def section_dense_invariant(context: Context) -> None:
    import dense_products

    dense_products.invariant(context, emit, functools.partial(dense_times, context))


def section_dense_sweep(context: Context) -> None:
    import dense_products

    dense_products.sweep(context, emit, functools.partial(dense_times, context))


if __name__ == "__main__":
    sys.exit(main())
