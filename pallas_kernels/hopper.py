"""Whether this process' GPU is a Hopper, and JAX new enough for the kernels made for one; and how large it is."""

from __future__ import annotations

import jax

FIRST_JAX = (0, 11)


def hopper_why_not(what: str) -> str | None:
    """Why ``what``, a kernel, cannot run on the first local GPU; None: it can."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < FIRST_JAX:
        return f"{what} needs jax >= 0.11 (Python >= 3.12), this is jax {jax.__version__}"
    device = jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", "none"))
    if capability != "9.0":
        return f"{what} needs compute capability 9.0, {device.device_kind} has {capability}"
    return None


def multiprocessors(num_sms: int | None) -> int:
    """``num_sms``, where kernels are lowered for a GPU that is not here; None: those of the first local GPU."""
    return jax.local_devices()[0].core_count if num_sms is None else num_sms
