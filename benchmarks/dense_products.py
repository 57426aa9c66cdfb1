"""The sections ``dense``, ``dense_sweep`` and ``dense_bits`` of kernels.py: dense products of three models' layers.

The models are Llama 8B, Qwen3 0.6B and Qwen3 30B-A3B.

Every product is what the layer needs: gate and up with silu(gate) * up, out and down with the residual added, logits
in float32. Beside ours the same with XLA's product (as the engine lets it choose), all its kernels counted. The layers
of a program have weights of their own, which together exceed the L2. Rates count weights, rows and results once.

A record of section ``invariance`` says for which numbers of rows the first rows' bits differ from those of 8 rows.
``dense_bits`` compares the kernel with one chunk and XLA's products as a batch-invariant engine pins them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

KINDS = {"qkv": "plain", "out": "residual", "gate_up": "gated", "down": "residual", "logits": "float32"}
SHAPES = {
    "8b": {
        "qkv": (6144, 4096),
        "out": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "logits": (128256, 4096),
    },
    "0.6b": {
        "qkv": (4096, 1024),
        "out": (1024, 2048),
        "gate_up": (6144, 1024),
        "down": (1024, 3072),
        "logits": (151936, 1024),
    },
    "30b": {"qkv": (5120, 2048), "out": (2048, 4096)},
}
"""Outputs, contracted."""
ROWS = {"8b": (1, 8, 32, 64, 128, 256, 2048, 8192), "0.6b": (1, 8, 64, 128, 256), "30b": (1, 8, 64, 128, 256)}
L2 = 120 << 20
"""Bytes of weights of a program's layers together, at least: twice the cache and more."""
FEWEST_LAYERS = 5
"""So many are launched as a graph, without the host's pauses; logits, which take long enough, have 1 or more."""
SMALL = {"qkv": (960, 576), "out": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
"""SmolLM2 135M, for ``dense_bits``."""
BITS_ROWS = (8, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1536, 2048, 4096, 8192)
SWEEP: dict[str, dict[str, dict[int, list[dict[str, int]]]]] = {
    "8b": {
        "qkv": {
            8: [dict(width=8, step=128, stages=12, consumers=1)],
            128: [
                dict(width=128, step=64, stages=8, consumers=1),
                dict(width=128, step=128, stages=4, consumers=1),
            ],
            256: [
                dict(width=256, step=64, stages=5, consumers=1),
                dict(width=256, step=64, stages=5, consumers=1, cluster=2),
                dict(width=128, step=64, stages=6, cluster=2, chunks=1),
            ],
        },
        "out": {
            8: [
                dict(width=8, step=128, stages=10, consumers=1),
                dict(width=8, step=128, stages=10, consumers=1, chunks=2),
            ],
            64: [
                dict(width=64, step=128, stages=6, consumers=1),
                dict(width=64, step=128, stages=6, consumers=1, chunks=2),
            ],
            128: [
                dict(width=128, step=64, stages=8, consumers=1),
                dict(width=128, step=64, stages=8, consumers=1, chunks=2),
            ],
        },
        "gate_up": {1: [dict(width=8, step=128, stages=6, hand_over=0)]},
        "down": {
            128: [
                dict(width=128, step=64, stages=8, consumers=1, chunks=1),
                dict(width=128, step=64, stages=8, consumers=1, chunks=4),
            ],
        },
    },
    "0.6b": {
        "qkv": {
            64: [dict(width=64, step=128, stages=6, consumers=1)],
            128: [dict(width=128, step=64, stages=8, consumers=1)],
        },
        "down": {
            64: [dict(width=64, step=128, stages=6, consumers=1)],
            128: [dict(width=128, step=64, stages=8, consumers=1)],
        },
    },
}
"""Configurations tried, by model, product and rows; ``chunks`` is not one's part, and changes the bits."""


class Tools(Protocol):
    """What kernels.py lends."""

    jax: Any
    jnp: Any
    rng: np.random.Generator
    ours_only: bool
    dense: dict[str, Any]

    def random(self, *shape: int, dtype: Any = None) -> Any: ...

    def await_turn(self) -> None: ...


XLAS = ("xla", "pinned")
"""Paths of XLA: its timed choice, and as a batch-invariant engine has it."""
INVARIANT_ROWS = (128, 192, 256, 512, 8192)

Timed = Callable[[Callable[[], Any], int, str], tuple[float, float]]
"""(run, products in it, name of the kernel or "") to us of a product's kernels, and of all that belongs to it."""


@dataclass(frozen=True)
class Case:
    """One product with some rows, computed one way.

    Args:
        path: ``ours``, one of ``XLAS``, ``one chunk`` (ours of a batch-invariant engine), or a configuration of ours.
        multiply: (x, weight, residual) to the result.
    """

    model: str
    name: str
    rows: int
    path: str
    multiply: Callable[..., Any]

    @property
    def shape(self) -> tuple[int, int]:
        return SHAPES[self.model][self.name]

    @property
    def kind(self) -> str:
        return KINDS[self.name]


def ours(tools: Tools, kind: str, config: dict[str, int] | None) -> Callable[..., Any]:
    from pallas_kernels.dense_matmul.gpu import GpuDenseMatmul
    from pallas_kernels.dense_matmul.gpu_tuning import Config

    config = dict(config or {})
    chunks = config.pop("chunks", None)
    kernel = GpuDenseMatmul(always=True, chunks=chunks, config=Config(**config) if config else None)
    return by_kernel(tools, kind, kernel)


def one_chunk(tools: Tools, kind: str) -> Callable[..., Any]:
    """Ours of a batch-invariant engine."""
    from pallas_kernels.dense_matmul.gpu import GpuDenseMatmul

    return by_kernel(tools, kind, GpuDenseMatmul(always=True, invariant=True))


def by_kernel(tools: Tools, kind: str, kernel: Any) -> Callable[..., Any]:
    out_dtype = tools.jnp.float32 if kind == "float32" else None

    def call(x: Any, weight: Any, residual: Any) -> Any:
        residual = residual if kind == "residual" else None
        return kernel(x, weight, residual=residual, gated=kind == "gated", out_dtype=out_dtype)

    return call


def xla(tools: Tools, kind: str, *, alone: bool = False) -> Callable[..., Any]:
    """XLA's; ``alone``: of what follows only a residual joins the product, as in a batch-invariant engine."""
    jax, jnp = tools.jax, tools.jnp

    def call(x: Any, weight: Any, residual: Any) -> Any:
        result = jnp.float32 if kind == "float32" else x.dtype
        y = jnp.einsum("tk,nk->tn", x, weight, preferred_element_type=result)
        y = jax.lax.optimization_barrier(y) if alone and kind != "residual" else y
        if kind == "gated":
            gate, up = jnp.split(y.astype(jnp.float32), 2, axis=1)
            y = (jax.nn.silu(gate) * up).astype(x.dtype)
        return residual + y if kind == "residual" else y

    return call


class Operands:
    """The weights of the layers of a product, and as many rows as the most; first what they are like."""

    def __init__(self, tools: Tools, model: str, name: str) -> None:
        self.tools = tools
        self.outputs, self.inner = SHAPES[model][name]
        self.most = 512 if name == "logits" else max(ROWS[model])
        fewest = 1 if name == "logits" else FEWEST_LAYERS
        self.layers = min(max(-(-L2 // (self.outputs * self.inner * 2)), fewest), 16)
        array = functools.partial(tools.jax.ShapeDtypeStruct, dtype=tools.jnp.bfloat16)
        self.weights: list[Any] = [array((self.outputs, self.inner))] * self.layers
        self.x: Any = array((self.most, self.inner))
        self.residual: Any = array((self.most, self.outputs))

    def make(self) -> None:
        random, scale = self.tools.random, self.inner**-0.5
        self.weights = [random(self.outputs, self.inner) * scale for _ in range(self.layers)]
        self.x, self.residual = random(self.most, self.inner), random(self.most, self.outputs)

    def of(self, rows: int, kind: str) -> tuple[Any, Any, Any]:
        residual = self._first(self.residual, rows) if kind == "residual" else None
        return self._first(self.x, rows), self.weights, residual

    def _first(self, array: Any, rows: int) -> Any:
        if isinstance(array, self.tools.jax.ShapeDtypeStruct):
            return self.tools.jax.ShapeDtypeStruct((rows, array.shape[1]), array.dtype)
        return array[:rows]


def program(tools: Tools, case: Case) -> Callable[..., Any]:
    """A jitted program of one product for each weight, one after another: ours share counters, and side by side in a
    graph each would take longer than alone."""

    def run(x: Any, weights: Any, residual: Any) -> Any:
        results = []
        for weight in weights:
            results.append(case.multiply(x, weight, residual))
            x = x + (results[-1][:1, :1] * 0).astype(x.dtype)
        return results

    return tools.jax.jit(run)


def compiled(tools: Tools, cases: list[Case], operands: Operands) -> list[Any]:
    """The cases' programs, compiled side by side; an exception in place of one that could not be."""

    from jaxserve.runner.invariance import PINNED_PRODUCTS
    from jaxserve.runner.programs import LARGE_PRODUCTS, LIBRARY_PRODUCTS

    def one(case: Case) -> Any:
        chosen = LIBRARY_PRODUCTS if case.rows >= LARGE_PRODUCTS else ()
        options = dict(PINNED_PRODUCTS if case.path == "pinned" else chosen)
        try:
            return program(tools, case).lower(*operands.of(case.rows, case.kind)).compile(options)
        except Exception as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, cases))


def share(products: list[list[Case]]) -> list[list[Case]]:
    """Those of this process, of several."""
    shard, shards = map(int, os.environ.get("KERNELS_SHARD", "0/1").split("/"))
    return products[shard::shards]


def measure_all(
    tools: Tools, emit: Callable[..., None], timed: Timed, section: str, products: list[list[Case]]
) -> None:
    """Compile ours, then measure product by product. XLA's are compiled then, since it times its choices."""
    ready = []
    for cases in products:
        operands = Operands(tools, cases[0].model, cases[0].name)
        own = [case for case in cases if case.path not in XLAS]
        ready.append((cases, operands, dict(zip(own, compiled(tools, own, operands), strict=True))))
    tools.await_turn()
    for cases, operands, executables in ready:
        others = [case for case in cases if case.path in XLAS]
        executables |= dict(zip(others, compiled(tools, others, operands), strict=True))
        operands.make()
        measure(tools, emit, timed, section, cases, operands, [executables[case] for case in cases])
        operands.weights, operands.x, operands.residual = [], None, None


def measure(
    tools: Tools, emit: Callable[..., None], timed: Timed, section: str, cases: list[Case], operands: Operands,
    executables: list[Any],
) -> None:  # fmt: skip
    """Check and time cases that share one product's weights."""
    first_rows: dict[tuple[str, int], np.ndarray] = {}
    for case, executable in zip(cases, executables, strict=True):
        label = f"{case.model} {case.name} x {case.rows}"
        try:
            if isinstance(executable, Exception):
                raise executable
            arguments = operands.of(case.rows, case.kind)
            found = executable(*arguments)
            error = largest_error(tools, found[0], case, operands)
            first_rows[case.path, case.rows] = np.asarray(found[0][:8].astype(tools.jnp.float32))
            del found
            name = "" if case.path in XLAS else "dense_matmul"
            kernel_us, layer_us = timed(lambda: executable(*arguments), len(operands.weights), name)  # noqa: B023
        except Exception as error:
            print(f"# {label} {case.path}: {type(error).__name__}: {str(error)[:300]}")
            emit(section=section, name=label, path=case.path, wrong=True, failed=str(error)[:200])
            continue
        emit(
            section=section, name=label, path=case.path, **rate(case, kernel_us), kernel_us=kernel_us,
            layer_us=layer_us, error=round(error, 4), wrong=not error < 0.02,
        )  # fmt: skip
    report_bits(emit, cases, first_rows)


def report_bits(
    emit: Callable[..., None], cases: list[Case], found: dict[tuple[str, int], np.ndarray]
) -> None:
    """Numbers of rows whose first rows are not those of 8, bit for bit."""
    for path in dict.fromkeys(case.path for case in cases):
        rows = [each for way, each in found if way == path]
        expected = found.get((path, 8))
        if expected is None or len(rows) < 2:
            continue
        differ = [n for n in rows if not np.array_equal(found[path, n], expected[: min(n, 8)])]
        emit(
            section="invariance", name=f"dense {cases[0].model} {cases[0].name}", path=path, rows=str(rows),
            differ=str(differ), wrong=path in ("ours", "one chunk") and bool(differ),
        )  # fmt: skip


def rate(case: Case, us: float) -> dict[str, Any]:
    """TB/s of few rows, TFLOP/s of many."""
    outputs, inner = case.shape
    if case.rows > 256:
        return dict(unit="TFLOP/s", rate=2 * case.rows * outputs * inner / us / 1e6)
    stored = {"gated": outputs, "residual": 4 * outputs, "float32": 4 * outputs}.get(case.kind, 2 * outputs)
    moved = 2 * outputs * inner + case.rows * (2 * inner + stored)
    return dict(unit="TB/s", rate=moved / us / 1e6)


def largest_error(tools: Tools, found: Any, case: Case, operands: Operands) -> float:
    """Over some rows, as a share of the largest result."""
    from pallas_kernels.dense_matmul.reference import dense_matmul

    rows = np.unique(tools.rng.integers(0, case.rows, 16))
    residual = operands.residual[rows] if case.kind == "residual" else None
    expected = tools.jax.jit(dense_matmul, static_argnames="gated")(
        operands.x[rows], operands.weights[0], residual=residual, gated=case.kind == "gated"
    )
    difference = tools.jnp.abs(found[rows].astype(tools.jnp.float32) - expected)
    return float(tools.jnp.max(difference) / tools.jnp.max(tools.jnp.abs(expected)))


def run(tools: Tools, emit: Callable[..., None], timed: Timed) -> None:
    """Ours as the tuning table has it, and XLA's.

    ``--override``'s ``dense`` may have {rows: configuration}, and ``products`` ("8b qkv", ...) and ``rows`` to leave
    out others.
    """
    products, wanted = [], tools.dense.get("products")
    for model, shapes in SHAPES.items():
        for name in shapes:
            if wanted is not None and f"{model} {name}" not in wanted:
                continue
            cases = []
            for rows in tools.dense.get("rows", ROWS[model]):
                if name == "logits" and rows > 256:
                    continue
                config = tools.dense.get(str(rows))
                cases.append(Case(model, name, rows, "ours", ours(tools, KINDS[name], config)))
                if not tools.ours_only:
                    cases.append(Case(model, name, rows, "xla", xla(tools, KINDS[name])))
            products.append(cases)
    measure_all(tools, emit, timed, "dense", share(products))


def sweep(tools: Tools, emit: Callable[..., None], timed: Timed) -> None:
    """Configurations (or ``--override``'s: {"dense": {"sweep": {model: {name: {rows: [configuration, ...]}}}}})."""
    products = []
    for model, by_name in (tools.dense.get("sweep") or SWEEP).items():
        for name, by_rows in by_name.items():
            cases = []
            for rows, configurations in by_rows.items():
                for config in configurations:
                    path = " ".join(f"{key}={value}" for key, value in config.items() if key != "width")
                    path = f"{config['width']}: {path}"
                    cases.append(Case(model, name, int(rows), path, ours(tools, KINDS[name], config)))
            products.append(cases)
    measure_all(tools, emit, timed, "dense_sweep", share(products))


def invariant(tools: Tools, emit: Callable[..., None], timed: Timed) -> None:
    """Llama 8B's products in a batch-invariant engine, ours with one chunk, XLA's pinned, and XLA's timed ones."""
    products = []
    for name in ("qkv", "out", "gate_up", "down"):
        kind, cases = KINDS[name], []
        for rows in INVARIANT_ROWS:
            cases.append(Case("8b", name, rows, "one chunk", one_chunk(tools, kind)))
            cases.append(Case("8b", name, rows, "pinned", xla(tools, kind, alone=True)))
            cases.append(Case("8b", name, rows, "xla", xla(tools, kind)))
        products.append(cases)
    measure_all(tools, emit, timed, "dense_invariant", share(products))


def bits(tools: Tools, emit: Callable[..., None]) -> None:
    """How many elements of the kernel's results, with one chunk, are not those of XLA's pinned products.

    Of each number of rows all rows are compared; and the first 8 rows with those of 8 rows, of either.
    """
    models = SHAPES | {"135m": SMALL}
    shapes = {
        f"{model} {name}": shape for model, by_name in models.items() for name, shape in by_name.items()
    }
    products = [(name, KINDS[name.split()[1]], shape) for name, shape in shapes.items()]
    products += [(f"{name} alone", "plain", shapes[name]) for name in shapes if name.endswith("gate_up")]
    shard, shards = map(int, os.environ.get("KERNELS_SHARD", "0/1").split("/"))
    for name, kind, shape in products[shard::shards]:
        try:
            emit(section="dense_bits", name=name, **compare_bits(tools, kind, shape))
        except Exception as error:
            emit(section="dense_bits", name=name, wrong=True, failed=f"{type(error).__name__}: {error}"[:300])


def compare_bits(tools: Tools, kind: str, shape: tuple[int, int]) -> dict[str, Any]:
    """Numbers of elements that differ, by rows; those of the kernel from itself are wrong."""
    from jaxserve.runner.invariance import PINNED_PRODUCTS

    outputs, inner = shape
    all_rows = [rows for rows in BITS_ROWS if outputs < 65536 or rows <= 1024]
    weight = tools.random(outputs, inner) * inner**-0.5
    x, residual = tools.random(all_rows[-1], inner), tools.random(all_rows[-1], outputs)
    by_ours = one_chunk(tools, kind)

    def one(case: tuple[int, str]) -> Any:
        rows, way = case
        call, options = (
            (by_ours, {}) if way == "ours" else (xla(tools, kind, alone=True), dict(PINNED_PRODUCTS))
        )
        arguments = x[:rows], weight, residual[:rows]
        return tools.jax.jit(call).lower(*arguments).compile(options), arguments

    cases = [(rows, way) for rows in all_rows for way in ("ours", "xla")]
    with ThreadPoolExecutor(8) as pool:
        found = {
            case: run(*arguments) for case, (run, arguments) in zip(cases, pool.map(one, cases), strict=True)
        }

    def differ(a: Any, b: Any) -> int:
        return int(tools.jnp.sum(a != b))

    first = all_rows[0]
    same = {
        way: {n: differ(found[n, way][:first], found[first, way]) for n in all_rows[1:]}
        for way in ("ours", "xla")
    }
    return dict(
        apart=str({n: differ(found[n, "ours"], found[n, "xla"]) for n in all_rows}), of=first * outputs,
        ours_by_rows=str(same["ours"]), xla_by_rows=str(same["xla"]), wrong=any(same["ours"].values()),
    )  # fmt: skip


__all__ = ["bits", "run", "sweep"]
