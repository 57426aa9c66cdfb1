"""The memory that a cache is sized by: the user's share of the device's, whatever JAX's allocator holds of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxserve.runner.kv_arrays import device_budget

pytestmark = pytest.mark.device

GIB = 2**30


def device(platform: str, limit: float, in_use: float = 10.0) -> SimpleNamespace:
    stats = {"bytes_limit": int(limit * GIB), "bytes_in_use": int(in_use * GIB)}
    return SimpleNamespace(platform=platform, memory_stats=lambda: stats)


@pytest.mark.parametrize(
    ("platform", "fraction", "limit", "expected"),
    [
        ("gpu", "0.94", 0.94 * 140, 0.92 * 140),  # as an engine sets it: the share counts once
        ("gpu", "0.5", 0.5 * 140, 0.5 * 140),  # the user's own, smaller
        ("gpu", "", 0.75 * 140, 0.75 * 140),  # JAX's default
        ("tpu", "0.94", 31.0, 0.92 * 31),  # a TPU tells all it has
    ],
)
def test_share(monkeypatch, platform, fraction, limit, expected):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", fraction)
    budget = device_budget([device(platform, limit), device(platform, limit, in_use=9.0)], 0.92, 0)
    assert budget is not None
    assert budget.total == pytest.approx(expected * GIB, rel=1e-6)
    assert budget.in_use == 10 * GIB  # of the fuller one


def test_a_device_that_does_not_tell():
    assert device_budget([SimpleNamespace(platform="cpu", memory_stats=lambda: None)], 0.92, 0) is None
