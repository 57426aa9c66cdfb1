"""Plans of a model with latent attention: what a token's latent takes, and what reading it costs."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.plan.hardware import find_topology
from jaxserve.plan.make_plan import CompileOptions, Plan, make_plan

pytestmark = pytest.mark.device

CONFIG = Path(__file__).parents[2] / "benchmarks" / "models" / "deepseek-v3" / "config.json"


def plan(topology: str, max_model_len: int = 8192, **flags: Any) -> Plan:
    config = EngineConfig.from_kwargs(max_model_len=max_model_len, enable_expert_parallel=True, **flags)
    options = CompileOptions("none", traces=False)
    return make_plan(
        "model", json.loads(CONFIG.read_text()), config, find_topology(topology), options=options
    )


def test_deepseek_v3_over_a_slice() -> None:
    found = plan("v5p-64", tensor_parallel_size=8, data_parallel_size=4)
    assert found.num_params / 1e9 == pytest.approx(671.03, abs=0.01)
    assert found.fits
    assert found.attention == "blocked_latent"
    assert "no TPU kernel for latent attention" in str(found.why_portable)
    assert found.device_bytes_per_token == 640 * 2 * 61  # 576 elements in whole lanes, on each device
    assert found.device_cache_bytes + found.device_weight_bytes < found.budget_bytes
    experts = 58 * 256 * 3 * 2048 * 7168 // 32
    whole = 61 * (1536 + 576) * 7168 + 58 * 256 * 7168  # the products down to latents, and the routers
    heads = 61 * (128 * 192 * 1536 + 128 * 256 * 512 + 128 * 128 * 7168) // 8
    ffn = (58 * 3 * 2048 + 3 * 3 * 18432) * 7168 // 8
    vocab = 2 * 129280 * 7168 // 8
    norms = (2 * 7168 + 1536 + 512) * 61 + 7168
    single = 58 * 256 * 4  # the router's bias, in float32
    assert found.device_weight_bytes == 2 * (experts + whole + heads + ffn + vocab + norms) + single


def test_floors_read_one_latent_a_token() -> None:
    """On GPUs nothing is padded; each of a device's 16 heads scores 576 elements and adds up 512."""
    near, far = (plan("h200-8", length, tensor_parallel_size=8) for length in (4096, 8192))
    assert far.device_bytes_per_token == 576 * 2 * 61
    assert not far.fits  # 1.3 TB in bfloat16
    few, many = near.floors[0], far.floors[0]
    assert (few.context, many.context) == (4096, 8192)
    assert many.bytes_read - few.bytes_read == 4096 * 576 * 2 * 61
    assert many.flops - few.flops == 4096 * 2 * 16 * (576 + 512) * 61
