"""Meshes, logical axes and the rules that map one to the other. Imports only JAX and itself."""

from sharding.constraints import named_sharding
from sharding.mesh import MESH_AXES, make_mesh
from sharding.param_spec import ParamSpec
from sharding.rules import DEFAULT_RULES, LOGICAL_AXES, ShardingRules

__all__ = [
    "DEFAULT_RULES",
    "LOGICAL_AXES",
    "MESH_AXES",
    "ParamSpec",
    "ShardingRules",
    "make_mesh",
    "named_sharding",
]
