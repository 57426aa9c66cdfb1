"""Where norms' weights are cut out of one array at once, so that a GPU's norms are one kernel, logits are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_harness import OracleBackend, sequence_logits
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve.layers.norm import StackedNormWeights
from jaxserve.models import build
from jaxserve.weights.loader import load_params
from jaxserve.weights.resolve import resolve_model

pytestmark = pytest.mark.device


class NoAddNorm:
    """Stands for a GPU's kernel, which takes no number of tokens here."""

    def why_not(self, num_rows: int, size: int, dtype: object) -> str:
        return "none is few enough"


def test_logits_are_the_same(tmp_path, monkeypatch):
    files = resolve_model(str(write_tiny_checkpoint(tmp_path, "llama", tokenizer=False)))
    cuts: list[int] = []
    apart = StackedNormWeights.apart

    def counted(self: StackedNormWeights) -> list[jax.Array]:
        cuts.append(1)
        return apart(self)

    monkeypatch.setattr(StackedNormWeights, "apart", counted)
    logits = []
    for add_norm in (None, NoAddNorm()):
        model = build(files.config, OracleBackend(), jnp.float32, add_norm=add_norm)
        params = load_params(model.specs, model.weight_map, files)
        # Random weights, each layer's its own: a wrong row would show.
        for name in ("attention_norm", "mlp_norm"):
            shape = params[name].shape
            params[name] = 1 + 0.3 * jax.random.normal(jax.random.key(len(name)), shape, jnp.float32)
        logits.append(sequence_logits(model, params, [5 + 7 * i % 90 for i in range(12)], (8, 4), "float32"))
        assert bool(cuts) is (add_norm is not None)
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-6, atol=1e-6)
