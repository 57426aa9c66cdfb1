"""Small chunks: every size is left free so many times between arrays that stay, on every device."""

from __future__ import annotations

import collections

import jax
import pytest

from jaxserve.runner import small_chunks
from jaxserve.runner.small_chunks import COUNT, GUARD, SIZES, SmallChunks

pytestmark = pytest.mark.device


def test_what_is_freed_lies_between_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    made = collections.defaultdict[jax.Device, list[jax.Array]](list)
    allocated = small_chunks._allocated

    def note(num_bytes: int, device: jax.Device) -> jax.Array:
        made[device].append(allocated(num_bytes, device))
        return made[device][-1]

    monkeypatch.setattr(small_chunks, "_allocated", note)
    devices = jax.local_devices()[:2]
    chunks = SmallChunks(devices)
    assert list(made) == devices
    for arrays in made.values():
        assert all(each.is_deleted() for each in arrays[::2])
        assert not any(each.is_deleted() for each in arrays[1::2])
        assert {each.nbytes for each in arrays[1::2]} == {GUARD}
        assert collections.Counter(each.nbytes for each in arrays[::2]) == dict.fromkeys(SIZES, COUNT)
    chunks.close()
    assert all(each.is_deleted() for arrays in made.values() for each in arrays)
