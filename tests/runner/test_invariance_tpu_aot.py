"""How the TPU's compiler cuts the products of one model's steps, by the number of rows.

What its output shows: the window of each product in each dimension, in tiles of 128, and how often it moves. A
contracted dimension that is cut into other pieces is added up in another order. So this says why batch_invariant is
refused on TPUs, and which products would have to be pinned; it cannot say in which order a window is added up inside.
"""

from __future__ import annotations

import os
import re

import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from step_programs import step_programs

from jaxserve.models import build
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.placement import Placement
from jaxserve.runner.program_variants import StepVariant
from jaxserve.sampling.metadata import Feature
from pallas_kernels.ragged_paged_attention.tpu import TpuAttentionBackend
from sharding import make_mesh

pytest.importorskip("libtpu", reason="libtpu, the TPU's compiler, is not installed (the tpu extra)")
pytestmark = [pytest.mark.device, pytest.mark.tpu_aot, pytest.mark.timeout(1800)]

MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 1, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 5120,
    "max_position_embeddings": 4096,
}  # fmt: skip
PRODUCTS = {
    "queries, keys, values": (4096, 2048), "attention's output": (2048, 2048), "gate and up": (6144, 2048),
    "down": (2048, 6144), "logits": (5120, 2048),
}  # fmt: skip
"""Columns of the result, and contracted elements."""
WINDOW = re.compile(
    r'= (?P<type>.*?) (?:fusion|convolution)\(.*"kernel_window_bounds":\["(?P<kernel>[\d",]+)"\]'
    r'.*"iteration_bounds":\["(?P<turns>[\d",]+)"\]'
)


def pieces_of_products(text: str) -> dict[str, int]:
    """Product -> pieces into which its contracted dimension is cut."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        window = WINDOW.search(line)
        if window is None:
            continue
        columns = int(re.findall(r",(\d+)\]", window["type"])[-1])
        tiles, pieces = int(window["kernel"].split('"')[-1]), int(window["turns"].split('"')[-1])
        for name, (width, contracted) in PRODUCTS.items():
            whole = contracted // 128
            cut = tiles * (pieces - 1) < whole <= tiles * pieces
            if columns == width and (tiles == whole if pieces == 1 else cut):
                assert name not in found, f"two products look like {name}"
                found[name] = pieces
    return found


def test_the_longest_product_is_cut_by_the_number_of_rows() -> None:
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc(topology_name="v6e:2x2", platform="tpu").devices
    backend = TpuAttentionBackend("v6e")
    model = build(MODEL, backend, jnp.bfloat16)
    pieces: dict[str, set[int]] = {name: set() for name in PRODUCTS}
    for rows in (8, 64, 128):
        programs = step_programs(
            model, backend, [Bucket(rows, rows)], num_blocks=512, block_size=16, max_num_seqs=128,
            max_blocks_per_row=128, placement=Placement(make_mesh(1, devices[:1])),
        )  # fmt: skip
        lowered = programs.lower_step(StepVariant(Bucket(rows, rows), Feature.NONE, decode_only=True))
        found = pieces_of_products(lowered.compile().as_text())
        assert found.keys() == PRODUCTS.keys(), f"{rows} rows: found {found}"
        for name, count in found.items():
            pieces[name].add(count)
    print(f"\npieces of the contracted dimension among 8, 64 and 128 rows: {pieces}")
    cut = {name for name, counts in pieces.items() if len(counts) > 1}
    assert cut == {"down"}, "docs/invariance.md says what is cut by the number of rows, and is wrong now"
