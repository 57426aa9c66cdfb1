"""Engines over meshes answer as one device does: tensor, data, expert and sequence parallelism and their products."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ConfigError, RequestFailedError
from jaxserve.outputs import RequestOutput

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices (virtual ones do)"),
]

SIZES: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 192, "kv_cache_memory_bytes": 1 << 22,
    "block_size": 16,
}  # fmt: skip
PROMPTS = [[(7 * i + j) % 300 for j in range(2 + 7 * i)] for i in range(10)]
PROMPTS.append([*PROMPTS[-1][:48], 5, 6])  # shares blocks with the one before


def sampling(index: int) -> SamplingParams:
    """Every kind of row: greedy and random, with all that the sampler keeps on the device."""
    return SamplingParams(
        max_tokens=5 + index,
        ignore_eos=True,
        temperature=0.0 if index % 2 else 1.0,
        seed=index,
        top_p=0.9 if index % 3 == 0 else 1.0,
        top_k=(0, 5, 100)[index % 3],
        logprobs=3 if index % 4 == 0 else None,
        prompt_logprobs=2 if index in (5, 8) else None,
        repetition_penalty=1.3 if index % 5 == 0 else 1.0,
        logit_bias={9: 3.0} if index == 6 else None,
        allowed_token_ids=list(range(40, 90)) if index == 7 else None,
    )


def answers(llm: LLM) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return llm.generate(prompts, [sampling(index) for index in range(len(prompts))], use_tqdm=False)


def logprobs_of(output: RequestOutput) -> list[dict[int, float]]:
    positions = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
    return [{token: entry.logprob for token, entry in position.items()} for position in positions if position]


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    for one, other in zip(found, expected):
        mine, theirs = logprobs_of(one), logprobs_of(other)
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs):
            assert a.keys() == b.keys()
            np.testing.assert_allclose(list(a.values()), [b[token] for token in a], rtol=0, atol=1e-4)


FAMILIES = {
    # A vocabulary that no size divides.
    "llama": {"vocab_size": 319, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3_moe": {},
    "deepseek_v3": {"num_hidden_layers": 2},
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory):
    """Family -> (its checkpoint, what one device answers)."""

    @functools.cache
    def answered(family: str) -> tuple[Path, list[RequestOutput]]:
        folder = tmp_path_factory.mktemp(family)
        path = write_tiny_checkpoint(folder, family, tokenizer=False, **FAMILIES[family])
        return path, answers(LLM(str(path), skip_tokenizer_init=True, **SIZES))

    return answered


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "family, parallel",
    [
        ("llama", {"tensor_parallel_size": 4, "data_parallel_size": 2}),  # KV heads held twice
        ("qwen3_moe", {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}),
        # One latent cache a rank, whole on both of its devices; experts over all four.
        slow(
            "deepseek_v3",
            {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
        ),
        exhaustive("llama", {"tensor_parallel_size": 8}),
        slow("llama", {"tensor_parallel_size": 2, "sequence_parallel": True, "max_num_batched_tokens": 128}),
        exhaustive("llama", {"data_parallel_size": 3}),
        exhaustive("qwen3_moe", {"tensor_parallel_size": 2}),
        exhaustive("qwen3_moe", {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
        exhaustive("qwen3_moe", {"data_parallel_size": 4, "enable_expert_parallel": True}),
        exhaustive("qwen3_moe", {"tensor_parallel_size": 2, "data_parallel_size": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items()),
)
def test_answers_do_not_depend_on_the_mesh(one_device, family: str, parallel: dict[str, Any]):
    path, expected = one_device(family)
    llm = LLM(str(path), skip_tokenizer_init=True, **{**SIZES, **parallel})
    assert_same(answers(llm), expected)
    assert_same(answers(llm), expected)  # from a warm prefix cache
    fail_a_step(llm)
    assert_same(answers(llm), expected)  # from a state and caches that were made anew
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert metrics["jaxserve:compilations"].value == 0
    imbalance = metrics["jaxserve:moe_expert_imbalance"]
    assert imbalance.sum >= imbalance.count
    assert (imbalance.count > 0) == (family != "llama")


def fail_a_step(llm: LLM) -> None:
    """Have the device refuse the third step from now."""
    programs = llm._core.runner.programs
    run, steps = programs.run, iter(range(100))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(steps) == 2:
            raise RuntimeError("out of luck")
        return run(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "run", failing)
        with pytest.raises(RequestFailedError):
            answers(llm)


def test_more_devices_than_there_are(one_device):
    path, _ = one_device("llama")
    with pytest.raises(ConfigError, match=r"needs 15 devices, but there are 8.*-tp 2 -dp 4") as caught:
        LLM(str(path), tensor_parallel_size=5, data_parallel_size=3, skip_tokenizer_init=True, **SIZES)
    assert caught.value.param == "data_parallel_size"


def test_expert_parallelism_needs_experts(one_device):
    path, _ = one_device("llama")
    with pytest.raises(ConfigError, match="has no experts") as caught:
        LLM(str(path), tensor_parallel_size=2, enable_expert_parallel=True, skip_tokenizer_init=True, **SIZES)
    assert caught.value.param == "enable_expert_parallel"
