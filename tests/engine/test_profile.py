"""Profiles of the engine core: begun and ended once, refused by name where they are off, real ones readable."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest
from fake_runner import FakeRunner
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve.config import EngineConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.core import EngineCore
from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams


class RecordingProfiler:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")
        if self.calls.count("stop") > 1:
            raise OSError("No space left on device")


def core(profiler=None) -> EngineCore:
    return EngineCore(EngineConfig().with_defaults_for("cpu"), FakeRunner(), profiler=profiler)


def test_off():
    assert "--profiler-dir" in (core().profile(start=True) or "")


def test_one_at_a_time_and_a_failure_is_only_told():
    profiler = RecordingProfiler()
    engine = core(profiler)
    answers = [engine.profile(start=start) for start in (False, True, True, False, False, True, False, True)]
    assert answers == [
        "No profile is running.", None, "A profile is running already.", None, "No profile is running.", None,
        "The profile failed: No space left on device", None,
    ]  # fmt: skip
    assert profiler.calls == ["start", "stop", "start", "stop", "start"]


@pytest.mark.slow
@pytest.mark.device
def test_a_real_profile(tmp_path):
    """Through the core's process; the trace names what ran."""
    model = write_tiny_checkpoint(tmp_path / "llama")
    folder = tmp_path / "profiles"
    engine = AsyncEngine.from_kwargs(
        str(model), profiler_dir=str(folder), max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16
    )

    async def run() -> None:
        with pytest.raises(InvalidRequestError, match="No profile"):
            await engine.stop_profile()
        await engine.start_profile()
        async for _ in engine.generate([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True)):
            pass
        with pytest.raises(InvalidRequestError, match="already"):
            await engine.start_profile()
        await engine.stop_profile()

    try:
        asyncio.run(run())
    finally:
        engine.shutdown()
    (trace,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert len(events) > 100
    assert list(folder.glob("plugins/profile/*/*.xplane.pb"))


def test_offline(tmp_path, monkeypatch):
    import jaxserve.engine.llm as llm_module

    profilers = {None: None, "x": RecordingProfiler()}

    def create_core(config: EngineConfig) -> EngineCore:
        profiler = profilers[config.observability_config.profiler_dir]
        return EngineCore(config.with_defaults_for("cpu"), FakeRunner(), profiler=profiler)

    monkeypatch.setattr(llm_module, "create_core", create_core)
    model = str(write_tiny_checkpoint(tmp_path / "llama"))
    with llm_module.LLM(model) as llm, pytest.raises(InvalidRequestError, match="--profiler-dir"):
        llm.start_profile()
    with llm_module.LLM(model, profiler_dir="x") as llm:
        llm.start_profile()
        llm.stop_profile()
        with pytest.raises(InvalidRequestError, match="No profile"):
            llm.stop_profile()
    assert profilers["x"].calls == ["start", "stop"]
