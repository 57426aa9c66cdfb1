"""Write the table of docs/models.md from the model families: ``python scripts/write_models.py [--check]``."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- models: written from jaxserve/models by scripts/write_models.py -->\n", "<!-- /models -->"


def families() -> list[tuple[str, list[str], str]]:
    """(family, architectures, what it is) of each module that declares ARCHITECTURES."""
    found: list[tuple[str, list[str], str]] = []
    for path in sorted((ROOT / "jaxserve" / "models").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ARCHITECTURES":
                first = (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ")
                family, _, text = first.partition(": ")
                found.append((family, list(ast.literal_eval(node.value)), text))
    return found


def page(text: str) -> str:
    """``text`` with the table of today."""
    rows = [
        f"| {family} | {', '.join(f'`{name}`' for name in names)} | {text.rstrip('.')} |"
        for family, names, text in families()
    ]
    table = "\n".join(["| family | architectures | what it is |", "|---|---|---|", *rows])
    head, tail = text.split(BEGIN)[0], text.split(END, 1)[1]
    return f"{head}{BEGIN}\n{table}\n\n{END}{tail}"


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--check"]:
        sys.exit(
            0 if page(before) == before else "docs/models.md is not current: run scripts/write_models.py"
        )
    PAGE.write_text(page(before), encoding="utf-8")
