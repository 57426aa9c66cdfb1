"""Tests run on the CPU with 8 virtual devices, unless the environment says otherwise. Imports no JAX."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
DEVICES_FLAG = "--xla_force_host_platform_device_count"
if DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES_FLAG}=8".strip()
