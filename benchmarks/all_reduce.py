"""Time of one all-reduce between the GPUs of a host: NCCL's, gathers summed by each device, and ours.

    python benchmarks/all_reduce.py [--devices 2] [--rows 1,8,64,256,2048] [--widths 4096]

A program chains 64 of them after one small NCCL sum, each followed by a multiplication so that none can be dropped; the
time of the same program without the 64 is taken off. Wall time, the best of three times 20 programs. Ours run in a
process of their own that is ended when its time is up, so that one that hangs does not cost the others.
``ours:BLOCKS`` is the kernel with that many CTAs, ``alone:BLOCKS`` the same in programs without NCCL.
``norm:BLOCKS`` adds a residual and norms the stream in the same kernel; ``nccl_norm`` and ``ours_norm:BLOCKS`` do so
with XLA's kernels afterwards. ``worst`` is the largest difference from the float32 result in units of the result type's
rounding (0.5 is perfect), and ``same`` whether all devices hold the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CHAIN = 64
CALLS = 20
EPS = 1e-5
COMMAND_BUFFER = "--xla_gpu_enable_command_buffer=+COLLECTIVES"
FLAGS = {"nccl_graph": COMMAND_BUFFER}
"""Of XLA, for variants that need them."""
VARIANTS = (
    "nccl,nccl_norm,gather,permute,ours:16,ours:64,ours:264,ours_norm:16,norm:16,norm:64,norm:264,alone:64"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rows", default="1,8,64,256,2048")
    parser.add_argument("--widths", default="4096")
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--limit", type=float, default=90, help="seconds a process may take")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        measure(args.run.split(","), args)
        return
    variants = args.variants.split(",")
    ours = [each for each in variants if each.startswith(("ours", "norm"))]
    alone = [each for each in variants if each.startswith("alone") or each in FLAGS]
    others = [each for each in variants if each not in ours + alone]
    processes = [names for names in (others, ours, *([each] for each in alone)) if names]
    table: dict[tuple[int, int], dict[str, Any]] = {}
    for names in processes:
        for record in run_variant(names, args):
            if "note" in record:
                print(record["note"], flush=True)
                continue
            table.setdefault((record["width"], record["rows"]), {})[record["variant"]] = record
    report(table, variants)


def run_variant(names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The records that a process of its own prints before it ends or its time is up."""
    environment = dict(os.environ)
    if flags := FLAGS.get(names[0]):
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}"
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")
    command = [
        sys.executable, __file__, "--run", ",".join(names), "--devices", str(args.devices), "--rows", args.rows,
        "--widths", args.widths,
    ]  # fmt: skip
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=args.limit)
        end = f"exit {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        end = "stopped: its time was up"
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if process.returncode:
        tail = "\n".join(line for line in output.splitlines() if not line.startswith("{"))[-1500:]
        records.append({"note": f"{','.join(names)}: {end}\n{tail}"})
    records.append({"note": f"{','.join(names)}: {end}, {time.perf_counter() - begin:.0f} s"})
    return records


def report(table: dict[tuple[int, int], dict[str, Any]], variants: list[str]) -> None:
    """us per all-reduce, a row for each shape."""
    print("us per all-reduce (bfloat16)")
    print(f"{'width':>6} {'rows':>5} " + " ".join(f"{name:>10}" for name in variants) + "   worst same")
    for (width, rows), found in sorted(table.items()):
        cells = [f"{found[name]['us']:10.2f}" if name in found else f"{'-':>10}" for name in variants]
        worst = max(record["worst"] for record in found.values())
        same = all(record["same"] for record in found.values())
        print(f"{width:>6} {rows:>5} " + " ".join(cells) + f"   {worst:5.2f} {'yes' if same else 'NO'}")


def measure(names: list[str], args: argparse.Namespace) -> None:
    """In the process of its own: prints a record for each variant and shape."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import jax
    import numpy as np
    from jax.sharding import Mesh

    devices = jax.devices()[: args.devices]
    if len(devices) < args.devices:
        raise SystemExit(f"needs {args.devices} devices, has {len(devices)}")
    shapes = [(int(r), int(w)) for w in args.widths.split(",") for r in args.rows.split(",")]
    largest = max(rows * width * 2 for rows, width in shapes)
    mesh, peers, held = Mesh(np.array(devices), ("model",)), None, None
    if ":" in names[0]:
        from pallas_kernels.all_reduce.workspace import Workspaces

        held = Workspaces([devices], largest, trusting=True)
        peers = held.peers[0]
        print(json.dumps({"note": f"access flags {held.access}; 3 is read and write"}), flush=True)
        print(
            json.dumps({"note": f"workspaces of {largest} bytes a slot, peers {peers[0].tolist()}"}),
            flush=True,
        )
    jobs = [(name, shape) for name in (*names, "nothing") for shape in shapes]
    alone = names[0].startswith("alone:")
    programs = [Program(name, shape, mesh, peers, largest, alone) for name, shape in jobs]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(Program.compile, programs))
    idle = {program.shape: program.seconds() for program in programs if program.name == "nothing"}
    for program in programs:
        if program.name != "nothing":
            worst, same = program.check()
            us = (program.seconds() - idle[program.shape]) / CHAIN * 1e6
            rows, width = program.shape
            record = dict(variant=program.name, rows=rows, width=width, us=us, worst=worst, same=same)
            print(json.dumps(record), flush=True)
    del held


class Program:
    """A chain of one variant's all-reduces, and one of them alone."""

    def __init__(
        self, name: str, shape: tuple[int, int], mesh: Any, peers: Any, largest: int, alone: bool
    ) -> None:
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        self.name, self.shape = name, shape
        self.num_devices, size = mesh.size, shape[0] * mesh.size
        split, spec = NamedSharding(mesh, PartitionSpec("model")), PartitionSpec("model")
        self.split = split
        reduce = reducer(name, mesh.size, largest)
        tables = peers if peers is not None else [[0]] * mesh.size
        self.peers = jax.device_put(jnp.asarray(tables, jnp.int32), split)

        def chain(x: Any, peers: Any) -> Any:
            x, stream = met(x), jnp.zeros_like(x)
            for _ in range(CHAIN):
                x, stream = reduce(x, peers[0], stream)
                x = x * jnp.bfloat16(1 / mesh.size)
            return x + stream

        def once(x: Any, peers: Any) -> Any:
            return reduce(met(x), peers[0], jnp.zeros_like(x))[0]

        def met(x: Any) -> Any:
            """By a sum of NCCL's, all devices start the program together."""
            if alone:
                return x
            return x * (jax.lax.psum(x[:1, :128] * 0 + 1, "model")[0, 0] / mesh.size)

        def jit(function: Any, **options: Any) -> Any:
            mapped = jax.shard_map(
                function, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
            )
            return jax.jit(mapped, **options)

        abstract = jax.ShapeDtypeStruct((size, shape[1]), jnp.bfloat16, sharding=split)
        self.lowered = [
            jit(chain, donate_argnums=0).lower(abstract, self.peers), jit(once).lower(abstract, self.peers)
        ]  # fmt: skip

    def compile(self) -> None:
        self.chain, self.once = [each.compile() for each in self.lowered]

    def seconds(self) -> float:
        """Of one chain."""
        import jax
        import jax.numpy as jnp

        rows, width = self.shape
        x = jax.device_put(jnp.ones((rows * self.num_devices, width), jnp.bfloat16), self.split)
        for _ in range(3):
            x = self.chain(x, self.peers)
        best = float("inf")
        for _ in range(3):
            jax.block_until_ready(x)
            begin = time.perf_counter()
            for _ in range(CALLS):
                x = self.chain(x, self.peers)
            jax.block_until_ready(x)
            best = min(best, (time.perf_counter() - begin) / CALLS)
        return best

    def check(self) -> tuple[float, bool]:
        """The largest error in units of half a rounding's double, and whether devices agree to the bit."""
        import jax
        import ml_dtypes
        import numpy as np

        rows, width = self.shape
        rng = np.random.default_rng(rows)
        parts = rng.standard_normal((self.num_devices, rows, width), np.float32).astype(ml_dtypes.bfloat16)
        x = jax.device_put(parts.reshape(-1, width), self.split)
        found = np.asarray(self.once(x, self.peers)).reshape(parts.shape)
        exact = parts.astype(np.float32).sum(0)
        if "norm" in self.name:
            exact = exact.astype(parts.dtype).astype(np.float32)
            exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + EPS)
        unit = np.maximum(np.abs(exact), 1e-3) * 2.0**-7
        worst = float((np.abs(found.astype(np.float32) - exact) / unit).max())
        bits = found.view(np.uint16)
        return worst, bool((bits == bits[:1]).all())


def reducer(name: str, num_devices: int, largest: int) -> Any:
    """A variant's step: of [T, M], this device's table of peers and the residual stream, to the first and the last."""
    import jax.numpy as jnp
    from jax import lax

    from pallas_kernels.all_reduce.reference import ordered_sum
    from pallas_kernels.rms_norm.dispatch import PLAIN

    kind, _, blocks = name.partition(":")
    kernel: Any = None
    if blocks:
        from pallas_kernels.all_reduce.gpu import GpuAllReduce

        kernel = GpuAllReduce(num_devices, largest, ((largest, int(blocks)),), norm_bytes=largest)

    def normed(add: Any) -> Any:
        def step(x: Any, peers: Any, stream: Any) -> Any:
            stream = add(x, peers, stream)
            return PLAIN(stream, jnp.ones(x.shape[-1:], x.dtype), EPS), stream

        return step

    def fused(x: Any, peers: Any, stream: Any) -> Any:
        stream, x = kernel.with_norm(x, peers, stream, jnp.ones(x.shape[-1:], x.dtype), EPS)
        return x, stream

    steps: dict[str, Any] = {
        "nothing": lambda x, peers, stream: (lax.optimization_barrier(x), stream),
        "nccl": lambda x, peers, stream: (lax.psum(x, "model"), stream),
        "nccl_graph": lambda x, peers, stream: (lax.psum(x, "model"), stream),
        "nccl_norm": normed(lambda x, peers, stream: stream + lax.psum(x, "model")),
        "gather": lambda x, peers, stream: (ordered_sum(x, "model"), stream),
        "permute": lambda x, peers, stream: (x + lax.ppermute(x, "model", [(0, 1), (1, 0)]), stream),
        "ours": lambda x, peers, stream: (kernel(x, peers), stream),
        "alone": lambda x, peers, stream: (kernel(x, peers), stream),
        "ours_norm": normed(lambda x, peers, stream: kernel(x, peers, stream)),
        "norm": fused,
    }
    if kind not in steps or (kind == "permute" and num_devices != 2):
        raise SystemExit(f"unknown variant {name} of {num_devices} devices")
    return steps[kind]


if __name__ == "__main__":
    main()
