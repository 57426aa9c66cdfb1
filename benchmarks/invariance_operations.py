"""Single operations among other numbers of rows, bit for bit: what ``invariance.py`` runs for ops."""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

MODELS = Path(__file__).parent / "models"


def try_operations(options: argparse.Namespace) -> None:
    """Each operation's first row among more and more rows: how many kinds of bits there are."""
    import jax
    import jax.numpy as jnp

    from jaxserve.layers.linear import linear
    from jaxserve.layers.rope import RopeAngles
    from jaxserve.runner.invariance import PINNED_PRODUCTS
    from pallas_kernels.dense_matmul.dispatch import dense_matmul_of
    from pallas_kernels.rms_norm.dispatch import PLAIN, HalvesNorm, fixed_norm

    config = json.loads((MODELS / "llama-8b" / "config.json").read_text())
    if (MODELS / options.model).is_dir():
        config = json.loads((MODELS / options.model / "config.json").read_text())
    hidden, head, ffn = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    rows = [n for n in (8, 16, 64, 192, 256, 512, 2048, 8192) if n <= options.most_rows]
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * 0.5, jnp.bfloat16)

    x, wide = draw(rows[-1], hidden), draw(rows[-1], 2 * ffn)
    weight, qk = draw(hidden), draw(rows[-1], 1, heads + 1, head)
    positions = jnp.asarray(rng.integers(0, 9999, rows[-1]), jnp.int32)
    frequencies = (500000.0 ** -(np.arange(0, head, 2) / head)).astype(np.float32)

    def rotate(qk: Any, positions: Any) -> Any:
        return RopeAngles.at(positions, frequencies, 1.0).rotate(qk)

    def activate(wide: Any) -> Any:
        halves = wide.reshape(len(wide), 2, -1).astype(jnp.float32)
        return (jax.nn.silu(halves[:, 0]) * halves[:, 1]).astype(wide.dtype)

    pinned = dict(PINNED_PRODUCTS) if jax.default_backend() == "gpu" else {}
    cases: list[tuple[str, Any, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]] = [
        (f"norm of {hidden}, {name}", lambda x, w, norm=norm: norm(x, w, 1e-5), (x,), (weight,), pinned)
        for name, norm in (
            ("plain", PLAIN), ("halves", HalvesNorm()), ("kernel", fixed_norm(jax.default_backend())),
        )
    ]  # fmt: skip
    per_head = draw(heads + 1, head)
    cases += [
        (f"norm of heads, {head}, plain", lambda x, w: PLAIN(x, w, 1e-5), (qk,), (per_head,), pinned),
        (f"norm of heads, {head}, halves", lambda x, w: HalvesNorm()(x, w, 1e-5), (qk,), (per_head,), pinned),
        ("rotation", rotate, (qk, positions), (), pinned),
        ("activation", activate, (wide,), (), pinned),
    ]
    kernel = dense_matmul_of(jax.default_backend())[0]
    shapes = (
        (hidden, 2 * ffn),
        (ffn, hidden),
        (hidden, heads * head * 3 // 2),
        (hidden, config["vocab_size"] // 4),
    )
    for inner, outputs in shapes:
        operand, matrix = draw(rows[-1], inner), draw(outputs, inner)
        named = f"product {inner} x {outputs}"
        cases.append((f"{named}, timed", linear, (operand,), (matrix,), {}))
        cases.append((f"{named}, pinned", linear, (operand,), (matrix,), pinned))
        if kernel is not None:
            always = partial(linear, kernel=kernel.for_all_rows())
            cases.append((f"{named}, kernel", always, (operand,), (matrix,), pinned))
    print(f"operations, first rows among {', '.join(map(str, rows))}: kinds of bits")
    jobs: list[tuple[str, int, tuple[Any, ...], Any]] = []
    with ThreadPoolExecutor(16) as pool:
        for name, function, batched, fixed, compiler_options in cases:
            for count in rows:
                arguments = (*(each[:count] for each in batched), *fixed)
                lowered = jax.jit(function).lower(*arguments)
                compiling = pool.submit(partial(lowered.compile, compiler_options=compiler_options))
                jobs.append((name, count, arguments, compiling))
    kinds: dict[str, dict[bytes, list[int]]] = {}
    for name, count, arguments, compiling in jobs:
        first = np.asarray(compiling.result()(*arguments)[:8].astype(jnp.float32))
        kinds.setdefault(name, {}).setdefault(first.tobytes(), []).append(count)
    for name, groups in kinds.items():
        listed = " | ".join(",".join(map(str, counts)) for counts in groups.values())
        print(f"  {name:38s} {len(groups)}   {'' if len(groups) == 1 else listed}", flush=True)
