"""PlannedStore: the program store of an engine on other devices, into which programs are put and never read."""

from __future__ import annotations

from typing import Any

from jaxserve.runner.program_store import ProgramStore


class PlannedStore(ProgramStore):
    """What is stored already counts as loaded: it need not be compiled again."""

    def load(self, key: object) -> Any:
        path = self._path(key)
        if path is None or not path.exists():
            return None
        self.hits += 1
        return path
