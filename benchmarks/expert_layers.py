"""Mixture-of-experts layers of Qwen3-30B-A3B on one Hopper GPU: right, how fast, and where the time goes.

    python benchmarks/expert_layers.py                      # everything, about three minutes on an H200
    python benchmarks/expert_layers.py --parts layers --tokens 1 8
    python benchmarks/expert_layers.py --both               # one kernel instead of the two for few tokens
    python benchmarks/expert_layers.py --tiny               # whether it runs, interpreted, on any machine

Parts, each of which prints lines as it goes; one that fails or takes longer than ``--limit`` costs only itself, and
``--json`` has what the others found:

    check    the kernels for few tokens against the oracles. 40 s
    layers   a norm, router, experts and residual, four times over with weights of their own: us of a layer from first
             start to last end, of its kernels, how many they are, and the longest of them. 45 s for all sizes
    sweep    their configurations, one line each: us and TB/s of the two products, and the choice. 15 s a size

Times come from the profiler. Exits with 1 if a check fails or a part does not end.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from parts import Parts


@dataclass(frozen=True)
class Size:
    """Layers, and what their kernels are checked with.

    Args:
        hidden, ffn, experts, top_k, layers: of the layers.
        checked: experts, ffn and hidden of the kernels' own check, and token counts.
        layer_tokens, routed: token counts of the layers' check, and of the routing's.
        kernel: arguments of every kernel.
    """

    hidden: int = 2048
    ffn: int = 768
    experts: int = 128
    top_k: int = 8
    layers: int = 4
    checked: tuple[int, int, int, tuple[int, ...]] = (64, 256, 512, (1, 3, 8, 20, 33, 64))
    layer_tokens: tuple[int, ...] = (1, 8, 64, 192, 1024)
    routed: tuple[int, ...] = (64, 256, 4096)
    kernel: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def tiny(cls) -> Size:
        """What an interpreter does in seconds."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        kernel = {"num_sms": 2, "interpret": plgpu.InterpretGPUParams()}
        return cls(128, 64, 64, 2, 1, (64, 64, 128, (5,)), (5,), (64,), kernel)


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
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=["check", "layers", "sweep"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256, 1024, 4096])
    parser.add_argument("--both", action="store_true", help="one kernel instead of the two for few tokens")
    parser.add_argument(
        "--sorted", action="store_true", help="layers: few tokens are sorted too, as many are"
    )
    parser.add_argument("--names", type=int, default=8, help="layers: kernels that are named")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a part")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--tiny", action="store_true", help="interpreted, in sizes for that; times mean nothing"
    )
    args = parser.parse_args()
    args.size = Size()
    if args.tiny:
        args.size, args.tokens = Size.tiny(), [5]
    parts, found = Parts(args.json, args.limit), list[dict[str, Any]]()
    for part in args.parts:
        for name, function in PARTS[part].items():
            parts.run(name, collect, function, args, found)
    wrong = [each for each in found if each.get("wrong")]
    if wrong:
        print(f"WRONG: {len(wrong)} checks", flush=True)
    return parts.end() or int(bool(wrong))


def collect(function: Part, args: argparse.Namespace, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a part yields, which also joins what others found: that stays if the part fails."""
    before = len(found)
    for each in function(args):
        found.append(each)
    return found[before:]


def checked(what: str, error: float, wrong: bool) -> dict[str, Any]:
    """Print one check."""
    print(f"check {what}: error {error:.1e}{'  WRONG' if wrong else ''}", flush=True)
    return {"check": what, "error": error, "wrong": wrong}


def random(seed: int, *shape: int, scale: float = 1.0) -> Any:
    import jax
    import jax.numpy as jnp

    return scale * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def check(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """The kernels for few tokens: how far from the oracle their results are."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.grouped_matmul import few
    from pallas_kernels.grouped_matmul.few import Rule
    from pallas_kernels.grouped_matmul.gpu_few import GpuFewTokens

    experts, ffn, hidden, counts = args.size.checked
    gate_up, down = random(1, experts, 2, ffn, hidden), random(2, experts, hidden, ffn)
    kernel = GpuFewTokens(configs=both_config(8) if args.both else None, **args.size.kernel)
    for tokens, rule in itertools.product(counts, (Rule(8, renormalize=True), Rule(2, sigmoid=True))):
        x = random(tokens, tokens, hidden, scale=hidden**-0.5)
        logits = random(tokens + 100, tokens, experts).astype(jnp.float32)
        live = jnp.arange(tokens) % 7 != 3
        chosen, load = few.choose(logits, live, rule)
        expected = few.gated_mlp(x, gate_up, down, chosen)
        run = jax.jit(functools.partial(kernel.routed, rule=rule))
        worst, wrong = 0.0, False
        for _ in range(3):
            found, found_load = run(x, logits, live, gate_up=gate_up, down=down)
            error = float(jnp.max(jnp.abs(found - expected)) / jnp.std(expected))
            worst = max(worst, error)
            wrong |= not error < 0.05 or not bool((found_load == load).all())
        yield checked(f"{tokens:4} tokens, top {rule.top_k}", worst, wrong)


def check_route(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    from pallas_kernels.grouped_matmul import route
    from pallas_kernels.grouped_matmul.few import Rule
    from pallas_kernels.grouped_matmul.gpu_route import GpuRoute

    rules = (Rule(args.size.top_k, renormalize=True), Rule(2, sigmoid=True))
    for tokens, rule in itertools.product(args.size.routed, rules):
        logits, live = (
            random(tokens, tokens, args.size.experts).astype(jnp.float32),
            jnp.arange(tokens) % 7 != 3,
        )
        expected = route.route(logits, live, rule)
        found = jax.jit(functools.partial(GpuRoute(**args.size.kernel), rule=rule))(logits, live)
        wrong = not bool(
            (found.experts == expected.experts).all() and (found.places() == expected.places()).all()
        )
        error = float(jnp.max(jnp.abs(found.weights - expected.weights)))
        yield checked(f"route {tokens:5} tokens, top {rule.top_k}", error, wrong or not error < 1e-5)


def check_layers(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """The ways that layers can take differ by roundings."""
    import jax
    import jax.numpy as jnp

    program, weights = moe_layers(args.size, sort=True)
    for tokens in args.size.layer_tokens:
        x, live = random(5, tokens, args.size.hidden), jnp.arange(tokens) % 7 != 3
        expected, loads = jax.jit(program)(weights, x, live)
        configs = both_config(tokens) if args.both and tokens <= 64 else None
        other, _ = moe_layers(args.size, False, configs, weights)
        found, found_loads = jax.jit(other)(weights, x, live)
        added = jnp.std((expected - x).astype(jnp.float32))
        error = float(jnp.std(jnp.where(live[:, None], found - expected, 0).astype(jnp.float32)) / added)
        # A token whose choices are close may choose otherwise in the second layer.
        same = bool((found_loads[0] == loads[0]).all())
        yield checked(f"layers {tokens:5} tokens", error, not (error < 0.05 and same))


def sweep(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    import jax
    from kernels import profile

    from pallas_kernels.grouped_matmul.few import Rule
    from pallas_kernels.grouped_matmul.gpu_few import GpuFewTokens
    from pallas_kernels.grouped_matmul.gpu_few_tuning import FewConfig

    size, rule = args.size, Rule(args.size.top_k, renormalize=True)
    gate_up = random(1, size.experts, 2, size.ffn, size.hidden, scale=0.02)
    down = random(2, size.experts, size.hidden, size.ffn, scale=0.02)
    for tokens in (n for n in args.tokens if n <= 64):
        x, live = random(3, tokens, size.hidden), np.ones(tokens, bool)
        logits = [random(n, tokens, size.experts).astype("float32") for n in range(size.layers)]
        used = np.mean([len(np.unique(np.argsort(-np.asarray(each))[:, : size.top_k])) for each in logits])
        which = "few" if tokens <= 16 else "many"
        tried = [(each,) for each in BOTH[which]]
        if not args.both:
            pairs = itertools.zip_longest(GATE_UP[which], DOWN[which])
            tried = [(first or GATE_UP[which][0], second or DOWN[which][0]) for first, second in pairs]
        for sizes in tried[: 1 if args.tiny else None]:
            configs = tuple(FewConfig(*each) for each in sizes)
            kernel = GpuFewTokens(configs=configs if configs[1:] else configs[0], **size.kernel)

            def run(logits, x, gate_up, down, kernel=kernel, live=live):
                return [kernel.routed(x, each, live, rule, gate_up, down)[0] for each in logits]

            try:
                runs = profile(
                    Plain(jax, args.tiny), functools.partial(jax.jit(run), logits, x, gate_up, down)
                )
            except Exception as error:  # a configuration that does not fit, say; the others go on
                print(f"sweep {tokens:4} tokens {sizes}: {str(error)[:150]}", flush=True)
                yield {"tokens": tokens, "sizes": sizes, "error": str(error)[:150]}
                continue
            found: dict[str, Any] = {
                "tokens": tokens, "sizes": sizes, "choose_us": time_of(runs, "choose") / size.layers,
            }  # fmt: skip
            line = f"sweep {tokens:4} tokens  choose {found['choose_us']:5.1f} us"
            names = {"experts_gate_up": 2, "experts_down": 1} if sizes[1:] else {"experts_both": 3}
            for each, (name, halves) in zip(sizes, names.items(), strict=True):
                us = time_of(runs, name) / size.layers
                moved = used * size.ffn * size.hidden * 2 * halves / 1e6
                found[f"{name}_us"] = us
                line += f"  {name[8:]} {each}: {us:6.1f} us {moved / max(us, 1e-9):.2f} TB/s"
            print(line, flush=True)
            yield found


class Plain:
    """What ``kernels.profile`` wants of a context."""

    def __init__(self, jax: Any, tiny: bool) -> None:
        self.jax, self.tiny = jax, tiny


def time_of(runs: list[list[tuple[str, float, float]]], name: str) -> float:
    """us of the kernels of that name in a run."""
    return float(np.median([sum(us for found, _, us in events if name in found) for events in runs]))


def layers(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    import jax
    import jax.numpy as jnp
    from kernels import profile

    weights, count = None, args.size.layers
    for tokens in args.tokens:
        configs = both_config(tokens) if args.both else None
        program, weights = moe_layers(args.size, args.sorted, configs, weights)
        x = random(5, tokens, args.size.hidden)
        call = functools.partial(jax.jit(program), weights, x, jnp.ones(tokens, bool))
        began = time.perf_counter()
        jax.block_until_ready(call())
        compiling = time.perf_counter() - began
        runs = profile(Plain(jax, args.tiny), call)
        whole = float(np.median([events[-1][1] + events[-1][2] - events[0][1] for events in runs]) / count)
        busy = float(np.median([sum(us for _, _, us in events) for events in runs]) / count)
        kernels = f"{busy:7.1f} busy in {len(runs[0]) / count:.1f} kernels (compiled in {compiling:.1f} s)"
        print(f"layers {tokens:5} tokens: {whole:7.1f} us a layer, {kernels}", flush=True)
        names: collections.Counter[str] = collections.Counter()
        counts: collections.Counter[str] = collections.Counter()
        for name, _, us in runs[0]:
            kind = name.split(".")[0].rstrip("_0123456789")
            names[kind] += us / count
            counts[kind] += 1
        for name, us in names.most_common(args.names):
            print(f"    {us:7.1f} us  {counts[name] / count:4.1f} x  {name[:80]}", flush=True)
        yield {"tokens": tokens, "layer_us": whole, "busy_us": busy, "kernels": len(runs[0]) / count}


def both_config(tokens: int) -> Any:
    """Of the one kernel; what does not fit into shared memory is cut off."""
    from pallas_kernels.grouped_matmul.gpu_few_tuning import FewConfig

    return FewConfig(*BOTH["few" if tokens <= 16 else "many"][0])


def moe_layers(size: Size, sort: bool, few_configs: Any = None, weights: Any = None) -> tuple[Any, Any]:
    """(weights, tokens, live) to tokens after all layers, and the weights, unless there are some."""
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
        grouped_matmul=WhereItCan(GpuGroupedMatmul(few_configs=few_configs, **size.kernel)),
        batch_invariant=sort,
    )
    config = MoEConfig(RouterConfig(size.experts, size.top_k, renormalize=True), size.ffn)
    graphdef, state = nnx.split(MoE(size.hidden, config, context))
    leaves, structure = jax.tree.flatten(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    shapes = [leaf.get_metadata()["spec"].shape for leaf in leaves]
    weights = weights or [
        [random(size.layers * i + layer, *shape, scale=0.02) for i, shape in enumerate(shapes)]
        for layer in range(size.layers)
    ]

    def program(weights: Any, x: jax.Array, live: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        loads = []
        for each in weights:
            normal = rms_norm(x, jnp.ones(size.hidden, x.dtype), 1e-6)
            update, load = nnx.merge(graphdef, structure.unflatten(each))(normal, live)
            x = x + update
            loads.append(load)
        return x, loads

    return program, weights


Part = Callable[[argparse.Namespace], Iterable[dict[str, Any]]]
PARTS: dict[str, dict[str, Part]] = {
    "check": {"check": check, "check route": check_route, "check layers": check_layers},
    "layers": {"layers": layers},
    "sweep": {"sweep": sweep},
}


if __name__ == "__main__":
    sys.exit(main())
