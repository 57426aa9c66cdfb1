"""However a platform cuts its steps into programs, the answers are the same: the GPU's and TPU's styles, run here."""

from __future__ import annotations

import pytest
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve import LLM, SamplingParams
from jaxserve.runner.program_variants import ProgramStyle

pytestmark = [pytest.mark.device, pytest.mark.slow]

STYLES = {
    "cpu": ProgramStyle(decode_programs=False, fixed_addresses=False),
    "tpu": ProgramStyle(decode_programs=True, fixed_addresses=False),
    "gpu": ProgramStyle(decode_programs=True, fixed_addresses=True),
}


def answers(model, style: ProgramStyle, monkeypatch, **parallel: int) -> list:
    monkeypatch.setattr(ProgramStyle, "of", classmethod(lambda cls, platform: style))
    options = {
        "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 16,
        "num_gpu_blocks_override": 40, "skip_tokenizer_init": True, **parallel,
    }  # fmt: skip
    prompts = [list(range(3, 3 + n)) for n in (1, 2, 5, 17, 40, 60, 9, 33, 4, 1)]
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 else 0.9, seed=i, max_tokens=5 + i, ignore_eos=True, detokenize=False,
            logprobs=(None, 3)[i % 3 == 0], prompt_logprobs=(None, 2)[i in (0, 4)],
            presence_penalty=0.5 if i == 5 else 0.0, top_k=4 if i == 2 else 0,
        )
        for i in range(len(prompts))
    ]  # fmt: skip
    with LLM(str(model), **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        runner = llm._core.runner
        assert runner.num_compilations() == 0
        assert any(getattr(key, "fixed", False) for key in runner.programs.compiled) is style.fixed_addresses
    return [
        (o.outputs[0].token_ids, _rounded(o.outputs[0].logprobs), _rounded(o.prompt_logprobs))
        for o in outputs
    ]


def _rounded(positions):
    if positions is None:
        return None
    return [
        None if p is None else {token: (lp.rank, round(lp.logprob, 3)) for token, lp in p.items()}
        for p in positions
    ]


def test_same_answers(tmp_path, monkeypatch):
    model = write_tiny_checkpoint(tmp_path, "llama")
    expected = answers(model, STYLES["cpu"], monkeypatch)
    assert answers(model, STYLES["tpu"], monkeypatch) == expected
    assert answers(model, STYLES["gpu"], monkeypatch) == expected
    # Over several devices too (where XLA of jax 0.11.2 crashed over the largest bucket).
    assert answers(model, STYLES["gpu"], monkeypatch, tensor_parallel_size=2) == expected
