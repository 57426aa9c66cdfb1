"""Norm, products, embedding, feed-forward and the splitting of heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from model_harness import OracleBackend

from jaxserve.errors import ConfigError
from jaxserve.layers.attention import stored_kv_heads
from jaxserve.layers.embedding import Embedding, LMHead, padded_vocab_size
from jaxserve.layers.linear import contract, linear
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.params import LayerContext
from sharding import make_mesh

pytestmark = pytest.mark.device
CONTEXT = LayerContext(np.dtype(np.float32), OracleBackend())
RANDOM = np.random.RandomState(0)


def bound(module: nnx.Module, **weights: np.ndarray) -> nnx.Module:
    """A module whose abstract parameters are given values."""
    for name, value in weights.items():
        param = getattr(module, name)
        assert param.get_metadata()["spec"].shape == value.shape
        setattr(module, name, nnx.Param(jnp.asarray(value)))
    return module


def test_rms_norm() -> None:
    x = RANDOM.standard_normal((3, 8)).astype(np.float32) * 100
    weight = RANDOM.standard_normal(8).astype(np.float32)
    expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-5), expected, rtol=1e-5)


def test_rms_norm_of_large_low_precision_values() -> None:
    """The squares overflow float16; the norm is computed in float32."""
    x = jnp.full((1, 4), 60000, jnp.float16)
    np.testing.assert_allclose(rms_norm(x, jnp.ones(4, jnp.float16), 1e-5), np.ones((1, 4)), rtol=1e-3)


def test_products_accumulate_in_float32() -> None:
    x = jnp.full((1, 4096), 1.0, jnp.bfloat16)
    weight = jnp.full((1, 4096), 1.0009766, jnp.bfloat16).at[0, 0].set(0.25)
    total = contract(x, weight)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, 4095.25)
    rounded = linear(x, weight)
    assert rounded.dtype == jnp.bfloat16
    assert float(rounded[0, 0]) == 4096.0  # adding ones in bfloat16 would stop at 256


def test_the_bias_is_added_before_rounding() -> None:
    x, weight = jnp.full((1, 1), 256, jnp.bfloat16), jnp.ones((1, 1), jnp.bfloat16)
    found = linear(x, weight, jnp.full((1,), 3.0, jnp.bfloat16))
    assert float(found[0, 0]) == 260.0  # 259 lies between the bfloat16 values 258 and 260


@pytest.mark.parametrize("num_tokens", [1, 2, 64, 65])
def test_the_order_of_operands_changes_nothing(num_tokens: int) -> None:
    x = RANDOM.standard_normal((num_tokens, 32)).astype(np.float32)
    weight = RANDOM.standard_normal((48, 32)).astype(np.float32)
    found = jax.jit(lambda x, w: linear(x, w, weight_first=True))(x, weight)
    np.testing.assert_allclose(found, x @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab, size, rows", [(320, 1, 320), (319, 2, 320), (5, 4, 8), (8, 8, 8)])
def test_padded_vocab_size(vocab: int, size: int, rows: int) -> None:
    assert padded_vocab_size(vocab, size) == rows


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (virtual ones do)")
def test_embedding_and_tied_logits_split_over_devices() -> None:
    context = LayerContext(np.dtype(np.float32), OracleBackend(), tensor_parallel_size=4)
    table = RANDOM.standard_normal((12, 6)).astype(np.float32)
    hidden = RANDOM.standard_normal((2, 6)).astype(np.float32)

    def both(rows: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        embedding, head = Embedding(10, 6, context), LMHead(10, 6, context)
        embedding.weight = head.weight = nnx.Param(rows)
        return embedding(jnp.asarray([9, 0])), embedding.logits(hidden) + head.logits(hidden)

    specs = (PartitionSpec("model"), PartitionSpec())
    split = jax.shard_map(
        both, mesh=make_mesh(4), in_specs=specs, out_specs=(PartitionSpec(), PartitionSpec(None, "model")),
        check_vma=False,
    )  # fmt: skip
    vectors, logits = split(table, hidden)
    np.testing.assert_array_equal(vectors, table[[9, 0]])
    np.testing.assert_allclose(logits, 2 * hidden @ table.T, rtol=1e-4, atol=1e-5)


def test_logits_are_float32_whatever_the_weights() -> None:
    context = LayerContext(np.dtype(jnp.bfloat16), OracleBackend())
    embedding = bound(Embedding(4, 2, context), weight=np.ones((4, 2), jnp.bfloat16))
    assert embedding.logits(jnp.ones((1, 2), jnp.bfloat16)).dtype == jnp.float32


def test_gated_mlp() -> None:
    gate, up = RANDOM.standard_normal((2, 6, 10)).astype(np.float32)
    down = RANDOM.standard_normal((10, 6)).astype(np.float32)
    x = RANDOM.standard_normal((3, 6)).astype(np.float32)
    gate_bias, up_bias = RANDOM.standard_normal((2, 10)).astype(np.float32)
    biases = {"gate_up_bias": np.stack([gate_bias, up_bias]), "down_bias": np.ones(6, np.float32)}
    mlp = GatedMLP(6, 10, CONTEXT, bias=True)
    mlp = bound(mlp, gate_up=np.stack([gate.T, up.T]), down=down.T, **biases)
    gated = x @ gate + gate_bias
    expected = (gated / (1 + np.exp(-gated)) * (x @ up + up_bias)) @ down + 1.0
    np.testing.assert_allclose(mlp(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "heads, kv_heads, size, stored",
    [(9, 3, 1, 3), (9, 3, 3, 3), (32, 8, 4, 8), (32, 8, 8, 8), (32, 8, 16, 16), (32, 1, 8, 8), (4, 4, 4, 4)],
)
def test_stored_kv_heads(heads: int, kv_heads: int, size: int, stored: int) -> None:
    assert stored_kv_heads(heads, kv_heads, size) == stored


@pytest.mark.parametrize("heads, kv_heads, size", [(9, 3, 2), (9, 3, 4), (32, 8, 64), (12, 4, 8)])
def test_heads_that_cannot_be_split(heads: int, kv_heads: int, size: int) -> None:
    with pytest.raises(
        ConfigError, match=f"{size} does not split {heads} query heads and {kv_heads}"
    ) as caught:
        stored_kv_heads(heads, kv_heads, size)
    assert caught.value.param == "tensor_parallel_size"


def test_float32_products_are_exact_enough() -> None:
    """On accelerators too: no TF32, no bfloat16 passes."""
    a, b = RANDOM.standard_normal((2, 64, 64)).astype(np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(jax.jit(lambda x, y: contract(x, y.T))(a, b), exact, atol=2e-5)
