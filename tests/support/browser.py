"""Pages in the system's Chromium, watched: no console errors, no request that leaves the server."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The browser's path; None where there is none."""
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
TIMEOUT_MS = 60_000
"""Of everything that is waited for: machines that run tests may be busy."""
DESKTOP = {"width": 1400, "height": 900}
PHONE = {"width": 390, "height": 844}


@contextlib.contextmanager
def launched_chromium() -> Iterator[Any]:
    """A running browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class WatchedPage:
    """A page of ``server`` in a fresh profile.

    ``problems`` gathers what its console complains about; ``tolerated`` are beginnings of such lines that a test
    provokes.
    """

    def __init__(self, browser: Any, server: str, **context: Any) -> None:
        self.server = server
        self.context = browser.new_context(**{"viewport": DESKTOP, **context})
        self.context.set_default_timeout(TIMEOUT_MS)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.tolerated: list[str] = []
        self.urls: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"uncaught: {error}"))
        self.context.on("request", lambda request: self.urls.append(request.url))

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def open(self, path: str = "/") -> Any:
        """The page, with the models listed."""
        self.page.goto(self.server + path)
        self.page.wait_for_selector("#model option", state="attached")
        return self.page

    def check(self) -> None:
        """Nothing went wrong, and every request went to the server."""
        unforeseen = [text for text in self.problems if not text.startswith(tuple(self.tolerated))]
        assert not unforeseen, unforeseen
        hosts = {urlsplit(url).netloc for url in self.urls if not url.startswith(("data:", "blob:"))}
        assert hosts == {urlsplit(self.server).netloc}


@contextlib.contextmanager
def watched_page(browser: Any, server: str, **context: Any) -> Iterator[WatchedPage]:
    """A watched page, checked in the end."""
    watched = WatchedPage(browser, server, **context)
    try:
        yield watched
        watched.check()
    finally:
        watched.context.close()
