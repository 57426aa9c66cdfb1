"""Write docs/kernels.md: which attention backend computes what, asked of the backends themselves.

python scripts/write_kernel_table.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pallas_kernels.dispatch import AttentionOptions  # noqa: E402
from pallas_kernels.ragged_paged_attention import gpu, tpu  # noqa: E402

HEAD = """# Attention backends

Written by `python scripts/write_kernel_table.py` from what the backends answer; do not edit it by hand.

One contract (`pallas_kernels/dispatch.py`), chosen at start-up by platform and by what the model's layers need. What a
device's kernels cannot do takes the portable path with a log line that says why. A cache type that the user asked for
and that alone keeps a model off the kernels is refused, with what to set instead.

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


BACKENDS: dict[str, Callable[[Case], str | None]] = {
    "portable (CPU, any device)": lambda case: None,
    "TPU": on_tpu,
    "Hopper": on_hopper,
}
"""Why a backend cannot do something, or None."""


def kernels_page() -> str:
    """The page's text."""
    reasons: list[str] = []
    lines = ["| |" + "".join(f" {name} |" for name in BACKENDS), "|---" * (len(BACKENDS) + 1) + "|"]
    for label, cases in ROWS.items():
        cells = [_cell(cases, why_not, reasons) for why_not in BACKENDS.values()]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    notes = [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    return (
        HEAD
        + "\n".join(lines)
        + "\n\nWhat is refused is refused with these words:\n\n"
        + "\n".join(notes)
        + "\n"
    )


def _cell(cases: dict[str, Case], why_not: Callable[[Case], str | None], reasons: list[str]) -> str:
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
