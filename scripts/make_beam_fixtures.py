"""Write tests/fixtures/parity/tiny_beams.json: what transformers' beam search finds on a tiny checkpoint.

Needs torch and transformers; the tests that read the fixture do not. Run from the repository root:

    python scripts/make_beam_fixtures.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests" / "support")]
from beam_cases import CASES, FAMILIES, transformers_beams  # noqa: E402
from tiny_checkpoints import write_tiny_checkpoint  # noqa: E402

FIXTURE = ROOT / "tests" / "fixtures" / "parity" / "tiny_beams.json"


def main() -> None:
    found: dict[str, Any] = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            model = write_tiny_checkpoint(Path(folder) / family, family)
            found[family] = [transformers_beams(model, case) for case in CASES]
    FIXTURE.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
