"""Hopper attention against the oracle, one case after another: what ``test_gpu_on_card.py`` runs in processes.

    python tests/support/card_attention.py                                  # names of the cases
    python tests/support/card_attention.py "decode 14/2/64/32 plain float8_e4m3fn" ...   # in this process
    XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool memcheck \
        python tests/support/card_attention.py "mixed 32/8/128/16 plain bfloat16"

The last one gives every array an allocation of its own, so that an access past an array shows. The oracle and all
inputs are made on the CPU, row by row: on the card lie one small cache three times and a few megabytes beside it.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    os.environ["JAX_PLATFORMS"] = "cuda,cpu"
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from card_processes import serve_cases

Rows = list[tuple[int, int]]
"""(Context with the new tokens, new tokens) of each row, decoding rows first."""

ROWS: Rows = [(1, 1), (64, 1), (700, 1), (1500, 1), (1200, 300), (150, 33), (513, 513), (9, 2)]
SHAPES = [
    (32, 8, 128, 16),
    (14, 2, 64, 32),
    (8, 8, 80, 64),
    (10, 2, 96, 128),
    (16, 1, 256, 256),
    (15, 3, 128, 64),
]
"""Query heads, KV heads, head size, block size."""
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "window-and-cap": dict(sliding_window=300, soft_cap=10.0)}
KV_DTYPES = ("bfloat16", "float8_e4m3fn", "int8")
ORACLE_TOKENS = 24
"""Of a row, its first and last among them: the oracle gathers a whole context for each."""
REPEATS = 3
"""A kernel leaves its counters as it found them."""


@dataclass(frozen=True)
class Case:
    """What is computed; its name is the command line's."""

    decode_only: bool
    shape: tuple[int, int, int, int]
    options: str
    kv_dtype: str

    @property
    def name(self) -> str:
        kind = "decode" if self.decode_only else "mixed"
        return f"{kind} {'/'.join(map(str, self.shape))} {self.options} {self.kv_dtype}"


CASES = {
    case.name: case
    for case in (
        Case(*each) for each in itertools.product((False, True), SHAPES, OPTIONS, KV_DTYPES)
    )
    # One head size is too large for int8, and one set of options does for it.
    if case.kv_dtype != "int8" or (case.shape[2] < 256 and case.options == "plain")
}  # fmt: skip
"""By name; those that compile most come first."""


def check(case: Case, rows: Rows = ROWS, backend: Any = None) -> str:
    """Compute a case on the first device.

    Args:
        backend: what is tried; None is ``GpuBackend()``.

    Returns:
        Its error, in words.

    Raises:
        AssertionError: the result, its padding or the cache is wrong.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from ragged_batches import in_cache_type, ragged_batch

    from pallas_kernels.kv_cache_update.quantized import values_of
    from pallas_kernels.kv_cache_update.reference import kv_cache_update
    from pallas_kernels.ragged_paged_attention.gpu import GpuBackend
    from pallas_kernels.ragged_paged_attention.options import AttentionOptions

    ours, options = backend or GpuBackend(), AttentionOptions(0.1, **OPTIONS[case.options])
    heads, kv_heads, head_size, block_size = case.shape
    rows = [row for row in rows if row[1] == 1] if case.decode_only else rows
    with jax.default_device(jax.devices("cpu")[0]):
        batch = ragged_batch(
            rows, heads=heads, kv_heads=kv_heads, head_size=head_size, block_size=block_size,
            dtype=jnp.bfloat16, pad_rows=2, pad_tokens=2 if case.decode_only else 7,
        )  # fmt: skip
        cache = in_cache_type(batch.kv_cache, case.kv_dtype)
        metadata = replace(batch.metadata, decode_only=case.decode_only)
        sinks = jnp.linspace(-1.0, 3.0, heads)
        written = kv_cache_update(cache, batch.k, batch.v, metadata.slot_mapping)
        padding = ours.kv_cache_shape(1, block_size, kv_heads, head_size)[-1] - head_size
        wide = with_values(cache, jnp.pad(values_of(cache), [(0, 0)] * 4 + [(0, padding)]))
    inputs = jax.device_put((batch.q, batch.k, batch.v, wide, metadata, sinks), jax.devices()[0])
    step = jax.jit(lambda q, k, v, cache, metadata, sinks: ours.update_and_attend(
        q, k, v, cache, metadata, options, sinks
    ))  # fmt: skip
    runs = [jax.device_get(step(*inputs)) for _ in range(REPEATS)]
    live = sum(new for _, new in rows)
    # Of int8, processors may round a token's scale differently.
    close = dict(rtol=1e-6, atol=1) if case.kv_dtype == "int8" else dict(rtol=0, atol=0)
    for turn, (out, found) in enumerate(runs):
        assert out.shape == batch.q.shape, f"run {turn}: the result is {out.shape}, not {batch.q.shape}"
        found = with_values(found, values_of(found)[..., :head_size])
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(written), strict=True):
            mine, theirs = (np.asarray(each, np.float32) for each in (mine, theirs))
            differ = ~np.isclose(mine, theirs, equal_nan=True, **close)
            places = np.argwhere(differ)[:3].tolist()
            assert not differ.any(), (
                f"run {turn}: {differ.sum()} of the cache's elements differ, as at {places}"
            )
        lost = np.argwhere(~np.isfinite(np.asarray(out[:live], np.float32)))[:3, 0].tolist()
        assert not lost, f"run {turn}: not finite, as at tokens {lost}"
        assert not out[live:].any(), f"run {turn}: padding is not zero"
    with jax.default_device(jax.devices("cpu")[0]):
        sample, wanted = oracle(batch, written, options, sinks)
    for turn, (out, _) in enumerate(runs):
        differ = out[sample].astype(np.float32) - wanted
        error = np.linalg.norm(differ) / np.linalg.norm(wanted)
        each = np.linalg.norm(differ, axis=(1, 2)) / np.linalg.norm(wanted, axis=(1, 2))
        worst = f"token {sample[each.argmax()]} by {each.max():.1e}"
        assert error < 5e-3, f"run {turn}: the result differs by {error:.1e}, {worst}"
    return f"within {error:.1e} of the oracle, {worst} at most"


def oracle(batch: Any, kv_cache: Any, options: Any, sinks: Any) -> tuple[Any, Any]:
    """Tokens (indices into the batch's) and the oracle's result for them, a row at a time."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.kv_cache_update.quantized import values_of
    from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
    from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention

    attend = jax.jit(ragged_paged_attention, static_argnames=("scale", "sliding_window", "soft_cap"))
    whole, block_size = batch.metadata, values_of(kv_cache).shape[3]
    tokens, results = [], []
    for row, (context, new) in enumerate(batch.rows):
        first = int(whole.query_start_loc[row])
        some = np.linspace(first, first + new - 1, min(new, ORACLE_TOKENS)).astype(int)
        count = len(some)
        alone = AttentionMetadata(
            seq_lens=whole.seq_lens[row : row + 1],
            block_tables=whole.block_tables[row : row + 1, : -(-context // block_size)],
            query_start_loc=jnp.asarray([0, count]), distribution=jnp.asarray([0, 0, 1]),
            slot_mapping=whole.slot_mapping[some], positions=whole.positions[some],
            row_ids=jnp.zeros(count, jnp.int32),
        )  # fmt: skip
        results.append(attend(
            batch.q[some].astype(jnp.float32), kv_cache, alone, scale=options.scale, sinks=sinks,
            sliding_window=options.sliding_window, soft_cap=options.soft_cap,
        ))  # fmt: skip
        tokens.append(some)
    return np.concatenate(tokens), np.concatenate([np.asarray(each) for each in results])


def with_values(cache: Any, values: Any) -> Any:
    """A cache with other values, beside the same scales if it has any."""
    return replace(cache, values=values) if hasattr(cache, "scales") else values


def main() -> int:
    names = sys.argv[1:]
    if not names:
        print("\n".join(CASES))
        return 0
    if unknown := [name for name in names if name not in CASES and name != "-"]:
        sys.exit(f"no case {unknown[0]!r}; without arguments the cases are listed")
    return serve_cases(lambda name: check(CASES[name]), [] if names == ["-"] else names)


if __name__ == "__main__":
    sys.exit(main())
