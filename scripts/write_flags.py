"""Write docs/flags.md, the reference of ``jaxserve serve``'s flags, from the config dataclasses.

python scripts/write_flags.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from jaxserve.config import ENGINE_CONFIGS, ServerConfig  # noqa: E402
from jaxserve.config.cli_flags import flag_reference  # noqa: E402

HEAD = """# Flags of `jaxserve serve`

Written by `python scripts/write_flags.py` from the classes in `jaxserve/config`; do not edit it by hand.
The same names, with underscores, are the arguments of `LLM(...)`, all but the server's. Sizes take suffixes:
`1k` is 1000, `1K` is 1024, also m, g, t and M, G, T. JSON is given as one argument, such as
`'{"temperature": 0}'`. Of `--flag` and `--no-flag` the last one given counts.

"""


def flags_page() -> str:
    """The page's text."""
    return HEAD + flag_reference([*ENGINE_CONFIGS, ServerConfig])


if __name__ == "__main__":
    (ROOT / "docs" / "flags.md").write_text(flags_page(), encoding="utf-8")
