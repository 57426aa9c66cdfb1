"""Beam searches that are compared with transformers' ``generate(num_beams=…)``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen3")


@dataclass(frozen=True)
class BeamCase:
    """One search. ``eos`` are the ids that end a sequence; None takes the checkpoint's."""

    prompt: tuple[int, ...]
    num_beams: int
    max_tokens: int
    length_penalty: float = 1.0
    eos: tuple[int, ...] | None = None


ENDS = (100, 119, 185, 255, 259)
"""Tokens that these random models are likely to choose."""
CASES = (
    BeamCase((5, 6, 7), 1, 8),
    BeamCase((5, 6, 7), 4, 12),
    BeamCase((9, 30, 31, 200, 14), 10, 10),
    BeamCase((50,), 3, 16, eos=(44,)),
    BeamCase(tuple(range(40, 80)), 4, 20, 0.0),
    BeamCase(tuple(range(40, 80)), 4, 20, 2.0),
    BeamCase(tuple(range(140, 180)), 4, 20, -1.5),
    BeamCase((11, 12, 13), 2, 30, 1.0, ENDS),
    BeamCase((11, 12, 13), 3, 30, 2.0, ENDS),
    BeamCase((61, 62, 63, 64), 3, 30, -1.0, (133, 185, 255)),
    BeamCase((61, 62, 63, 64), 4, 25, 0.0, (79, 276, 72)),
    BeamCase((5, 6, 7), 4, 30, 1.0, (241, 81, 96)),
    BeamCase((7, 8), 2, 1),
)


def transformers_beams(folder: Path, case: BeamCase) -> dict[str, Any]:
    """What transformers finds (float32): ``ids``, the outputs best first, and their ``scores``."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    eos = list(case.eos) if case.eos is not None else model.generation_config.eos_token_id
    with torch.no_grad():
        output = model.generate(
            torch.tensor([case.prompt]),
            attention_mask=torch.ones(1, len(case.prompt), dtype=torch.long),
            num_beams=case.num_beams,
            num_return_sequences=case.num_beams,
            max_new_tokens=case.max_tokens,
            length_penalty=case.length_penalty,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=-1,
            return_dict_in_generate=True,
            output_scores=True,
        )
    ids = output.sequences[:, len(case.prompt) :].tolist()
    scores = output.sequences_scores if case.num_beams > 1 else None
    return {
        "ids": [[token_id for token_id in row if token_id >= 0] for row in ids],
        "scores": None if scores is None else [round(score, 5) for score in scores.tolist()],
    }
