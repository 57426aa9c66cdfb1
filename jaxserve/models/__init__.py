"""Model families, one a file, and ``build``: from a config.json to pure functions over a dict of arrays."""

from jaxserve.models.functional import Model, Params, build

__all__ = ["Model", "Params", "build"]
