"""The packaged SmolLM2 on a Hopper GPU: transformers' float32 tokens, and bfloat16's perplexity over the kernels.

``JAX_PLATFORMS=cuda pytest -m gpu tests/engine``
"""

from __future__ import annotations

import math

import jax
import pytest
from test_smollm2_engine import CASES, GREEDY, Answer, check_parity

from jaxserve import LLM, SamplingParams


def is_hopper() -> bool:
    return str(getattr(jax.devices()[0], "compute_capability", "")) == "9.0"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")]
ENGINE = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "max_model_len": 1600,
    "gpu_memory_utilization": 0.3,
}
PPL_TOLERANCE = 0.005


def perplexity(llm: LLM) -> float:
    """Of the fixture's prompts, whole."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [case.prompt for case in CASES]
    nll, count = 0.0, 0
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False)):
        for token, entry in zip(prompt[1:], output.prompt_logprobs[1:]):
            nll -= entry[token].logprob
            count += 1
    return math.exp(nll / count)


def test_float32_tokens_and_bfloat16_perplexity():
    with LLM(dtype="float32", **ENGINE) as llm:
        together = llm.generate([case.prompt for case in CASES], GREEDY, use_tqdm=False)
        check_parity([Answer.of([output]) for output in together], CASES)
        alone = llm.generate([CASES[20].prompt], GREEDY, use_tqdm=False)
        check_parity([Answer.of(alone)], [CASES[20]])
        expected = perplexity(llm)
        assert llm._core.runner.num_compilations() == 0
    with LLM(dtype="bfloat16", **ENGINE) as llm:
        assert llm._core.runner.backend.name == "mosaic_gpu"
        found = perplexity(llm)
        same = sum(
            output.outputs[0].token_ids == case.tokens
            for output, case in zip(
                llm.generate([case.prompt for case in CASES], GREEDY, use_tqdm=False), CASES
            )
        )
        assert llm._core.runner.num_compilations() == 0
    print(
        f"perplexity {expected:.4f} in float32, {found:.4f} in bfloat16; {same} of {len(CASES)} same answers"
    )
    assert abs(found / expected - 1) < PPL_TOLERANCE
