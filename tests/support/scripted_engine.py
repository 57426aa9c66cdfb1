"""ScriptedEngine: a FakeEngine that answers by what it is asked, and then stops as a model does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fake_engine import FakeEngine, FakeStream

from jaxserve.outputs import CompletionOutput


class ScriptedEngine(FakeEngine):
    """Answers a prompt with the first script whose key is in it.

    Args:
        scripts: a part of the prompt to an answer (ASCII); ``""`` matches every prompt.
        options: of FakeEngine.
    """

    def __init__(self, scripts: Mapping[str, str], **options: Any) -> None:
        super().__init__(**{"max_model_len": 8192, **options})
        self.scripts = dict(scripts)

    def _choice(self, stream: FakeStream, index: int) -> CompletionOutput:
        prompt = stream.admitted.prompt or ""
        self._output = next(text for key, text in self.scripts.items() if key in prompt).encode()
        return super()._choice(stream, index)

    def _finish(self, stream: FakeStream, index: int, token: int) -> tuple[str | None, int | str | None]:
        reason, cause = super()._finish(stream, index, token)
        if reason != "stop" and stream.num_tokens + 1 == len(self._output):
            return "stop", None
        return reason, cause
