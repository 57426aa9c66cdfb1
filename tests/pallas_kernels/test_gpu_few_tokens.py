"""Experts of few tokens on Hopper against the oracles, interpreted on a CPU; that all of it lowers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import COMPILER_OPTIONS, needs_mosaic_gpu, strict, unexpected_races

from pallas_kernels.grouped_matmul import few
from pallas_kernels.grouped_matmul.few import Chosen, Rule

pytestmark = [pytest.mark.device, needs_mosaic_gpu]


def run(function, *operands):
    return jax.jit(function).lower(*operands).compile(COMPILER_OPTIONS)(*operands)


RULES = {
    "softmax of equal logits": (5, 64, Rule(3)),
    "renormalized": (40, 128, Rule(8, renormalize=True)),
    "sigmoid": (9, 128, Rule(4, sigmoid=True, renormalize=True, scale=2.0)),
    "more than 8, all warpgroups": (57, 64, Rule(9, sigmoid=True)),
}


@pytest.mark.parametrize("name", RULES)
def test_choice_equals_the_oracle(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from pallas_kernels.grouped_matmul import gpu_choose

    num_tokens, num_experts, rule = RULES[name]
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((num_tokens, num_experts)).round(1), jnp.float32)
    x = jnp.asarray(rng.standard_normal((num_tokens, 128)), jnp.bfloat16)
    live = jnp.arange(num_tokens) % 5 != 1
    logits = jnp.where(live[:, None], logits, jnp.nan)
    found, load, rows = run(lambda *each: gpu_choose.choose(*each, rule, interpret=strict()), logits, live, x)
    expected, expected_load = few.choose(jnp.nan_to_num(logits), live, rule)
    weights = found.weights[:, :num_tokens]
    np.testing.assert_allclose(weights, expected.weights[:, :num_tokens], atol=1e-6)
    assert ((weights > 0).sum(axis=0) == jnp.where(live, rule.top_k, 0)).all()
    np.testing.assert_array_equal(found.up_to, expected.up_to)
    count = int(found.up_to[-1])
    np.testing.assert_array_equal(found.used[:count], expected.used[:count])
    assert ((found.used >= 0) & (found.used < num_experts)).all()
    np.testing.assert_array_equal(load, expected_load)
    assert rows.shape[0] % 8 == 0
    np.testing.assert_array_equal(rows[:num_tokens], x)
    assert not unexpected_races(capsys.readouterr().out)


# The last two have more than the shared memory holds, and wider tokens than one copy takes.
@pytest.mark.parametrize("num_tokens,hidden,kernel_pads", [
    (1, 2048, True), (8, 2048, False), (33, 2048, True), (64, 2048, False), (33, 4096, False), (1, 20480, False),
])  # fmt: skip
@pytest.mark.parametrize("num_experts", [64, 128])
def test_choice_lowers(num_tokens: int, hidden: int, kernel_pads: bool, num_experts: int) -> None:
    from pallas_kernels.grouped_matmul import gpu_choose

    shape = jax.ShapeDtypeStruct
    operands = (
        shape((num_tokens, num_experts), jnp.float32), shape((num_tokens,), bool),
        shape((num_tokens, hidden), jnp.bfloat16),
    )  # fmt: skip
    traced = jax.jit(lambda *each: gpu_choose.choose(*each, Rule(2))).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 1
    assert f":{6 if kernel_pads else 5} = stablehlo.custom_call @mosaic_gpu_v2" in text
    assert traced.jaxpr.out_avals[-1].shape == (-(-num_tokens // 8) * 8, hidden)


# Tokens, experts, chosen ones, ffn, hidden; consumers, blocks and stages of the two kernels, or of one that is both.
EXPERTS = {
    "fewer than 8 tokens": (3, 4, 2, 64, 128, (1, 1, 2), (1, 1, 2)),
    "odd blocks, two of them": (9, 6, 2, 192, 128, (2, 1, 2), (2, 2, 3)),
    "one kernel": (3, 4, 2, 64, 128, (1, 1, 2)),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_equal_the_oracle(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from pallas_kernels.grouped_matmul.gpu_few import GpuFewTokens
    from pallas_kernels.grouped_matmul.gpu_few_tuning import FewConfig

    num_tokens, num_experts, top_k, ffn, hidden, *sizes = EXPERTS[name]
    configs = [FewConfig(consumers, blocks, 64, stages) for consumers, blocks, stages in sizes]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((num_tokens, hidden)), jnp.bfloat16)
    gate_up = jnp.asarray(rng.standard_normal((num_experts, 2, ffn, hidden)) / hidden**0.5, jnp.bfloat16)
    down = jnp.asarray(rng.standard_normal((num_experts, hidden, ffn)) / ffn**0.5, jnp.bfloat16)
    experts = np.stack([rng.permutation(num_experts - 1)[:top_k] for _ in range(num_tokens)])
    experts[-1] = num_experts  # padding chooses nobody
    weights = jnp.asarray(rng.random((num_tokens, top_k)), jnp.float32)
    chosen = Chosen.of(weights, jnp.asarray(experts, jnp.int32), num_experts)
    expected = few.gated_mlp(x, gate_up, down, chosen)
    unused = np.setdiff1d(np.arange(num_experts), experts)
    gate_up, down = gate_up.at[unused].set(jnp.nan), down.at[unused].set(jnp.nan)
    # The interpreter runs one CTA after another: where they wait for one another, there may be but one.
    kernel = GpuFewTokens(
        num_sms=2 if configs[1:] else 1,
        configs=tuple(configs) if configs[1:] else configs[0],
        interpret=strict(),
    )
    found = run(kernel, x, gate_up, down, chosen)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=0.02)
    np.testing.assert_array_equal(found[-1], 0)
    assert not unexpected_races(capsys.readouterr().out)


@pytest.mark.parametrize("num_tokens", [1, 64])
def test_three_kernels_are_all_of_it(num_tokens: int) -> None:
    from pallas_kernels.grouped_matmul.gpu_few import GpuFewTokens

    experts, ffn, hidden, shape = 128, 768, 2048, jax.ShapeDtypeStruct
    operands = (
        shape((num_tokens, hidden), jnp.bfloat16), shape((num_tokens, experts), jnp.float32),
        shape((num_tokens,), bool), shape((experts, 2, ffn, hidden), jnp.bfloat16),
        shape((experts, hidden, ffn), jnp.bfloat16),
    )  # fmt: skip

    def layer(x, logits, live, gate_up, down):
        return GpuFewTokens(num_sms=132).routed(x, logits, live, Rule(8, renormalize=True), gate_up, down)

    text = jax.jit(layer).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 3
    assert "stablehlo.sort" not in text


def test_what_it_does_not_do_is_said() -> None:
    from pallas_kernels.grouped_matmul.gpu_few import GpuFewTokens
    from pallas_kernels.grouped_matmul.gpu_few_tuning import FewConfig

    kernel = GpuFewTokens(num_sms=132)
    assert kernel.why_not(1, 768, 2048, "bfloat16") is None
    assert "float32" in (kernel.why_not(1, 768, 2048, "float32") or "")
    assert "96 x 2048" in (kernel.why_not(1, 96, 2048, "bfloat16") or "")
    assert "4096 tokens are not few" in (kernel.why_not(4096, 768, 2048, "bfloat16") or "")
    assert kernel.why_not_choose(64, 128) is None
    assert "96" in (kernel.why_not_choose(1, 96) or "")
    for wrong in (dict(consumers=3), dict(blocks=0), dict(step=96), dict(stages=1)):
        with pytest.raises(ValueError, match="consumers are 1 or 2"):
            FewConfig(**wrong)
