"""Imports go down only, and the host side never imports JAX: read from the sources, and tried out."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

# Rooms from the ground up. A room imports rooms of lower floors and itself; rooms of one floor do not know
# each other. A module or package directly under jaxserve/ is a room; so are pallas_kernels and sharding.
FLOORS: list[set[str]] = [
    {"errors", "version", "pallas_kernels", "sharding"},
    {"kv_cache_spec", "outputs", "reasoning_params", "structured_outputs_params"},
    {"sampling_params"},
    {"config", "logs"},
    {"step"},
    {"metrics", "tokenizer", "weights"},
    {"structured_output"},
    {"request"},
    {"kv_cache", "layers", "parsers", "sampling"},
    {"models", "scheduler"},
    {"runner"},
    {"engine", "plan"},
    {"server", "bench"},
    {"cli"},
    {"ray_serve"},
    {"jaxserve"},  # jaxserve/__init__.py, the public names
]
# Device side: these may import JAX; nobody else reaches it when imported.
DEVICE_ROOMS = {"pallas_kernels", "sharding", "weights", "layers", "sampling", "models", "runner", "plan"}
# These import only JAX, numpy, the standard library and themselves.
STANDALONE = {"pallas_kernels", "sharding"}
STANDALONE_MAY_IMPORT = {"jax", "jaxlib", "numpy"}
# The one place that gets the runner, inside a function; all else knows the runner by its protocol.
RUNNER_FACTORY = "jaxserve.engine.factory"
# Rooms that do not import JAX inside a function either.
NEVER_JAX = {
    "server", "parsers", "scheduler", "kv_cache", "tokenizer", "config", "metrics",
    "step", "request", "structured_output",
}  # fmt: skip
JAX = {"jax", "jaxlib", "flax", "orbax", "optax"}

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxserve", "pallas_kernels", "sharding")

When = Literal["import", "call", "typing"]


@dataclass(frozen=True)
class Import:
    """``source`` imports ``target``: when it is imported, inside a function, or for type checkers only."""

    source: str
    target: str
    when: When
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


class Sources:
    """The imports of all modules under a root."""

    def __init__(self, root: Path) -> None:
        self.paths = dict(_modules(root))
        self.imports = [found for name in self.paths for found in self._imports_of(name)]
        self._imported: dict[str, set[str]] = {name: set() for name in self.paths}
        for found in self.imports:
            if found.when == "import":
                self._imported[found.source].add(found.target)

    def reachable(self, name: str) -> set[str]:
        """All modules that importing ``name`` imports; of third parties only the direct imports."""
        seen: set[str] = set()
        todo = [name]
        while todo:
            module = todo.pop()
            if module in seen:
                continue
            seen.add(module)
            parents = [module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1)]
            todo += [parent for parent in parents if parent in self.paths]
            todo += self._imported.get(module, ())
        return seen - {name}

    def _imports_of(self, name: str) -> Iterator[Import]:
        path = self.paths[name]
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node, when in _walk(ast.parse(path.read_text(encoding="utf-8")), "import"):
            for target in self._targets(node, package):
                yield Import(name, target, when, node.lineno)

    def _targets(self, node: ast.stmt | ast.expr, package: str) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            yield base
            yield from (
                f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in self.paths
            )
        elif isinstance(node, ast.Call) and _called_name(node.func) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _walk(node: ast.AST, when: When) -> Iterator[tuple[ast.stmt | ast.expr, When]]:
    """All statements and expressions, with the time at which they run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for inner in child.body:
                yield inner, "typing"
                yield from _walk(inner, "typing")
            for inner in child.orelse:
                yield inner, when
                yield from _walk(inner, when)
            continue
        inside: When = (
            "call" if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else when
        )
        if isinstance(child, ast.stmt | ast.expr):
            yield child, inside
        yield from _walk(child, inside)


def _called_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def room_of(module: str) -> str | None:
    """The room of one of our modules, None for others."""
    parts = module.split(".")
    if parts[0] not in PACKAGES:
        return None
    return parts[1] if parts[0] == "jaxserve" and len(parts) > 1 else parts[0]


def floor_of(room: str) -> int:
    for floor, rooms in enumerate(FLOORS):
        if room in rooms:
            return floor
    raise AssertionError(f"jaxserve/{room} is a new room: give it a floor in FLOORS of {Path(__file__).name}")


def upward_imports(sources: Sources) -> list[str]:
    bad: list[str] = []
    for found in sources.imports:
        room, target = room_of(found.source), room_of(found.target)
        if room is None or target in (None, room):
            continue
        package_only = (
            found.target == "jaxserve"
        )  # `from jaxserve import x` names x as well, checked on its own
        if not package_only and floor_of(target or "") >= floor_of(room):
            bad.append(str(found))
    return bad


def jax_at_import(sources: Sources) -> list[str]:
    """Modules of the host side that reach JAX, or a module of the device side that does, when imported."""
    bad: list[str] = []
    for name in sources.paths:
        if room_of(name) not in DEVICE_ROOMS:
            reached = {module.split(".")[0] for module in sources.reachable(name)} & JAX
            bad += [f"{name} reaches {package}" for package in sorted(reached)]
    return bad


def forbidden_in_functions(sources: Sources) -> list[str]:
    """Imports inside functions that get around the rules."""
    bad: list[str] = []
    for found in sources.imports:
        room, target = room_of(found.source), room_of(found.target)
        if (
            target == "runner"
            and room not in ("runner", "plan")
            and (found.source, found.when) != (RUNNER_FACTORY, "call")
        ):
            bad.append(str(found))
        reached = {module.split(".")[0] for module in (found.target, *sources.reachable(found.target))}
        if room in NEVER_JAX and found.when != "typing" and reached & JAX:
            bad.append(str(found))
    return bad


def not_standalone(sources: Sources) -> list[str]:
    bad: list[str] = []
    for found in sources.imports:
        package, target = found.source.split(".")[0], found.target.split(".")[0]
        allowed = {package, *STANDALONE_MAY_IMPORT, *sys.stdlib_module_names}
        if package in STANDALONE and target not in allowed:
            bad.append(str(found))
    return bad


Rule = Callable[[Sources], list[str]]
RULES: list[Rule] = [upward_imports, jax_at_import, forbidden_in_functions, not_standalone]


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(ROOT)


@pytest.mark.parametrize("rule", RULES)
def test_rules(sources: Sources, rule: Rule) -> None:
    assert len(sources.paths) > 50
    assert rule(sources) == []


def test_floors_name_each_room_once_and_only_rooms_that_exist(sources: Sources) -> None:
    named = [room for rooms in FLOORS for room in rooms]
    assert len(named) == len(set(named))
    assert set(named) == {room_of(name) for name in sources.paths}


def test_importing_the_host_side_does_not_load_jax(sources: Sources) -> None:
    """What third parties import counts too."""
    host = [name for name in sources.paths if room_of(name) not in DEVICE_ROOMS and "__main__" not in name]
    code = f"""
import importlib, sys
for name in {host!r}:
    importlib.import_module(name)
    loaded = {JAX!r} & sys.modules.keys()
    assert not loaded, f"importing {{name}} loads {{loaded}}"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "files, rule, message",
    [
        (
            {"jaxserve/kv_cache/a.py": "from jaxserve.scheduler.b import x", "jaxserve/scheduler/b.py": ""},
            upward_imports,
            "jaxserve.kv_cache.a:1 imports jaxserve.scheduler.b",
        ),
        (
            {"jaxserve/kv_cache/a.py": "from .. import engine", "jaxserve/engine/__init__.py": ""},
            upward_imports,
            "jaxserve.kv_cache.a:1 imports jaxserve.engine",
        ),
        (
            {"jaxserve/step.py": "def f():\n    import jaxserve.request", "jaxserve/request.py": ""},
            upward_imports,
            "jaxserve.step:2 imports jaxserve.request",
        ),
        (
            {"jaxserve/config/a.py": "import jaxserve.logs", "jaxserve/logs.py": ""},
            upward_imports,
            "jaxserve.config.a:1 imports jaxserve.logs",
        ),
        ({"jaxserve/metrics/a.py": "import jax.numpy"}, jax_at_import, "jaxserve.metrics.a reaches jax"),
        (
            {
                "jaxserve/engine/a.py": "from jaxserve.weights.b import x",
                "jaxserve/weights/__init__.py": "try:\n    from flax import nnx\nexcept ImportError: pass",
                "jaxserve/weights/b.py": "",
            },
            jax_at_import,
            "jaxserve.engine.a reaches flax",
        ),
        (
            {"jaxserve/server/a.py": "def f():\n    import jax"},
            forbidden_in_functions,
            "jaxserve.server.a:2 imports jax",
        ),
        (
            {"jaxserve/server/a.py": "f = lambda: __import__('sharding.b')", "sharding/b.py": "import jax"},
            forbidden_in_functions,
            "jaxserve.server.a:1 imports sharding.b",
        ),
        (
            {
                "jaxserve/engine/core.py": "def f():\n    from jaxserve.runner import a",
                "jaxserve/runner/a.py": "",
            },
            forbidden_in_functions,
            "jaxserve.engine.core:2 imports jaxserve.runner.a",
        ),
        (
            {"jaxserve/engine/factory.py": "from jaxserve.runner.a import b", "jaxserve/runner/a.py": ""},
            forbidden_in_functions,
            "jaxserve.engine.factory:1 imports jaxserve.runner.a",
        ),
        (
            {"sharding/a.py": "import json, jax, numpy\nimport flax"},
            not_standalone,
            "sharding.a:2 imports flax",
        ),
        (
            {"pallas_kernels/a.py": "def f():\n    import sharding.b", "sharding/b.py": ""},
            not_standalone,
            "pallas_kernels.a:2 imports sharding.b",
        ),
    ],
)
def test_violations_are_found(tmp_path: Path, files: dict[str, str], rule: Rule, message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert message in rule(Sources(tmp_path))


def test_what_is_allowed_is_not_found(tmp_path: Path) -> None:
    files = {
        "jaxserve/engine/factory.py": "def f():\n    import_module('jaxserve.runner.a')",
        "jaxserve/runner/a.py": "import jax\nfrom jaxserve import errors",
        "jaxserve/errors.py": "import json",
        "jaxserve/server/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax",
        "jaxserve/cli/c.py": "def f():\n    import jax",
        "sharding/d.py": "import jax, numpy, dataclasses\nfrom . import e",
        "sharding/e.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [bad for rule in RULES for bad in rule(Sources(tmp_path))] == []
