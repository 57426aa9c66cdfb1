"""Rotary position embedding (Su et al., 2021) and its extensions: linear, Llama 3, YaRN, GGUF factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import UnsupportedModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "freq_factors")
"""``freq_factors`` is how a GGUF file spells any fixed scaling: one divisor a frequency."""


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles. ``scaling``: the rope type's numbers, as config.json names them."""

    theta: float = 10000.0
    rope_type: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

        Raises:
            UnsupportedModelError: for a rope type, or a partial rotation, that is not implemented.
        """
        scaling = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
        theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
        partial = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES[:-1])}."
            )
        if partial != 1.0:
            raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported; only 1.0 is.")
        scaling.setdefault("max_position_embeddings", config.get("max_position_embeddings"))
        return cls(float(theta), rope_type, scaling)

    def number(self, name: str) -> float:
        """A number the rope type cannot do without."""
        value = self.scaling.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UnsupportedModelError(
                f"rope type {self.rope_type!r} needs the number {name!r}, got {value!r}."
            )
        return float(value)

    def frequencies(self, head_size: int) -> tuple[np.ndarray, float]:
        """Radians per position of each pair, [D / 2] float32, and the factor on cosine and sine.

        In float32 throughout, like the reference implementations the models were trained with.

        Raises:
            UnsupportedModelError: an odd head size, or numbers of the rope type that are missing.
        """
        if head_size % 2:
            raise UnsupportedModelError(f"a head size of {head_size} cannot be rotated in pairs.")
        exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
        base = (np.float32(1.0) / np.power(np.float32(self.theta), exponents)).astype(np.float32)
        if self.rope_type == "linear":
            return base / np.float32(self.number("factor")), 1.0
        if self.rope_type == "llama3":
            return _llama3(base, self), 1.0
        if self.rope_type == "yarn":
            return _yarn(base, head_size, self)
        if self.rope_type == "freq_factors":
            factors = np.asarray(self.scaling.get("factors"), np.float32)
            if factors.shape != base.shape:
                raise UnsupportedModelError(
                    f"rope needs {len(base)} frequency factors, got shape {factors.shape}."
                )
            return base / factors, 1.0
        return base, 1.0


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, the rest in between."""
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    turns = rope.number("original_max_position_embeddings") * base / np.float32(2 * math.pi)
    kept = np.clip((turns - np.float32(low)) / np.float32(high - low), 0.0, 1.0)
    return ((1 - kept) * base / np.float32(factor) + kept * base).astype(np.float32)


def _yarn(base: np.ndarray, head_size: int, rope: RopeConfig) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al., 2023), with the attention temperature folded into cosine and sine."""
    original = rope.scaling.get("original_max_position_embeddings")
    original = float(original) if original else rope.number("max_position_embeddings")
    factor = rope.number("factor")

    def pair_turning(turns: float) -> float:
        """Index of the pair that turns this often over the original context."""
        return head_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = pair_turning(rope.scaling.get("beta_fast") or 32.0)
    high = pair_turning(rope.scaling.get("beta_slow") or 1.0)
    if rope.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    pairs = np.arange(head_size // 2, dtype=np.float32)
    stretched = np.clip((pairs - low) / np.float32(max(high - low, 0.001)), 0.0, 1.0)
    frequencies = base / np.float32(factor) * stretched + base * (1 - stretched)
    return frequencies.astype(np.float32), _yarn_attention_factor(factor, rope)


def _yarn_attention_factor(factor: float, rope: RopeConfig) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = rope.scaling.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all_dim = rope.scaling.get("mscale"), rope.scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class RopeAngles:
    """Cosine and sine of a step's positions, [T, 1, 1, D / 2] float32: computed once, used by every layer."""

    cos: jax.Array
    sin: jax.Array

    def tree_flatten(self) -> tuple[tuple[jax.Array, jax.Array], None]:
        return (self.cos, self.sin), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[jax.Array, jax.Array]) -> RopeAngles:
        return cls(*children)

    @classmethod
    def at(cls, positions: jax.Array, frequencies: np.ndarray, factor: float) -> RopeAngles:
        """Angles of ``positions`` [T] int32."""
        angles = positions.astype(jnp.float32)[:, None, None, None] * frequencies
        return cls(jnp.cos(angles) * factor, jnp.sin(angles) * factor)

    def rotate(self, x: jax.Array, *, interleaved: bool = False) -> jax.Array:
        """Rotate [T, K, N, D] in float32, returned in x's type; the pair of element i is i + D / 2.

        ``interleaved``: in x the pairs are neighbours. They are not in what is returned, which changes no product of a
        query and a key.
        """
        wide = x.astype(jnp.float32)
        if interleaved:
            first, second = wide[..., 0::2], wide[..., 1::2]
        else:
            first, second = jnp.split(wide, 2, axis=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
