"""Write docs/kernels.md: which kernels compute what, asked of the kernels themselves.

python scripts/write_kernel_table.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pallas_kernels.dispatch import AttentionOptions  # noqa: E402
from pallas_kernels.grouped_matmul.gpu import GpuGroupedMatmul  # noqa: E402
from pallas_kernels.grouped_matmul.tpu import TpuGroupedMatmul  # noqa: E402
from pallas_kernels.ragged_paged_attention import gpu, tpu  # noqa: E402

HEAD = """# Attention backends

Written by `python scripts/write_kernel_table.py` from what the backends answer; do not edit it by hand.

One contract (`pallas_kernels/dispatch.py`), chosen at start-up by platform and by what the model's layers need. What a
device's kernels cannot do takes the portable path with a log line that says why. A cache type that the user asked for
and that alone keeps a model off the kernels is refused, with what to set instead.

Latent attention (MLA, of DeepSeek-V2 and V3) has a contract of its own (`pallas_kernels/mla_attention/dispatch.py`):
one cache of latents, in bfloat16, float16 or float32, without windows, caps or sinks. It has no kernels yet: on TPUs
and GPUs it takes the portable path, with a log line that says so. The table below is of the other kind.

Caches of one byte an element:

- `--kv-cache-dtype fp8` (`fp8_e4m3`): one scale for a layer's keys and one for its values, from the checkpoint's
  `k_scale` and `v_scale` where it has them, else 1. Keys and values are divided by them before they are cached (what
  exceeds the range becomes its largest value), queries and results multiplied, so kernels see a cache of another type
  and nothing else.
- `--kv-cache-dtype int8`: every token and KV head has a float32 scale of its own, its largest magnitude over 127, in an
  array beside the cache. Nothing is calibrated and nothing depends on the batch. int8 is nearer to the truth than fp8
  at scale 1 and takes 4 bytes a head and token more. On TPUs XLA copies these scales (not the cache) once a layer,
  because it scatters the new ones in another layout: prefer fp8 there.

"""

EXPERTS = """
# Experts' products

`pallas_kernels/grouped_matmul/`: rows sorted by expert, each by its expert's matrix; no row is dropped, padding rows go
to no expert and come out as zeros, matrices of experts without rows are not read. Each of a model's two products takes
its device's kernel if that can compute it. If it cannot, that product takes the portable path, and a log line at
start-up says why: `jax.lax.ragged_dot` on TPUs and GPUs, a loop over blocks of rows on CPUs. GPUs other than Hopper
(compute capability 9.0), and jax before 0.11 on any GPU, have the portable path alone. What counts are the matrices of
one device: splitting experts (`--tensor-parallel-size` without `--enable-expert-parallel`) makes them smaller.

"""


@dataclass(frozen=True)
class Case:
    """What is asked of a backend; the defaults are what all can do."""

    head_size: int = 128
    group: int = 4
    block_size: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    options: AttentionOptions = AttentionOptions(0.125)
    sinks: bool = False


def typed(dtype: str, kv_dtype: str | None = None, block_size: int = 128) -> Case:
    return Case(dtype=dtype, kv_dtype=kv_dtype or dtype, block_size=block_size)


ROWS: dict[str, dict[str, Case]] = {
    "head size": {str(n): Case(head_size=n) for n in (64, 80, 96, 128, 192, 256, 320)},
    "query heads a KV head": {str(n): Case(group=n) for n in (*range(1, 17), 17)},
    "block size": {str(n): Case(block_size=n) for n in (8, 16, 32, 64, 128, 256)},
    "queries and cache": {name: typed(name) for name in ("bfloat16", "float16", "float32")},
    "queries over another cache": {
        f"{dtype} over {kv_dtype}": typed(dtype, kv_dtype)
        for dtype, kv_dtype in (("float16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32"))
    },
    "float8 cache, queries": {n: typed(n, "float8_e4m3fn") for n in ("bfloat16", "float16", "float32")},
    "float8 cache, block size": {
        str(n): typed("bfloat16", "float8_e4m3fn", n) for n in (16, 32, 64, 128, 256)
    },
    "int8 cache, queries": {n: typed(n, "int8") for n in ("bfloat16", "float16", "float32")},
    "int8 cache, head size": {
        str(n): Case(head_size=n, kv_dtype="int8") for n in (64, 80, 96, 128, 192, 256)
    },
    "float8 cache, head size": {
        str(n): Case(head_size=n, kv_dtype="float8_e4m3fn") for n in (64, 80, 96, 128, 192, 256)
    },
    "int8 cache, block size": {str(n): typed("bfloat16", "int8", n) for n in (16, 32, 64, 128, 256)},
    "options": {
        "softmax scale": Case(options=AttentionOptions(1.7)),
        "sliding window": Case(options=AttentionOptions(0.1, sliding_window=100)),
        "soft cap": Case(options=AttentionOptions(0.1, soft_cap=30.0)),
        "sinks": Case(sinks=True),
        "all": Case(options=AttentionOptions(0.1, 100, 30.0), sinks=True),
    },
}


def on_tpu(case: Case) -> str | None:
    return tpu.supported(
        case.head_size, case.group, case.block_size, case.dtype, case.options, case.kv_dtype
    )  # fmt: skip


def on_hopper(case: Case) -> str | None:
    return gpu.supported(
        case.head_size, case.group, case.block_size, case.dtype, case.options, case.kv_dtype
    )  # fmt: skip


def matrices(*sizes: tuple[int, int]) -> dict[str, tuple[int, int, str]]:
    return {f"{outputs} x {inner}": (outputs, inner, "bfloat16") for outputs, inner in sizes}


EXPERT_ROWS: dict[str, dict[str, tuple[int, int, str]]] = {
    "rows and matrices": {name: (1536, 2048, name) for name in ("bfloat16", "float16", "float32")},
    "Qwen3-30B-A3B, outputs x contracted": matrices((1536, 2048), (2048, 768)),
    "its experts split over 4": matrices((384, 2048), (2048, 192)),
    "over 8": matrices((192, 2048), (2048, 96)),
    "Mixtral-8x7B": matrices((28672, 4096), (4096, 14336)),
    "gpt-oss": matrices((5760, 2880), (2880, 2880)),
    "DeepSeek-V3": matrices((4096, 7168), (7168, 2048)),
}

EXPERT_KERNELS: dict[str, Callable[[tuple[int, int, str]], str | None]] = {
    "portable (any device)": lambda case: None,
    **{
        f"TPU ({name})": lambda case, name=name: TpuGroupedMatmul(name).why_not(*case)
        for name in ("v6e", "v5p")
    },
    "Hopper": lambda case: GpuGroupedMatmul().why_not(*case),
}


BACKENDS: dict[str, Callable[[Case], str | None]] = {
    "portable (CPU, any device)": lambda case: None,
    "TPU": on_tpu,
    "Hopper": on_hopper,
}
"""Why a backend cannot do something, or None."""


def kernels_page() -> str:
    """The page's text."""
    return HEAD + _table(ROWS, BACKENDS) + EXPERTS + _table(EXPERT_ROWS, EXPERT_KERNELS)


def _table(rows: dict[str, dict[str, Any]], kernels: dict[str, Callable[[Any], str | None]]) -> str:
    """A line for each label, a column for each kernel, and the reasons of what is refused."""
    reasons: list[str] = []
    lines = ["| |" + "".join(f" {name} |" for name in kernels), "|---" * (len(kernels) + 1) + "|"]
    for label, cases in rows.items():
        cells = [_cell(cases, why_not, reasons) for why_not in kernels.values()]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    notes = [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join(lines) + "\n\nWhat is refused is refused with these words:\n\n" + "\n".join(notes) + "\n"


def _cell(cases: dict[str, Any], why_not: Callable[[Any], str | None], reasons: list[str]) -> str:
    answers = {name: why_not(case) for name, case in cases.items()}
    able = ", ".join(name for name, reason in answers.items() if reason is None)
    marks: list[str] = []
    for name, reason in answers.items():
        if reason is not None:
            if reason not in reasons:
                reasons.append(reason)
            marks.append(f"{name} ({reasons.index(reason) + 1})")
    return (able or "none") + ("; not " + ", ".join(marks) if marks else "")


def main() -> None:
    (ROOT / "docs" / "kernels.md").write_text(kernels_page())


if __name__ == "__main__":
    main()
