"""What a device decides where the user does not."""

from __future__ import annotations

import pytest

from jaxserve.config import EngineConfig

GIB = 1 << 30


@pytest.mark.parametrize(
    ("platform", "memory", "flags", "rows"),
    [
        ("cpu", None, {}, 64),
        ("gpu", 139 * GIB, {}, 1024),
        ("gpu", 24 * GIB, {}, 256),
        ("gpu", None, {}, 256),
        ("tpu", 96 * GIB, {}, 256),
        ("gpu", 139 * GIB, {"max_num_seqs": 32}, 32),
        ("gpu", 139 * GIB, {"max_num_batched_tokens": 512}, 512),
    ],
)
def test_rows(platform: str, memory: int | None, flags: dict[str, int], rows: int) -> None:
    config = EngineConfig.from_kwargs(**flags).with_defaults_for(platform, memory)
    assert config.scheduler_config.max_num_seqs == rows
