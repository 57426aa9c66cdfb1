"""The choice of many tokens' experts on Hopper against the oracle, interpreted on a CPU; where choices go."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import COMPILER_OPTIONS, needs_mosaic_gpu, strict, unexpected_races

from pallas_kernels.grouped_matmul.few import Rule
from pallas_kernels.grouped_matmul.route import route

pytestmark = pytest.mark.device
RULES = {
    "softmax of equal logits": (128, 64, Rule(3)),
    "renormalized": (96, 128, Rule(8, renormalize=True)),
    "more than 8 sigmoids": (32, 64, Rule(9, sigmoid=True, scale=2.0)),
}


def tokens(num_tokens: int, num_experts: int) -> tuple[jax.Array, jax.Array]:
    logits = np.random.default_rng(0).standard_normal((num_tokens, num_experts)).round(1)
    return jnp.asarray(logits, jnp.float32), jnp.arange(num_tokens) % 5 != 1


@needs_mosaic_gpu
@pytest.mark.parametrize("name", RULES)
def test_equals_the_oracle(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from pallas_kernels.grouped_matmul.gpu_route import GpuRoute

    num_tokens, num_experts, rule = RULES[name]
    logits, live = tokens(num_tokens, num_experts)
    kernel = GpuRoute(1, strict())
    compiled = jax.jit(lambda *each: kernel(*each, rule)).lower(logits, live).compile(COMPILER_OPTIONS)
    found = compiled(jnp.where(live[:, None], logits, jnp.nan), live)
    expected = route(logits, live, rule)
    np.testing.assert_allclose(found.weights, expected.weights, atol=1e-6)
    np.testing.assert_array_equal(found.experts, expected.experts)
    np.testing.assert_array_equal(found.so_far, expected.so_far)
    np.testing.assert_array_equal(found.counts, expected.counts)
    np.testing.assert_array_equal(found.places(), expected.places())
    assert not unexpected_races(capsys.readouterr().out)


@needs_mosaic_gpu
def test_it_lowers() -> None:
    from pallas_kernels.grouped_matmul.gpu_route import GpuRoute

    kernel, shape = GpuRoute(132), jax.ShapeDtypeStruct
    operands = shape((256, 128), jnp.float32), shape((256,), bool)
    traced = jax.jit(lambda *each: kernel(*each, Rule(8, renormalize=True)).places()).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 1
    assert "stablehlo.sort" not in text
    assert "96" in (kernel.why_not(64, 96) or "")
    assert "not 65" in (kernel.why_not(65, 128) or "")


def test_places_sort_the_choices_by_expert() -> None:
    logits, live = tokens(128, 16)
    routed = jax.tree.map(np.asarray, route(logits, live, Rule(3)))
    places = np.asarray(route(logits, live, Rule(3)).places())
    alive = routed.experts < 16
    assert (places[~alive] == 3 * 128).all()
    np.testing.assert_array_equal(np.sort(places[alive]), np.arange(alive.sum()))
    by_place = np.empty(alive.sum(), int)
    by_place[places[alive]] = routed.experts[alive]
    np.testing.assert_array_equal(by_place, np.sort(by_place))
