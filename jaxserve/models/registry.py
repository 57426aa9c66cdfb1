"""Finding a checkpoint's family: every module here that is not a helper declares its ARCHITECTURES."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, cast

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.interface import ModelFamily

HELPERS = frozenset({"dense", "experts", "functional", "interface", "registry"})


def discover(
    package_name: str = "jaxserve.models", helpers: frozenset[str] = HELPERS
) -> dict[str, ModelFamily]:
    """Import every family of a package: architecture name to module.

    Raises:
        TypeError: for a module that breaks the contract, or an architecture that two modules claim.
    """
    package = importlib.import_module(package_name)
    families: dict[str, ModelFamily] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name in helpers:
            continue
        module = importlib.import_module(f"{package_name}.{info.name}")
        architectures = getattr(module, "ARCHITECTURES", None)
        if (
            not architectures
            or isinstance(architectures, str)
            or not callable(getattr(module, "create", None))
        ):
            raise TypeError(f"{module.__name__} must define ARCHITECTURES (a tuple of names) and create()")
        for architecture in architectures:
            if architecture in families:
                other = cast(Any, families[architecture]).__name__
                raise TypeError(f"{architecture} is claimed by {other} and by {module.__name__}")
            families[architecture] = cast(ModelFamily, module)
    return families


@functools.cache
def _families() -> dict[str, ModelFamily]:
    return discover()


def supported_architectures() -> list[str]:
    """All architecture names, sorted."""
    return sorted(_families())


def find_family(config: Mapping[str, Any]) -> ModelFamily:
    """The module that implements a config.json.

    Raises:
        UnsupportedModelError: naming the architecture and listing the supported ones.
    """
    architectures = config.get("architectures") or []
    architectures = [architectures] if isinstance(architectures, str) else architectures
    for architecture in architectures:
        if architecture in _families():
            return _families()[architecture]
    named = ", ".join(map(str, architectures)) or f"none named (model_type {config.get('model_type')!r})"
    raise UnsupportedModelError(
        f"architecture {named} is not supported; supported are {', '.join(supported_architectures())}."
    )
