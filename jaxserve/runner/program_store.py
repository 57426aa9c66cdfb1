"""ProgramStore: compiled programs on disk, found without tracing the model again.

JAX's own cache is keyed by the lowered program, and tracing and lowering dozens of programs takes most of a warm
start. This one is keyed by everything a program depends on: the sources of these packages, the versions of JAX and of
its compilers, the device, the flags, the model's config and the engine's sizes. Whatever changes makes other keys.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

logger = logging.getLogger(__name__)

PACKAGES = ("jaxserve", "pallas_kernels", "sharding")
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "JAX_DEFAULT_MATMUL_PRECISION")
"""Variables that change what is compiled."""
SETTINGS = (
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_debug_nans",
)
MOST_FILES = 4096
"""Programs kept; the longest unused go first."""


class ProgramStore:
    """Compiled programs of one engine.

    Args:
        directory: where they are kept; None keeps nothing.
        description: everything about the engine that its programs depend on, as text.
        devices: what they run on, in the mesh's order.
        device_count: devices that the program has in all; default: this process's own count.
    """

    def __init__(
        self,
        directory: Path | None,
        description: str,
        devices: Sequence[jax.Device] = (),
        device_count: int | None = None,
    ) -> None:
        self._directory = directory
        self._write_failed = False
        self._devices = list(devices) or jax.local_devices()[:1]
        ids = [device.id for device in self._devices]
        count = device_count or jax.device_count()
        surroundings = _surroundings(self._devices[0], count) if directory else ""
        self._base = _digest(surroundings, description, repr(ids)) if directory else ""
        self.hits = 0

    def load(self, key: object) -> Any:
        """The compiled program of ``key``, or None."""
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            payload, in_tree, out_tree = pickle.loads(path.read_bytes())
            program = serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, execution_devices=self._devices
            )
            path.touch()
        except Exception as error:  # whatever is wrong with a file, compiling is right
            logger.warning("A stored program could not be read (%s); it is compiled again.", error)
            path.unlink(missing_ok=True)
            return None
        self.hits += 1
        return program

    def save(self, key: object, program: Any) -> None:
        """Keep a program. A disk that is full or read-only costs the next start time, not this one its life."""
        path = self._path(key)
        if path is None:
            return
        try:
            _write(path, pickle.dumps(serialize_executable.serialize(program)))
        except OSError as error:
            if not self._write_failed:  # once: dozens of programs meet the same disk
                self._write_failed = True
                logger.warning(
                    "Compiled programs could not be stored in %s: %s. The next start compiles them again; make room "
                    "there, or name another folder with --compile-cache-dir.",
                    path.parent, error.strerror or error,
                )  # fmt: skip
        except Exception as error:
            logger.warning("A compiled program could not be stored: %s", error)

    def remember(self, key: object, make: Callable[[], int]) -> int:
        """A number that takes a compilation to find out."""
        path = self._path(("number", key))
        if path is not None and path.exists():
            text = path.read_text()
            if text.isdecimal():
                return int(text)
        number = make()
        self.note(key, number)
        return number

    def note(self, key: object, number: int) -> None:
        """Let ``remember`` answer with another number from now on."""
        path = self._path(("number", key))
        if path is None:
            return
        try:
            _write(path, str(number).encode())
        except OSError as error:
            logger.warning("Could not write to the program store: %s", error)

    def _path(self, key: object) -> Path | None:
        return None if self._directory is None else self._directory / _digest(self._base, repr(key))


def prune(directory: Path | None) -> None:
    """Remove the longest unused of too many files."""
    if directory is None or not directory.is_dir():
        return
    try:
        files = sorted((path for path in directory.iterdir() if path.is_file()), key=_last_used)
        for file in files[: max(0, len(files) - MOST_FILES)]:
            file.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("The program store could not be tidied: %s", error)


def _last_used(path: Path) -> float:
    """0 of a file that another engine removed meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all: other engines may start at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = tempfile.NamedTemporaryFile(dir=path.parent, delete=False)  # noqa: SIM115 it may be left by an error
    try:
        with file:
            file.write(data)
        os.replace(file.name, path)
    except BaseException:  # a part of it would take what room there is
        Path(file.name).unlink(missing_ok=True)
        raise


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache
def _surroundings(device: jax.Device, device_count: int) -> str:
    """What every program for such devices depends on."""
    facts: list[object] = [
        jax.__version__, jaxlib.__version__, device.platform, device.device_kind, device.client.platform_version,
        device_count, [os.environ.get(name) for name in ENVIRONMENT],
        [getattr(jax.config, name, None) for name in SETTINGS], _sources(),
    ]  # fmt: skip
    if device.platform == "cpu":
        facts.append(_cpu_features())
    return repr(facts)


def _cpu_features() -> str:
    """Compiled code for one processor may not run on another one that shares the folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        import platform

        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _sources() -> str:
    """A digest of the packages' code and tables."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*")):
            if file.suffix in (".py", ".json"):
                digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()
