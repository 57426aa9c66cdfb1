"""A model whose devices add up with a kernel of their own: the table of peers reaches every sum of every program."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from model_harness import OracleBackend, abstract_step, sequence_logits
from tiny_checkpoints import tiny_config, write_tiny_checkpoint

from jaxserve.models import build
from jaxserve.models.functional import PEERS, PEERS_SPEC
from jaxserve.weights.loader import load_params
from jaxserve.weights.resolve import resolve_model
from pallas_kernels.rms_norm.dispatch import PLAIN
from sharding import make_mesh

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (virtual ones do)"),
]
FEW, SIZE = 8, 2


@dataclass(frozen=True)
class PortableSum:
    """Adds up to FEW tokens as the platform does, where the table is this device's; NaN where it is not."""

    num_devices: int = SIZE
    capacity: int = 1 << 20
    norms: bool = False
    name: str = "portable"

    def why_not(self, shape: tuple[int, ...], dtype: object) -> str | None:
        return None if shape[0] <= FEW else "many tokens"

    def why_not_norm(self, shape: tuple[int, ...], dtype: object) -> str | None:
        return self.why_not(shape, dtype) if self.norms else "switched off"

    def with_norm(
        self, partial: jax.Array, peers: jax.Array | None, residual: jax.Array, weight: jax.Array, eps: float,
        layer: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        stream = self(partial, peers, residual)
        return stream, PLAIN(stream, weight if layer is None else weight[layer[0]], eps)

    def __call__(
        self, partial: jax.Array, peers: jax.Array | None, residual: jax.Array | None = None
    ) -> jax.Array:
        assert peers is not None
        mine = peers[0] == jax.lax.axis_index("model")
        group = peers[1] == jax.lax.axis_index("data")
        total = jax.lax.psum(partial, "model")
        return jnp.where(mine & group, total if residual is None else residual + total, jnp.nan)


def table(num_ranks: int) -> np.ndarray:
    """[ranks, devices, 1 + 2 * devices], with the rank where the first address would be."""
    tables = np.zeros((num_ranks, SIZE, 1 + 2 * SIZE), np.int32)
    tables[..., 0], tables[..., 1] = np.arange(SIZE), np.arange(num_ranks)[:, None]
    return tables


def test_logits_are_the_same_in_programs_of_several_sizes(tmp_path) -> None:
    files = resolve_model(str(write_tiny_checkpoint(tmp_path, "llama", tokenizer=False, num_hidden_layers=2)))
    mesh, token_ids = make_mesh(SIZE), [(7 * i) % 300 for i in range(FEW)]
    logits = {}
    for kernel in (None, PortableSum(), PortableSum(norms=True)):
        model = build(files.config, OracleBackend(), jnp.float32, SIZE, peer_all_reduce=kernel)
        params = load_params(model.specs, model.weight_map, files, mesh=mesh)
        if kernel is not None:
            params[PEERS] = jax.device_put(table(1), NamedSharding(mesh, PEERS_SPEC))
        assert params.keys() == model.abstract_params(mesh).keys() == model.partition_specs().keys()
        logits[kernel] = [
            sequence_logits(model, params, token_ids, chunks, jnp.float32, mesh)
            for chunks in ((FEW,), (FEW // 2, FEW // 2))
        ]
    for expected, added, normed in zip(*logits.values(), strict=True):
        np.testing.assert_array_equal(added, expected)
        np.testing.assert_array_equal(normed, expected)
    assert "peers" not in model.head_params()


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernels need jax >= 0.11")
def test_the_kernel_takes_the_place_of_all_sums_of_few_tokens_but_the_first() -> None:
    from pallas_kernels.all_reduce.gpu import GpuAllReduce

    config, mesh = tiny_config("llama", dtype="bfloat16"), make_mesh(SIZE)
    capacity = 16 * config["hidden_size"] * 2
    kernel = GpuAllReduce(SIZE, capacity, ((capacity, 16),))
    model = build(config, OracleBackend(), jnp.bfloat16, SIZE, peer_all_reduce=kernel)
    for tokens, kernels, sums in ((16, 2, 1), (8, 2, 1), (24, 0, 3)):  # the layers are one function
        step, arguments = abstract_step(model, mesh, tokens)
        program = step.lower.__self__  # the jitted function
        text = program.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("call @_all_reduce(") == kernels
        assert text.count("custom_call @mosaic_gpu_v2") == min(kernels, 1)
        assert text.count('"stablehlo.all_reduce"') == sums
