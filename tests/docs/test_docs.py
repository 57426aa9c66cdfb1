"""The documentation says what the code says: messages, flags, metrics, families and paths that it names are there."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.cli import serve
from jaxserve.metrics.engine_metrics import EngineMetrics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
CODE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "jaxserve").rglob("*.py")))
TEXT = re.sub(r'"\s*\n\s*f?"', "", CODE)
"""The sources, with messages that go over several lines in one."""
FLAG = re.compile(r"`(--[a-z][a-z-]*)`")


def section(page: str, name: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    return text.split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub("```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def known_flags() -> set[str]:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize(
    "message",
    re.findall("^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE),
)
def test_messages_of_troubleshooting_are_the_codes(message):
    parts = [part.strip() for part in message.split("…") if len(part.strip()) > 3]
    assert parts
    for part in parts:
        assert part in TEXT or part in TEXT.replace("`", ""), part


def test_flags_of_vllm_are_sorted_rightly():
    known = known_flags()
    assert flags_of("same") | flags_of("differ") <= known
    rows = [row.split("|") for row in section("from_vllm.md", "refused").splitlines() if row.startswith("|")]
    refused = {flag for row in rows for flag in FLAG.findall(row[1])}
    advised = {flag for row in rows for flag in FLAG.findall(row[2])}
    assert len(refused) > 10
    assert refused.isdisjoint(known), refused & known
    assert advised <= known


def flags_of(name: str) -> set[str]:
    return set(FLAG.findall(section("from_vllm.md", name)))


def test_metrics_that_pages_name_are_there():
    text, _ = EngineMetrics("m", 4096).render()
    exposed = set(
        re.findall(r"^# TYPE (\S+)", text if isinstance(text, str) else text.decode(), re.MULTILINE)
    )
    for page in PAGES:
        for name in re.findall(r"`(jaxserve:[a-z_]+[a-z])\b", prose(page)):
            assert name in exposed or re.sub("_(bucket|sum|count)$", "", name) in exposed, (
                f"{page.name}: {name}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_that_pages_name_are_there(page):
    folders = "|".join(
        path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", prose(page)):
        if "yours" not in name:
            assert (ROOT / name).exists() or (ROOT / "jaxserve" / name).exists(), name


def test_the_table_of_models_is_current():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "write_models.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
