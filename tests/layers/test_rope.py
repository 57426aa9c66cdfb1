"""Rotary embedding: the rotation itself, and each context extension against its formula."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import UnsupportedModelError
from jaxserve.layers.rope import RopeAngles, RopeConfig

pytestmark = pytest.mark.device


def test_rotation_equals_complex_multiplication() -> None:
    frequencies, factor = RopeConfig(theta=100.0).frequencies(8)
    positions = np.array([0, 1, 7, 1000], np.int32)
    x = np.random.RandomState(0).standard_normal((4, 2, 3, 8)).astype(np.float32)
    found = np.asarray(RopeAngles.at(jnp.asarray(positions), frequencies, factor).rotate(jnp.asarray(x)))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[:, None, None, None] * frequencies)
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag], -1), atol=2e-4)
    np.testing.assert_array_equal(found[0], x[0])


def test_rotation_keeps_the_type_and_is_computed_in_float32() -> None:
    frequencies, factor = RopeConfig().frequencies(64)
    angles = RopeAngles.at(jnp.asarray([4001], jnp.int32), frequencies, factor)
    x = jnp.ones((1, 1, 1, 64), jnp.bfloat16)
    rotated = angles.rotate(x)
    assert rotated.dtype == jnp.bfloat16
    exact = np.cos(4001 * frequencies.astype(np.float64)) - np.sin(4001 * frequencies.astype(np.float64))
    np.testing.assert_allclose(rotated[0, 0, 0, :32].astype(jnp.float32), exact, atol=2e-2)


def test_old_and_new_spelling_of_the_config() -> None:
    old = {
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "max_position_embeddings": 64,
    }
    new = {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        "max_position_embeddings": 64,
    }
    assert RopeConfig.from_hf(old) == RopeConfig.from_hf(new)
    assert RopeConfig.from_hf({}) == RopeConfig(scaling={"max_position_embeddings": None})
    assert RopeConfig.from_hf({"rope_scaling": None, "rope_theta": 5.0}).theta == 5.0


def test_linear_divides() -> None:
    plain, _ = RopeConfig().frequencies(16)
    stretched, factor = RopeConfig(rope_type="linear", scaling={"factor": 4.0}).frequencies(16)
    np.testing.assert_allclose(stretched, plain / 4)
    assert factor == 1.0


def test_llama3_keeps_short_and_stretches_long_wavelengths() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, _ = RopeConfig(500000.0).frequencies(128)
    found, _ = RopeConfig(500000.0, "llama3", scaling).frequencies(128)
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 8192 / 4, wavelengths > 8192
    assert short.any()
    assert long.any()
    assert (~short & ~long).any()
    np.testing.assert_allclose(found[short], plain[short], rtol=1e-6)
    np.testing.assert_allclose(found[long], plain[long] / 8, rtol=1e-6)
    between = found[~short & ~long] / plain[~short & ~long]
    assert (np.diff(between) < 0).all()
    assert between.max() < 1
    assert between.min() > 1 / 8


def test_yarn_attention_factor() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 4096}
    _, factor = RopeConfig(rope_type="yarn", scaling=scaling).frequencies(64)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    _, given = RopeConfig(rope_type="yarn", scaling=scaling | {"attention_factor": 1.5}).frequencies(64)
    assert given == 1.5
    _, ratio = RopeConfig(
        rope_type="yarn", scaling=scaling | {"mscale": 1.0, "mscale_all_dim": 1.0}
    ).frequencies(64)
    assert ratio == 1.0


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "proportional", "su"])
def test_other_types_are_refused_by_name(rope_type: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"rope type '{rope_type}' is not supported; supported are default"
    ):
        RopeConfig.from_hf({"rope_scaling": {"rope_type": rope_type, "factor": 2.0}})


def test_partial_rotation_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor 0.5 is not supported"):
        RopeConfig.from_hf({"partial_rotary_factor": 0.5})


@pytest.mark.parametrize("factor", [None, "2", True])
def test_a_missing_number_is_named(factor: object) -> None:
    rope = RopeConfig.from_hf({"rope_scaling": {"rope_type": "linear", "factor": factor}})
    with pytest.raises(UnsupportedModelError, match=r"rope type 'linear' needs the number 'factor'"):
        rope.frequencies(16)
