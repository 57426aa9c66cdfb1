"""What transformers answers for a tiny checkpoint: needs torch, so only fixtures and live tests use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

TOKEN_IDS = tuple((i * 37 + i * i * 11 + 5) % 320 for i in range(48))
"""The sequence whose logits are compared: longer than every window of the tiny checkpoints."""
POSITIONS = (0, 9, 26, 47)
"""The positions whose logits the fixture holds."""


def transformers_logits(folder: Path, token_ids: Sequence[int]) -> np.ndarray:
    """Logits [len(token_ids), V] by transformers in float32 on the CPU."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(token_ids)])).logits[0].float().numpy()
