"""Mixture-of-experts layers of Qwen3-30B-A3B on one Hopper GPU: right, how fast, and where the time goes.

    python benchmarks/expert_layers.py                      # everything, about two minutes
    python benchmarks/expert_layers.py --parts layers --tokens 1 8
    python benchmarks/expert_layers.py --both               # one kernel instead of the two for few tokens

Parts, each of which prints lines as it goes:

    check    the kernels for few tokens against the oracles
    sweep    their configurations, one line each: us and TB/s of the two products, and the choice
    layers   a norm, router, experts and residual, four times over with weights of their own: us of a layer from first
             start to last end, of its kernels, how many they are, and the longest of them

Times come from the profiler.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import numpy as np  # noqa: E402

HIDDEN, FFN, EXPERTS, TOP_K, LAYERS = 2048, 768, 128, 8, 4
GATE_UP = {
    "few": [(1, 1, 128, 6), (1, 1, 256, 3), (1, 1, 64, 12), (2, 1, 128, 3), (2, 1, 64, 6), (1, 2, 64, 6)],
    "many": [(1, 1, 128, 4), (1, 1, 64, 8), (2, 1, 64, 5), (2, 1, 128, 2), (1, 2, 64, 5)],
}
DOWN = {
    "few": [(2, 1, 128, 6), (1, 1, 128, 8), (1, 1, 256, 5), (2, 1, 256, 3), (2, 2, 128, 3), (1, 2, 128, 6)],
    "many": [(2, 1, 128, 4), (2, 1, 64, 8), (2, 2, 64, 5), (1, 2, 128, 4), (2, 2, 128, 2)],
}
BOTH = {
    "few": [(1, 1, 128, 6), (1, 1, 64, 12), (1, 1, 256, 3), (2, 1, 128, 3), (2, 1, 64, 6)],
    "many": [(1, 1, 128, 4), (1, 1, 64, 8), (2, 1, 64, 5), (2, 1, 128, 2)],
}
"""Configurations tried (consumers, blocks, step, stages), for up to 16 tokens and for more."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=["check", "layers", "sweep"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256, 1024, 4096])
    parser.add_argument("--both", action="store_true", help="one kernel instead of the two for few tokens")
    parser.add_argument(
        "--sorted", action="store_true", help="layers: few tokens are sorted too, as many are"
    )
    parser.add_argument("--names", type=int, default=8, help="layers: kernels that are named")
    args = parser.parse_args()
    for part in args.parts:
        began = time.perf_counter()
        {"check": check, "sweep": sweep, "layers": layers}[part](args)
        print(f"# {part}: {time.perf_counter() - began:.0f} s", flush=True)
    return 0


def random(seed: int, *shape: int, scale: float = 1.0) -> Any:
    import jax
    import jax.numpy as jnp

    return scale * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def check(args: argparse.Namespace) -> None:
    """Fails loudly, and says how far from the oracle the results are."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.grouped_matmul import few
    from pallas_kernels.grouped_matmul.few import Rule
    from pallas_kernels.grouped_matmul.gpu_few import GpuFewTokens

    experts, ffn, hidden = 64, 256, 512
    gate_up, down = random(1, experts, 2, ffn, hidden), random(2, experts, hidden, ffn)
    kernel = GpuFewTokens(configs=both_config(8) if args.both else None)
    for tokens, rule in itertools.product(
        (1, 3, 8, 20, 33, 64), (Rule(8, renormalize=True), Rule(2, sigmoid=True))
    ):
        x = random(tokens, tokens, hidden, scale=hidden**-0.5)
        logits = random(tokens + 100, tokens, experts).astype(jnp.float32)
        live = jnp.arange(tokens) % 7 != 3
        chosen, load = few.choose(logits, live, rule)
        expected = few.gated_mlp(x, gate_up, down, chosen)
        for _ in range(3):
            found, found_load = jax.jit(functools.partial(kernel.routed, rule=rule))(
                x, logits, live, gate_up=gate_up, down=down
            )
            error = float(jnp.max(jnp.abs(found - expected)) / jnp.std(expected))
            wrong = not error < 0.05 or not bool((found_load == load).all())
        print(
            f"check {tokens:4} tokens, top {rule.top_k}: error {error:.4f}{'  WRONG' if wrong else ''}",
            flush=True,
        )

    check_route()
    check_layers(args)


def check_route() -> None:
    import jax
    import jax.numpy as jnp

    from pallas_kernels.grouped_matmul import route
    from pallas_kernels.grouped_matmul.few import Rule
    from pallas_kernels.grouped_matmul.gpu_route import GpuRoute

    for tokens, rule in itertools.product(
        (64, 256, 4096), (Rule(8, renormalize=True), Rule(2, sigmoid=True))
    ):
        logits, live = random(tokens, tokens, EXPERTS).astype(jnp.float32), jnp.arange(tokens) % 7 != 3
        expected = route.route(logits, live, rule)
        found = jax.jit(functools.partial(GpuRoute(), rule=rule))(logits, live)
        wrong = not bool(
            (found.experts == expected.experts).all() and (found.places() == expected.places()).all()
        )
        error = float(jnp.max(jnp.abs(found.weights - expected.weights)))
        print(
            f"check route {tokens:5} tokens: {error:.1e}{'  WRONG' if wrong or not error < 1e-5 else ''}",
            flush=True,
        )


def check_layers(args: argparse.Namespace) -> None:
    """The ways that layers can take differ by roundings."""
    import jax
    import jax.numpy as jnp

    program, weights = moe_layers(sort=True)
    for tokens in (1, 8, 64, 192, 1024):
        x, live = random(5, tokens, HIDDEN), jnp.arange(tokens) % 7 != 3
        expected, loads = jax.jit(program)(weights, x, live)
        other, _ = moe_layers(False, both_config(tokens) if args.both and tokens <= 64 else None, weights)
        found, found_loads = jax.jit(other)(weights, x, live)
        added = jnp.std((expected - x).astype(jnp.float32))
        error = float(jnp.std(jnp.where(live[:, None], found - expected, 0).astype(jnp.float32)) / added)
        # A token whose choices are close may choose otherwise in the second layer.
        same = bool((found_loads[0] == loads[0]).all())
        print(
            f"check layers {tokens:5} tokens: {error:.4f}{'' if error < 0.05 and same else '  WRONG'}",
            flush=True,
        )


def sweep(args: argparse.Namespace) -> None:
    import jax
    from kernels import profile

    from pallas_kernels.grouped_matmul.few import Rule
    from pallas_kernels.grouped_matmul.gpu_few import FewConfig, GpuFewTokens

    gate_up, down = (
        random(1, EXPERTS, 2, FFN, HIDDEN, scale=0.02),
        random(2, EXPERTS, HIDDEN, FFN, scale=0.02),
    )
    for tokens in (n for n in args.tokens if n <= 64):
        x, live = random(3, tokens, HIDDEN), np.ones(tokens, bool)
        logits = [random(n, tokens, EXPERTS).astype("float32") for n in range(LAYERS)]
        used = np.mean([len(np.unique(np.argsort(-np.asarray(each))[:, :TOP_K])) for each in logits])
        which = "few" if tokens <= 16 else "many"
        tried = [(each,) for each in BOTH[which]]
        if not args.both:
            pairs = itertools.zip_longest(GATE_UP[which], DOWN[which])
            tried = [(first or GATE_UP[which][0], second or DOWN[which][0]) for first, second in pairs]
        for sizes in tried:
            configs = tuple(FewConfig(*each) for each in sizes)
            kernel = GpuFewTokens(configs=configs if configs[1:] else configs[0])

            def run(logits, x, gate_up, down, kernel=kernel, live=live):
                rule = Rule(TOP_K, renormalize=True)
                return [kernel.routed(x, each, live, rule, gate_up, down)[0] for each in logits]

            try:
                runs = profile(Plain(jax), functools.partial(jax.jit(run), logits, x, gate_up, down))
            except Exception as error:
                print(f"sweep {tokens:4} tokens {sizes}: {str(error)[:150]}", flush=True)
                continue
            line = f"sweep {tokens:4} tokens  choose {time_of(runs, 'choose') / LAYERS:5.1f} us"
            names = {"experts_gate_up": 2, "experts_down": 1} if sizes[1:] else {"experts_both": 3}
            for size, (name, halves) in zip(sizes, names.items(), strict=True):
                us, moved = time_of(runs, name) / LAYERS, used * FFN * HIDDEN * 2 * halves / 1e6
                line += f"  {name[8:]} {size}: {us:6.1f} us {moved / us:.2f} TB/s"
            print(line, flush=True)


class Plain:
    """What ``kernels.profile`` wants of a context."""

    def __init__(self, jax: Any) -> None:
        self.jax = jax


def time_of(runs: list[list[tuple[str, float, float]]], name: str) -> float:
    """us of the kernels of that name in a run."""
    return float(np.median([sum(us for found, _, us in events if name in found) for events in runs]))


def layers(args: argparse.Namespace) -> None:
    import jax
    import jax.numpy as jnp
    from kernels import profile

    weights = None
    for tokens in args.tokens:
        program, weights = moe_layers(args.sorted, both_config(tokens) if args.both else None, weights)
        call = functools.partial(jax.jit(program), weights, random(5, tokens, HIDDEN), jnp.ones(tokens, bool))
        began = time.perf_counter()
        jax.block_until_ready(call())
        compiling = time.perf_counter() - began
        runs = profile(Plain(jax), call)
        whole = np.median([events[-1][1] + events[-1][2] - events[0][1] for events in runs]) / LAYERS
        busy = np.median([sum(us for _, _, us in events) for events in runs]) / LAYERS
        kernels = f"{busy:7.1f} busy in {len(runs[0]) / LAYERS:.1f} kernels (compiled in {compiling:.1f} s)"
        print(f"layers {tokens:5} tokens: {whole:7.1f} us a layer, {kernels}", flush=True)
        names: collections.Counter[str] = collections.Counter()
        counts: collections.Counter[str] = collections.Counter()
        for name, _, us in runs[0]:
            kind = name.split(".")[0].rstrip("_0123456789")
            names[kind] += us / LAYERS
            counts[kind] += 1
        for name, us in names.most_common(args.names):
            print(f"    {us:7.1f} us  {counts[name] / LAYERS:4.1f} x  {name[:80]}", flush=True)


def both_config(tokens: int) -> Any:
    """Of the one kernel; what does not fit into shared memory is cut off."""
    from pallas_kernels.grouped_matmul.gpu_few import FewConfig

    return FewConfig(*BOTH["few" if tokens <= 16 else "many"][0])


def moe_layers(sort: bool, few_configs: Any = None, weights: Any = None) -> tuple[Any, Any]:
    """(weights, tokens, live) to tokens after four layers, and the weights, unless there are some."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxserve.layers.moe import MoE, MoEConfig
    from jaxserve.layers.norm import rms_norm
    from jaxserve.layers.params import LayerContext
    from jaxserve.layers.router import RouterConfig
    from pallas_kernels.dispatch import BlockedBackend
    from pallas_kernels.grouped_matmul.dispatch import WhereItCan
    from pallas_kernels.grouped_matmul.gpu import GpuGroupedMatmul

    context = LayerContext(
        np.dtype(jnp.bfloat16),
        BlockedBackend(),
        grouped_matmul=WhereItCan(GpuGroupedMatmul(few_configs=few_configs)),
        batch_invariant=sort,
    )
    config = MoEConfig(RouterConfig(EXPERTS, TOP_K, renormalize=True), FFN)
    graphdef, state = nnx.split(MoE(HIDDEN, config, context))
    leaves, structure = jax.tree.flatten(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    shapes = [leaf.get_metadata()["spec"].shape for leaf in leaves]
    weights = weights or [
        [random(LAYERS * i + layer, *shape, scale=0.02) for i, shape in enumerate(shapes)]
        for layer in range(LAYERS)
    ]

    def program(weights: Any, x: jax.Array, live: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        loads = []
        for each in weights:
            normal = rms_norm(x, jnp.ones(HIDDEN, x.dtype), 1e-6)
            update, load = nnx.merge(graphdef, structure.unflatten(each))(normal, live)
            x = x + update
            loads.append(load)
        return x, loads

    return program, weights


if __name__ == "__main__":
    sys.exit(main())
