"""The sections ``grouped`` and ``grouped_sweep`` of kernels.py: experts' products of Qwen3-30B-A3B.

Each number of tokens is routed at random, without drops, to 8 of 128 experts; every product of a program has its own
routing, so that few tokens do not find their experts in the L2. Beside ours: ``jax.lax.ragged_dot`` and a single
matrix' product with as many operations. A record's shares are

    of dense   the dense product's time over ours
    of copy    bytes that have to move (matrices in use once, rows and results) a second, over those of a large copy
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

PRODUCTS = {"gate_up": (1536, 2048), "down": (2048, 768)}
"""Outputs, contracted."""
TOKENS = (4096, 64, 1, 8, 256, 1024)
"""Those with targets first."""
RAGGED_TOKENS = 256
"""Most that ``ragged_dot`` is timed with: XLA multiplies every row by every expert, at 4,096 tokens for minutes."""
SHARE = 0.7
"""At 4,096 tokens of the dense product's rate, at 64 of the copy's, at least."""
SWEEP = {
    64: [
        dict(widths=(8, 16, 32, 64), blocks=1, step=128, stages=4),
        dict(widths=(8, 16, 32, 64), blocks=1, step=64, stages=8),
        dict(widths=(8, 16, 32), blocks=1, step=128, stages=5),
        dict(widths=(8, 16, 24, 32), blocks=2, step=64, stages=5),
    ],
    4096: [
        dict(widths=(24, 80, 128, 144), blocks=2, step=64, stages=3, extra=1),
        dict(widths=(24, 80, 128, 144), blocks=2, step=64, stages=3, extra=1, ahead=8),
        dict(widths=(24, 80, 120, 128, 136, 144, 152, 160), blocks=2, step=64, stages=3, ahead=4),
        dict(widths=(64, 112, 120), blocks=2, step=64, stages=4),
    ],
}
"""Configurations tried, by the tokens they are for."""
ALSO: dict[int, dict[str, dict[str, Any]]] = {
    4096: {
        "matrices into the L2": dict(ahead=4),
        "no extra stage": dict(extra=0, widths=(24, 64, 128, 144, 160)),
    }
}
"""What of the table's configuration is another in what is timed beside it, by tokens; no bit may be."""


class Tools(Protocol):
    """What kernels.py lends."""

    jax: Any
    jnp: Any
    rng: np.random.Generator
    ours_only: bool

    def random(self, *shape: int, dtype: Any = None) -> Any: ...


Timed = Callable[[Callable[[], Any], int], tuple[float, float]]
"""(run, products in it) to the time of one product's kernel, and of all that belongs to one product, in us."""


@dataclass(frozen=True)
class Size:
    """What is run: Qwen3-30B-A3B's, or something a CPU interprets in seconds."""

    experts: int = 128
    top_k: int = 8
    tokens: tuple[int, ...] = TOKENS
    products: tuple[tuple[str, tuple[int, int]], ...] = tuple(PRODUCTS.items())
    layers: int = 4
    copied: int = 1 << 30
    """Bytes of the copy that gives the ceiling."""


TINY = Size(4, 2, (8,), (("gate_up", (192, 128)),), 1, 1 << 16)


def kernel(size: Size, override: dict[str, Any], interpret: Any) -> Any:
    """Ours, as the tuning table has it or with a configuration."""
    from pallas_kernels.grouped_matmul.gpu import Config, GpuGroupedMatmul

    if interpret is not None:
        return GpuGroupedMatmul(2, Config((8, 16), stages=2), interpret)
    if not override:
        return GpuGroupedMatmul()
    return GpuGroupedMatmul(config=Config(**{**override, "widths": tuple(override["widths"])}))


def others(ours: Any, size: Size, tokens: int) -> dict[str, Any]:
    """``ALSO``'s for so many tokens, by what they are called."""
    from pallas_kernels.grouped_matmul.gpu import tuned

    config = ours.config or tuned(tokens * size.top_k, size.experts)
    also = ALSO.get(tokens, {})
    return {f"ours, {name}": replace(ours, config=replace(config, **each)) for name, each in also.items()}


def routing(tools: Tools, size: Size, tokens: int) -> np.ndarray:
    """int32 [E]: tokens of each expert."""
    chosen = [tools.rng.permutation(size.experts)[: size.top_k] for _ in range(tokens)]
    return np.bincount(np.concatenate(chosen), minlength=size.experts).astype(np.int32)


def cases(tools: Tools, size: Size) -> Iterator[tuple[int, str, Any, Any, list[np.ndarray]]]:
    """Tokens, product, matrices, rows, and each layer's routing."""
    matrices = {name: tools.random(size.experts, *shape) for name, shape in size.products}
    for tokens in size.tokens:
        for name, (_, inner) in size.products:
            sizes = [routing(tools, size, tokens) for _ in range(size.layers)]
            yield tokens, name, matrices[name], tools.random(tokens * size.top_k, inner), sizes


def activated(ours: Any, lhs: Any, rhs: Any, sizes: Any) -> Any:
    """silu(gate) * up in the product's kernel, half of the outputs being gate's."""
    return ours.gated(lhs, rhs.reshape(rhs.shape[0], 2, -1, rhs.shape[2]), sizes)


def program(tools: Tools, multiply: Any) -> Callable[..., Any]:
    """A jitted program of one product for each routing."""
    return tools.jax.jit(lambda lhs, rhs, sizes: [multiply(lhs, rhs, each) for each in sizes])


def run(
    tools: Tools,
    emit: Callable[..., None],
    timed: Timed,
    *,
    size: Size,
    override: dict[str, Any],
    interpret: Any,
) -> None:
    """Check against the oracle, then time."""
    from pallas_kernels.grouped_matmul.dispatch import _ragged_dot

    ours = kernel(size, override, interpret)
    check_oracle(tools, emit, ours)
    copy = copy_rate(tools, timed, size)
    emit(section="grouped", name="copy", value=copy)
    whole: dict[int, list[float]] = {}
    """Tokens -> us of ours and of the dense products, over the products so far."""
    for tokens, name, rhs, lhs, sizes in cases(tools, size):
        outputs, inner = rhs.shape[1:]
        device_sizes = [tools.jnp.asarray(each) for each in sizes]
        work = 2 * lhs.shape[0] * outputs * inner
        moved = np.mean([needed_bytes(each, lhs.shape[0], outputs, inner) for each in sizes])
        dense = tools.jax.jit(lambda lhs, matrices: [lhs @ each.T for each in matrices])
        matrices = [rhs[n % rhs.shape[0]] for n in range(size.layers)]
        dense_us = timed(functools.partial(dense, lhs, matrices), size.layers)[1]
        paths: dict[str, Any] = {"ours": ours}
        if name == "gate_up" and outputs % 128 == 0:
            paths["ours, activated"] = functools.partial(activated, ours)
        of_table: Any = None
        paths |= others(ours, size, tokens)
        if not tools.ours_only and tokens <= RAGGED_TOKENS:
            paths["ragged_dot"] = _ragged_dot
        for path, multiply in paths.items():
            call = functools.partial(program(tools, multiply), lhs, rhs, device_sizes)
            record: dict[str, Any] = dict(section="grouped", name=f"{tokens} tokens, {name}", path=path)
            try:
                kernel_us, layer_us = timed(call, size.layers)
                found = call()[0]
            except Exception as error:  # of one size; the others go on
                emit(**record, error=str(error)[:150], wrong=path.startswith("ours"))
                continue
            record |= shares(
                kernel_us if path.startswith("ours") else layer_us, work, float(moved), dense_us, copy
            )
            if path == "ours":
                worst = largest_error(tools, found, lhs, rhs, sizes[0])
                record |= dict(error=round(worst, 4), wrong=not worst < 0.02)
                of_table = found
                judge(emit, tokens, name, kernel_us, dense_us, record["rate"] / copy)
                times = whole.setdefault(tokens, [0.0, 0.0])
                whole[tokens] = [times[0] + kernel_us, times[1] + dense_us]
                if name == size.products[-1][0]:
                    judge(emit, tokens, "all products", *whole[tokens], None)
            elif of_table is not None and path.removeprefix("ours, ") in ALSO.get(tokens, {}):
                record |= dict(same_bits=bool(tools.jnp.array_equal(found, of_table)))
            emit(**record, kernel_us=kernel_us, layer_us=layer_us)


def judge(
    emit: Callable[..., None], tokens: int, name: str, us: float, dense_us: float, of_copy: float | None
) -> None:
    """Say whether a product is as fast as it should be, where that is said."""
    if tokens == 4096:
        share, what = dense_us / us, "the dense product's rate"
    elif tokens == 64 and of_copy is not None:
        share, what = of_copy, "the copy's rate"
    else:
        return
    emit(
        section="grouped", name=f"{tokens} tokens, {name}: of {what}", value=round(share, 3), target=SHARE,
        met=share >= SHARE,
    )  # fmt: skip


def sweep(tools: Tools, emit: Callable[..., None], timed: Timed, *, size: Size) -> None:
    """Time configurations at the numbers of tokens they are for."""
    copy = copy_rate(tools, timed, size)
    for tokens, configurations in SWEEP.items():
        for n, override in enumerate(configurations):
            ours = kernel(size, override, None)
            for _, name, rhs, lhs, sizes in cases(tools, replace(size, tokens=(tokens,))):
                outputs, inner = rhs.shape[1:]
                device_sizes = [tools.jnp.asarray(each) for each in sizes]
                if name == "gate_up":
                    multiply = functools.partial(activated, ours)
                    call = functools.partial(program(tools, multiply), lhs, rhs, device_sizes)
                    us, layer_us = timed(call, size.layers)
                    emit(
                        section="grouped_sweep", name=f"{tokens} tokens, activated", path=f"{n}: {override}"[:60],
                        kernel_us=us, layer_us=layer_us, unit="TFLOP/s",
                        rate=2 * lhs.shape[0] * outputs * inner / us / 1e6,
                    )  # fmt: skip
                call = functools.partial(program(tools, ours), lhs, rhs, device_sizes)
                kernel_us, layer_us = timed(call, size.layers)
                moved = float(np.mean([needed_bytes(each, lhs.shape[0], outputs, inner) for each in sizes]))
                found = shares(kernel_us, 2 * lhs.shape[0] * outputs * inner, moved, 0.0, copy)
                worst = largest_error(tools, call()[0], lhs, rhs, sizes[0])
                emit(
                    section="grouped_sweep", name=f"{tokens} tokens, {name}", path=f"{n}: {override}"[:60],
                    error=round(worst, 4), wrong=not worst < 0.02, kernel_us=kernel_us, layer_us=layer_us, **found,
                )  # fmt: skip


def shares(us: float, work: float, moved: float, dense_us: float, copy: float) -> dict[str, Any]:
    """Rate in the unit that bounds it, and shares of what could be."""
    rate = moved / us / 1e6
    found: dict[str, Any] = dict(
        unit="TB/s", rate=rate, tflops=work / us / 1e6, target=f"copy {rate / copy:.0%}"
    )
    if dense_us:
        found["target"] = f"dense {dense_us / us:.0%}, copy {rate / copy:.0%}"
    return found


def needed_bytes(sizes: np.ndarray, num_rows: int, outputs: int, inner: int) -> float:
    """Matrices in use, rows and results, each once, of 2 bytes an element."""
    return 2.0 * (int((sizes > 0).sum()) * outputs * inner + num_rows * (outputs + inner))


def copy_rate(tools: Tools, timed: Timed, size: Size) -> float:
    """TB/s of a large copy, what it reads and what it writes."""
    x = tools.random(size.copied // 2)
    copy = tools.jax.jit(tools.jnp.copy)
    return 2 * x.nbytes / timed(functools.partial(copy, x), 1)[1] / 1e6


def check_oracle(tools: Tools, emit: Callable[..., None], multiply: Any) -> None:
    """Ragged groups, empty ones and padding that holds NaN, against the float32 oracle."""
    from pallas_kernels.grouped_matmul.reference import grouped_matmul

    jax, jnp = tools.jax, tools.jnp
    run = jax.jit(multiply)
    for sizes in ([0, 5, 9, 17], [33, 0, 0, 0], [0, 0, 0, 0], [8, 8, 8, 9], [1, 1, 0, 30]):
        live = jnp.arange(40)[:, None] < sum(sizes)
        lhs, rhs = tools.random(40, 128), tools.random(4, 192, 128)
        found = run(jnp.where(live, lhs, jnp.nan), rhs, jnp.asarray(sizes, jnp.int32))
        expected = grouped_matmul(jnp.where(live, lhs, 0), rhs, jnp.asarray(sizes, jnp.int32))
        error = float(jnp.max(jnp.abs(found.astype(jnp.float32) - expected)) / 128**0.5)
        emit(section="check", name=f"grouped {sizes}", error=round(error, 4), wrong=not error < 0.02)


def largest_error(tools: Tools, found: Any, lhs: Any, rhs: Any, sizes: np.ndarray) -> float:
    """Over some rows, as a share of the results' standard deviation."""
    jnp = tools.jnp
    group = np.repeat(np.arange(len(sizes)), sizes)
    rows = np.unique(tools.rng.integers(0, len(group), 64))
    x, matrices = lhs[rows].astype(jnp.float32), rhs[group[rows]].astype(jnp.float32)
    expected = jnp.einsum("nk,nmk->nm", x, matrices, precision="highest")
    error = jnp.abs(found[rows].astype(jnp.float32) - expected)
    return float(jnp.max(error) / lhs.shape[1] ** 0.5)
