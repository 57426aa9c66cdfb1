"""Plans by arithmetic: the engine's own sizes for every model and topology, floors, fit, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_checkpoints import tiny_config, write_tiny_checkpoint

from jaxserve.cli.main import main
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, UnsupportedModelError
from jaxserve.plan import hardware
from jaxserve.plan.hardware import find_topology
from jaxserve.plan.make_plan import CompileOptions, Plan, make_plan
from jaxserve.plan.planned_store import PlannedStore
from jaxserve.plan.programs import Collective, count_collectives
from jaxserve.runner.model_runner import JaxModelRunner
from jaxserve.runner.program_store import ProgramStore

pytestmark = pytest.mark.device

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
NO_COMPILE = CompileOptions("none", traces=False)


def config_of(model: str) -> dict[str, Any]:
    return json.loads((MODELS / model / "config.json").read_text())


def plan(model: str | dict[str, Any], topology: str, **flags: Any) -> Plan:
    hf_config = config_of(model) if isinstance(model, str) else model
    config = EngineConfig.from_kwargs(**flags)
    return make_plan("model", hf_config, config, find_topology(topology), options=NO_COMPILE)


def test_an_8b_on_eight_chips() -> None:
    found = plan("llama-8b", "v6e-8", tensor_parallel_size=8, max_model_len=8192)
    assert found.num_params == 8_030_261_248
    norms = (2 * 32 + 1) * 4096 * 2  # whole on every device
    assert found.device_weight_bytes == (found.weight_bytes - norms) // 8 + norms
    assert found.device_bytes_per_token == 2 * 32 * 1 * 128 * 2  # one KV head a device
    assert found.fits
    assert found.device_cache_bytes + found.device_weight_bytes < found.budget_bytes <= 0.92 * 31.25 * 2**30
    (users,) = found.users
    assert users.requests == found.num_blocks // (8192 // 128)


@pytest.mark.parametrize(
    "model, topology", [("llama-70b", "v5p-16"), ("qwen3-30b-a3b", "h200-8"), ("qwen3-235b-a22b", "tpu7x-8")]
)
def test_models_over_nodes(model: str, topology: str) -> None:
    """Every parameter lies somewhere, none twice where it is split, and floors grow with the context."""
    devices = find_topology(topology).num_devices
    flags: dict[str, Any] = {"enable_expert_parallel": True} if model.startswith("qwen3") else {}
    found = plan(model, topology, tensor_parallel_size=devices, max_model_len=8192, **flags)
    billions = {"llama-70b": 70.55, "qwen3-30b-a3b": 30.53, "qwen3-235b-a22b": 235.0}[model]
    assert billions <= found.num_params / 1e9 < billions * 1.02  # KV heads may be replicated
    assert found.weight_bytes / devices <= found.device_weight_bytes <= 1.06 * found.weight_bytes / devices
    one, many, prompt = found.floors
    assert 0 < one.bytes_read < found.device_weight_bytes * 1.1
    assert many.bandwidth_seconds > one.bandwidth_seconds
    assert prompt.flop_seconds > many.flop_seconds


def test_floors_of_an_8b_on_one_gpu() -> None:
    found = plan("llama-8b", "h200-1", max_model_len=8192)
    one = found.floors[0]
    embedding = 128256 * 4096
    assert one.bytes_read == (found.num_params - embedding) * 2 + 8192 * 131072
    products = found.num_params - embedding - (2 * 32 + 1) * 4096
    assert one.flops == 2 * products + 4 * 32 * 32 * 128 * 8192
    assert one.seconds == one.bytes_read / 4.8e12


def test_experts_are_read_when_tokens_reach_them() -> None:
    """One token reads 8 of 128 experts; 256 of them nearly all."""
    one, many, _ = plan("qwen3-30b-a3b", "h200-1", max_model_len=1024, kv_cache_memory_bytes=2**36).floors
    experts = 48 * 128 * 3 * 768 * 2048 * 2
    rest = 0.12 * 2**30  # a cache of 1,024 tokens, at most
    weights = plan("qwen3-30b-a3b", "h200-1").device_weight_bytes - 151936 * 2048 * 2
    assert one.bytes_read == pytest.approx(weights - experts * (1 - 8 / 128), abs=rest)
    assert many.bytes_read - many.rows * 1024 * 98304 == pytest.approx(weights, rel=0.001)


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan("llama-8b", "v5e-1")
    assert not found.fits
    assert "16,400.0 MiB are missing" in str(found.why_not)
    asked = plan("llama-8b", "h200-1", kv_cache_memory_bytes=130 * 2**30)
    assert "the cache asked for (133,120 MiB) take" in str(asked.why_not)
    assert main(["plan", str(MODELS / "llama-8b"), "--topology", "v5e-1", "--no-compile"]) == 1
    assert "Does not fit: The KV cache gets 0.0 MiB" in capsys.readouterr().out


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(MODELS / "llama-8b" / "config.json")
    flags = ["--topology", "h200-8", "-tp", "4", "--max-model-len", "8K", "--context", "2K", "200K"]
    flags += ["--hf-overrides", '{"num_hidden_layers": 2}']
    assert main(["plan", model, *flags]) == 0
    text = capsys.readouterr().out
    assert "8 x NVIDIA H200, 4 used (tp 4, dp 1)" in text
    assert "5 all-reduce " in text
    assert "Nothing was compiled" in text
    assert main(["plan", model, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert [users["context"] for users in found["users"]] == [2048, 8192]
    assert found["cache_tokens"] == found["num_blocks"] * found["block_size"]
    assert found["floors"][0]["seconds"] > 0


def test_refusals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'v6e-7' is not known; known are .*v6e-8"):
        find_topology("v6e-7")
    with pytest.raises(
        ConfigError, match=r"needs 16 devices, but there are 8\. All of them are used by: -tp 1 -dp 8"
    ):
        plan("llama-8b", "v6e-8", tensor_parallel_size=16)
    with pytest.raises(UnsupportedModelError, match=r"architecture Nonesuch is not supported"):
        plan({"architectures": ["Nonesuch"]}, "v6e-8")
    assert main(["plan", str(MODELS / "llama-8b"), "--topology", "h200-8", "--compile", "decode"]) == 1
    assert "without its devices: add --no-compile" in capsys.readouterr().err
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: None)
    assert main(["plan", str(MODELS / "llama-8b"), "--topology", "v6e-8"]) == 1
    assert "pip install 'jaxserve[tpu]', or add --no-compile" in capsys.readouterr().err


def test_collectives_of_a_program() -> None:
    text = """
  %a = bf16[256,4096]{1,0:T(8,128)(2,1)S(1)} all-reduce(%x), replica_groups={}
  %b = (bf16[32,64]{1,0}, bf16[256,64]{1,0}) all-gather-start(%y), dimensions={0}
  %c = bf16[256,64]{1,0} all-gather-done(%b)
  %d = f32[8]{0} add(%all-reduce.1, %a)
"""
    assert count_collectives(text) == (
        Collective("all-gather", 1, 256 * 64 * 2),
        Collective("all-reduce", 1, 256 * 4096 * 2),
    )


def test_collectives_of_a_step_that_is_not_compiled() -> None:
    """Two a layer and the embedding's over eight devices; the sampler's are small. Ranks share nothing but that."""
    hf_config = config_of("llama-8b") | {"num_hidden_layers": 2}
    config = EngineConfig.from_kwargs(
        tensor_parallel_size=4, data_parallel_size=2, max_model_len=8192, max_num_seqs=256
    )
    found = make_plan("model", hf_config, config, find_topology("h200-8"), options=CompileOptions("none"))
    assert found.step_collectives is not None
    counts = {each.kind: each for each in found.step_collectives}
    reduced = counts["all-reduce"]
    hidden = 256 * 4096 * 2
    assert (reduced.count, reduced.result_bytes) == (5, 5 * hidden)
    assert reduced.sent_bytes == 5 * hidden * 2 * 3 // 4
    assert counts["all-gather"].result_bytes < hidden
    experts = make_plan(
        "model", config_of("qwen3-30b-a3b") | {"num_hidden_layers": 2}, config, find_topology("h200-8"),
        options=CompileOptions("none"),
    )  # fmt: skip
    assert {each.kind: each.count for each in experts.step_collectives or ()}["all-reduce"] >= 5
    alone = make_plan(
        "model", hf_config, EngineConfig.from_kwargs(max_model_len=8192), find_topology("h200-1"),
        options=CompileOptions("none"),
    )  # fmt: skip
    assert alone.step_collectives == ()


@pytest.mark.slow
def test_the_engine_allocates_what_was_planned(tmp_path: Path) -> None:
    """A real start on CPU devices, with KV heads replicated over four: equal blocks, and equal bytes a device."""
    overrides = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    devices = 4
    flags = {
        "tensor_parallel_size": devices, "kv_cache_memory_bytes": 20_000_000, "dtype": "float32", "block_size": 32,
        "max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 128,
    }  # fmt: skip
    folder = write_tiny_checkpoint(tmp_path, "llama", tokenizer=False, **overrides)
    config = EngineConfig.from_kwargs(model=str(folder), **flags).with_defaults_for("cpu")
    runner = JaxModelRunner(config)
    info = runner.initialize()
    device_bytes = sum(value.addressable_shards[0].data.nbytes for value in runner.params.values())
    runner.close()
    found = plan(tiny_config("llama", **overrides), "v6e-4", **flags)
    assert found.num_blocks + 1 == info.num_blocks
    assert found.device_weight_bytes == device_bytes
    assert found.device_cache_bytes * devices == info.kv_cache_bytes
    assert math.isclose(found.device_bytes_per_token * devices, info.kv_cache_bytes / info.num_blocks / 32)


def test_the_store_for_other_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Programs go in under an engine's keys; here they only count as present. Filling it in vain is refused."""
    key = ("step", 8)
    store = PlannedStore(tmp_path, "an engine", jax.devices()[:1])
    assert store.load(key) is None
    store.save(key, jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((2,), "float32")).compile())
    assert store.load(key)
    assert store.hits == 1
    engine = ProgramStore(tmp_path, "an engine", jax.devices()[:1])
    assert engine.load(key)(np.zeros(2, np.float32)).tolist() == [1.0, 1.0]
    assert PlannedStore(tmp_path, "an engine", jax.devices()[:1], device_count=99).load(key) is None
    flags = ["--topology", "v6e-8", "--no-compile", "--fill-cache"]
    assert main(["plan", str(MODELS / "llama-8b"), *flags]) == 1
    assert "fill_cache compiles every program" in capsys.readouterr().err
