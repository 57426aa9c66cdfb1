"""Logits of tiny checkpoints equal transformers' (float32): from fixtures, and live where torch is."""

import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from model_harness import OracleBackend, sequence_logits
from tiny_checkpoints import FAMILIES, write_tiny_checkpoint
from transformers_logits import POSITIONS, TOKEN_IDS, transformers_logits

from jaxserve.models import build
from jaxserve.weights.loader import load_params
from jaxserve.weights.resolve import resolve_model

pytestmark = pytest.mark.device
FIXTURES = Path(__file__).parent.parent / "fixtures" / "parity"
CHUNKS = (24, 1, 22, 1)


def our_logits(folder: Path, chunks: tuple[int, ...] = CHUNKS) -> np.ndarray:
    files = resolve_model(str(folder))
    model = build(files.config, OracleBackend(), jnp.float32)
    params = load_params(model.specs, model.weight_map, files)
    return sequence_logits(model, params, TOKEN_IDS, chunks, jnp.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_fixture(tmp_path: Path, family: str) -> None:
    folder = write_tiny_checkpoint(tmp_path, family, tokenizer=False)
    with np.load(FIXTURES / "tiny_logits.npz") as fixture:
        expected = fixture[family]
    found = our_logits(folder)[list(POSITIONS)]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_live(tmp_path: Path, family: str) -> None:
    folder = write_tiny_checkpoint(tmp_path, family, seed=1, tokenizer=False)
    np.testing.assert_allclose(our_logits(folder), transformers_logits(folder, TOKEN_IDS), rtol=0, atol=1e-4)


def test_chunking_does_not_change_logits(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "qwen3_window", tokenizer=False)
    whole = our_logits(folder, (len(TOKEN_IDS),))
    one_by_one = our_logits(folder, (1,) * len(TOKEN_IDS))
    np.testing.assert_allclose(one_by_one, whole, rtol=0, atol=1e-4)


def test_the_window_matters(tmp_path: Path) -> None:
    """The windowed fixtures would notice a window that is ignored."""
    narrow = our_logits(write_tiny_checkpoint(tmp_path / "a", "mistral_window", tokenizer=False))
    wide = our_logits(
        write_tiny_checkpoint(tmp_path / "b", "mistral_window", tokenizer=False, sliding_window=None)
    )
    np.testing.assert_allclose(narrow[:8], wide[:8], atol=1e-4)
    assert np.abs(narrow[8:] - wide[8:]).max() > 0.1
