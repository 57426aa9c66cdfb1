"""The page in Chromium, against a scripted engine: what people do with it, and what may go wrong meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import CHROMIUM, PHONE, WatchedPage, launched_chromium, watched_page
from page_server import ThreadedServer, threaded_server
from scripted_engine import ScriptedEngine
from server_process import free_port

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app

pytest.importorskip("playwright", reason="pip install playwright")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

SERVER = Path(__file__).parents[1] / "support" / "fake_server.py"
MARKDOWN = """Some **bold**, *italic* and `code` text with [a link](https://example.org/x_(y)).

## A heading

1. one
2. two
   - inner

| a | b |
|---|--:|
| 1 | 2 |

```python
print("<b>")
```

> quoted
"""
ATTACK = """<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>
![pixel](https://evil.example/p.png) [click](javascript:window.pwned=1) [data](data:text/html,<script>1</script>)
<https://evil.example/> [x](https://evil.example/"onmouseover="window.pwned=1) <svg onload=window.pwned=1>

```<img/src=x/onerror=window.pwned=1>
</code></pre><script>window.pwned=1</script>
```

| <iframe src="https://evil.example"> | <style>*{display:none}</style> |
|---|---|
| <a href="javascript:window.pwned=1">x</a> | <form action=https://evil.example><input name=x></form> |

# <img src=x onerror=window.pwned=1>
- <base href="https://evil.example/">"""
SCRIPTS = {
    "markdown": MARKDOWN,
    "attack": ATTACK,
    "long": "0123456789 " * 2000,
    "reason": "<think>\nFirst I **think**.\n</think>\n\nThen I answer.",
    "weather": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "": "A short answer.",
}
TOOLS = [
    {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
]


class LastQuestionEngine(ScriptedEngine):
    """Answers the last question alone."""

    def _choice(self, stream: Any, index: int) -> Any:
        asked, prompt = (stream.admitted.prompt or "").rpartition("<user>")[2], stream.admitted.prompt
        if "<tool>" in asked:
            asked = asked.rpartition("<tool>")[2]
        stream.admitted.prompt = asked
        try:
            return super()._choice(stream, index)
        finally:
            stream.admitted.prompt = prompt


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched_chromium() as browser:
        yield browser


@pytest.fixture
def engine() -> ScriptedEngine:
    return LastQuestionEngine(SCRIPTS, max_model_len=1 << 16, step_seconds=0.001)


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"tool_call_parser": "hermes"}


@pytest.fixture
def server(engine: ScriptedEngine, settings: dict[str, Any]) -> Iterator[ThreadedServer]:
    with threaded_server(
        lambda: create_app(engine, ServerConfig(**settings), ["model-a", "model-b"])
    ) as server:
        yield server


@pytest.fixture
def watched(browser: Any, server: ThreadedServer) -> Iterator[WatchedPage]:
    with watched_page(browser, server.url) as watched:
        yield watched


@pytest.fixture
def page(watched: WatchedPage) -> Any:
    return watched.open()


def ask(page: Any, text: str, *, wait: bool = True) -> Any:
    """Send ``text``; the answer's element."""
    page.fill("#input", text)
    page.press("#input", "Enter")
    answer = page.locator(".message.assistant").last
    if wait:
        finished(page)
    return answer


def finished(page: Any) -> None:
    page.wait_for_selector(".message.assistant:last-child[aria-busy=false]")
    page.wait_for_selector("#send:visible")


def holds(page: Any, expression: str) -> None:
    """Wait for a JavaScript expression. (Playwright's own way needs eval, which the page's policy forbids.)"""
    until(lambda: bool(page.evaluate(expression)))


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.02)


def texts(page: Any) -> list[str]:
    return page.eval_on_selector_all(
        ".message > .text, .answer > .text", "all => all.map(one => one.innerText)"
    )


# --- the chat ---------------------------------------------------------------------------------------------


def test_send_stream_and_reload(page, engine, watched):
    page.evaluate(
        """() => {
            window.seen = [];
            new MutationObserver(() => {
                const text = document.querySelector(".answer > .text")?.textContent;
                if (text && text !== window.seen.at(-1)) window.seen.push(text);
            }).observe(document.getElementById("messages"), {childList: true, subtree: true, characterData: true});
        }"""
    )
    engine.step_seconds = 0.01
    answer = ask(page, "Some <b>markdown</b>, please", wait=False)
    assert page.locator(".message.user .text").inner_text() == "Some <b>markdown</b>, please"
    finished(page)
    assert page.evaluate("window.seen.length") > 5  # it came piece by piece
    for selector, text in {
        "strong": "bold", "em": "italic", "p code": "code", "h4": "A heading", "ol > li:first-child": "one",
        "ol ul li": "inner", "td.align-right": "2", "pre code": 'print("<b>")\n', "blockquote": "quoted",
    }.items():  # fmt: skip
        assert answer.locator(selector).text_content().strip() == text.strip(), selector
    link = answer.locator("a")
    assert link.get_attribute("href") == "https://example.org/x_(y)"
    assert "noopener" in link.get_attribute("rel")
    assert page.locator(".stats").inner_text().startswith(f"{len(MARKDOWN)} tokens · ")
    assert page.evaluate("document.activeElement.id") == "input"

    ask(page, "Another one")
    before = page.locator("#messages").inner_text()
    assert len(texts(page)) == 4
    page = watched.open()
    assert page.locator("#messages").inner_text() == before
    assert page.locator("#chats .chat").inner_text() == "Some <b>markdown</b>, please"
    ask(page, "And after the reload")
    assert "Some <b>markdown</b>, please" in engine.admitted[-1].prompt
    assert "A short answer." in engine.admitted[-1].prompt


def test_stop_regenerate_and_edit(page, engine):
    ask(page, "A long one", wait=False)
    holds(page, "document.querySelector('.answer > .text')?.textContent.length > 50")
    page.keyboard.press("Escape")
    finished(page)
    assert "Stopped." in page.locator(".message .note").inner_text()
    assert page.locator(".answer > .text").inner_text().startswith("0123456789")
    until(lambda: len(engine.aborted) == 1)

    engine.scripts["long"] = "Now it is short."
    page.get_by_label("Regenerate this answer").click()
    finished(page)
    assert texts(page) == ["A long one", "Now it is short."]
    assert not page.locator(".message .note").is_visible()

    ask(page, "second")
    page.get_by_label("Edit this message").first.click()
    page.fill(".edit", "Changed")
    page.get_by_role("button", name="Send", exact=True).first.click()
    finished(page)
    assert texts(page) == ["Changed", "A short answer."]
    assert "A long one" not in engine.admitted[-1].prompt

    page.get_by_label("Edit this answer").click()
    page.fill(".edit", "My own answer")
    page.get_by_role("button", name="Save").click()
    ask(page, "third")
    assert "My own answer" in engine.admitted[-1].prompt
    page.press("#input", "ArrowUp")
    assert page.locator(".edit").input_value() == "third"
    page.keyboard.press("Escape")


def test_conversations_are_listed_exported_and_deleted(page):
    ask(page, "First subject")
    page.click("#new-chat")
    ask(page, "Second subject")
    assert page.locator("#chats .chat").all_inner_texts() == ["Second subject", "First subject"]
    page.get_by_title("First subject", exact=True).click()
    assert texts(page) == ["First subject", "A short answer."]
    ask(page, "A long one", wait=False)
    holds(page, "document.querySelectorAll('.answer > .text')[1]?.textContent.length > 50")
    page.get_by_title("Second subject", exact=True).click()  # which ends that answer
    page.wait_for_selector("#send:visible")
    ask(page, "more")
    assert texts(page) == ["Second subject", "A short answer.", "more", "A short answer."]
    page.get_by_title("First subject", exact=True).click()
    assert texts(page)[-1].startswith("0123456789")
    assert "Stopped." in page.locator(".message .note").last.inner_text()
    with page.expect_download() as download:
        page.click("#export-json")
    exported = json.loads(Path(download.value.path()).read_text())
    assert sorted(chat["messages"][0]["content"] for chat in exported) == ["First subject", "Second subject"]
    page.get_by_label("Delete “First subject”").click()
    page.click("#confirm-ok")
    holds(page, "document.querySelectorAll('#chats .chat').length === 1")
    page.click("#clear")
    page.click("#confirm-ok")
    page.wait_for_selector("#no-chats:visible")
    page.reload()
    page.wait_for_selector("#no-chats:visible")


def test_settings_reach_the_engine(page, engine, watched):
    watched.tolerated.append("Failed to load resource: the server responded with a status of 400")
    page.click("#open-settings")
    numbers = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.05, "max_tokens": 9, "seed": 12,
        "presence_penalty": -0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1,
    }  # fmt: skip
    for name, value in numbers.items():
        page.fill(f"#set-{name}", str(value))
    page.fill("#set-system", "Be brief.")
    page.fill("#set-stop", "END\n\\n\\n")
    page.fill("#set-top_p", "3")
    assert page.locator("#set-top_p").get_attribute("aria-invalid") == "true"
    ask(page, "not sent")
    note = page.locator(".message .note.error")
    assert "Top p: At most 1." in note.inner_text()
    note.get_by_text("Show the setting").click()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("0.9")
    assert engine.admitted == []
    page.select_option("#model", "model-b")
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "hello")
    assert request.value.post_data_json["model"] == "model-b"
    admitted = engine.admitted[-1]
    params = admitted.params
    assert {name: getattr(params, name) for name in numbers} == numbers
    assert params.stop == ["END", "\n\n"]
    assert admitted.prompt.startswith("<system>Be brief.")
    assert "cut off at the token limit" in page.locator(".message .note").inner_text()
    page.fill("#set-max_tokens", "")
    page.get_by_role("button", name="Continue").click()
    finished(page)
    assert engine.admitted[-1].prompt.rstrip().endswith("A short a")

    page.select_option("#set-reasoning_effort", "low")
    ask(page, "again")
    note = page.locator(".message .note.error").last
    assert "reasoning_effort" in note.inner_text()  # the server's own words
    page.click("#tab-engine")
    note.get_by_text("Show the setting").click()
    assert page.evaluate("document.activeElement.id") == "set-reasoning_effort"
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    page.click("#open-settings")
    assert page.locator("#set-temperature").input_value() == "0.5"


def test_token_probabilities(page):
    page.click("#open-settings")
    page.check("#set-probabilities")
    answer = ask(page, "hello")
    tokens = answer.locator(".token")
    assert "".join(tokens.all_text_contents()) == "A short answer."
    assert "p2" in tokens.nth(0).get_attribute("class") or "p3" in tokens.nth(0).get_attribute("class")
    tokens.nth(2).hover()
    card = page.locator("#token-card")
    card.wait_for()
    assert card.locator(".alternative").count() == 5
    assert "60.7 %" in card.inner_text()
    tokens.nth(0).focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.at") == "1"
    answer.get_by_label("Token probabilities").click()
    assert answer.locator(".text p").inner_text() == "A short answer."
    assert not card.is_visible() or page.evaluate("document.activeElement.className") != "token"


@pytest.mark.parametrize("settings", [{"reasoning_parser": "deepseek_r1"}])
def test_reasoning_is_folded(page):
    answer = ask(page, "Please reason")
    assert answer.locator(".answer").inner_text().strip() == "Then I answer."
    reasoning = answer.locator("details.reasoning")
    assert reasoning.get_attribute("open") is None
    assert reasoning.locator("summary").inner_text().startswith("Reasoning")
    reasoning.locator("summary").click()
    assert reasoning.locator("strong").inner_text() == "think"


def test_tool_calls_are_folded_and_answered(page, engine):
    page.click("#open-settings")
    page.click("#settings summary")
    page.fill("#set-tools", "[{]")
    assert "no JSON" in page.locator("#settings details .problem").inner_text()
    page.fill("#set-tools", json.dumps(TOOLS))
    answer = ask(page, "The weather?")
    call = answer.locator("details.call")
    assert call.get_attribute("open") is None
    assert call.locator("summary").inner_text() == "Tool call get_weather"
    call.locator("summary").click()
    assert json.loads(call.locator("pre").inner_text()) == {"city": "Paris"}
    page.fill(".results textarea", "Rain")
    page.get_by_role("button", name="Send result").click()
    finished(page)
    assert page.locator(".message.tool > .text").inner_text() == "Rain"
    assert "Rain" in engine.admitted[-1].prompt
    assert texts(page)[-1] == "A short answer."


# --- what goes wrong ------------------------------------------------------------------------------------


def test_what_models_write_is_inert(page, watched):
    answer = ask(page, "attack <img src=x onerror=window.pwned=1>")
    page.wait_for_timeout(300)
    assert page.evaluate("window.pwned") is None
    messages = page.locator("#messages")
    for forbidden in (
        "img",
        "script",
        "iframe",
        "style",
        "form",
        "base",
        "svg:not(.icon)",
        "[onerror]",
        "[style]",
    ):
        assert messages.locator(forbidden).count() == 0, forbidden
    links = answer.locator("a").evaluate_all("all => all.map(one => one.href)")
    assert links
    assert all(link.startswith("https://evil.example/") for link in links)
    assert "<script>window.pwned=1</script>" in answer.inner_text()
    assert page.locator("h1").inner_text().startswith("attack <img")
    watched.check()  # nothing was fetched from anywhere
    # The policy would hold even if the scripts were careless.
    watched.tolerated += [
        "This document requires",
        "Connecting to",
        "Refused to",
        "Executing inline",
        "Applying inline",
    ]
    watched.tolerated += ["Loading the image", "Loading the script", "Fetch API cannot load"]
    assert page.evaluate(
        """async () => {
            const refused = [];
            try { document.body.innerHTML = "<b>x</b>"; } catch { refused.push("innerHTML"); }
            try { await fetch("https://evil.example/"); } catch { refused.push("fetch"); }
            const script = document.createElement("script");
            try { script.text = "window.pwned = 1"; document.body.append(script); } catch { refused.push("script"); }
            const element = document.createElement("div");
            try {
                element.setAttribute("onclick", "window.pwned = 1");
                element.click();
            } catch { refused.push("onclick"); }
            return [refused, window.pwned ?? null];
        }"""
    ) == [["innerHTML", "fetch", "script", "onclick"], None]


@pytest.mark.parametrize("settings", [{"api_key": ["the-key"]}])
def test_the_api_key(server, browser, engine):
    with watched_page(browser, server.url) as watched:
        watched.tolerated.append("Failed to load resource: the server responded with a status of 401")
        page = watched.page
        page.goto(server.url)
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        holds(page, "document.getElementById('key-problem').textContent.includes('does not take')")
        page.fill("#key", "the-key")
        page.keyboard.press("Enter")
        page.wait_for_selector("#model option", state="attached")
        ask(page, "hello")
        assert texts(page) == ["hello", "A short answer."]
        page.reload()  # kept for the tab
        page.wait_for_selector("#model option", state="attached")
        assert not page.locator("#key-dialog").is_visible()
        assert "the-key" not in page.evaluate("JSON.stringify(localStorage)")
        assert all("the-key" not in url for url in watched.urls)
        # Given up: asked again when something is sent, and then the question is answered.
        page.evaluate("sessionStorage.clear()")
        page.reload()
        page.wait_for_selector("#key-dialog[open]")
        page.click("#key-cancel")
        page.fill("#input", "once more")
        page.press("#input", "Enter")
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "the-key")
        page.check("#key-remember")
        page.keyboard.press("Enter")
        holds(page, "document.querySelector('.message:last-child .answer')?.innerText.includes('short')")
        assert texts(page)[-2:] == ["once more", "A short answer."]
        assert "the-key" in page.evaluate("JSON.stringify(localStorage)")


def test_a_busy_server_is_asked_again(page, engine, watched):
    watched.tolerated.append("Failed to load resource: the server responded with a status of 503")
    engine._max_running = 0
    answer = ask(page, "hello", wait=False)
    answer.get_by_text("Trying again in").wait_for()
    assert "The server is busy." in answer.inner_text()
    engine._max_running = 10
    finished(page)
    assert texts(page) == ["hello", "A short answer."]
    assert not page.locator(".message .note").is_visible()
    engine._max_running = 0
    answer = ask(page, "hello", wait=False)
    answer.get_by_text("Trying again in").wait_for()
    page.keyboard.press("Escape")
    finished(page)
    assert "Stopped." in answer.inner_text()


def test_the_engine_dies(page, engine, server, watched):
    watched.tolerated.append("Failed to load resource: the server responded with a status of 503")
    answer = ask(page, "A long one", wait=False)
    holds(page, "document.querySelector('.answer > .text')?.textContent.length > 20")
    server.call(engine.die, "the core was killed")
    finished(page)
    note = answer.locator(".note.error")
    assert "the core was killed" in note.inner_text()
    assert "What arrived is kept." in note.inner_text()
    assert "0123" in answer.locator(".answer").inner_text()
    note.get_by_text("Try again").click()
    finished(page)
    assert "Error 503" in page.locator(".message .note.error").last.inner_text()


def test_the_server_dies(browser):
    port = free_port()

    cores: list[int] = []

    def start() -> subprocess.Popen[str]:
        options = json.dumps({"port": port, "step_seconds": 0.01})
        process = subprocess.Popen(
            [sys.executable, str(SERVER), options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        cores.append(int(process.stdout.readline()))
        until(lambda: _answers(port))
        return process

    process = start()
    try:
        with watched_page(browser, f"http://127.0.0.1:{port}") as watched:
            watched.tolerated.append("Failed to load resource: net::ERR_")
            page = watched.open()
            answer = ask(page, "hello", wait=False)
            holds(page, "document.querySelector('.answer > .text')?.textContent.length > 10")
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            finished(page)
            note = answer.locator(".note.error")
            assert "No connection." in note.inner_text()
            assert "broke off" in note.inner_text()
            assert answer.locator(".answer > .text").inner_text().startswith("abcdefghij")
            page.wait_for_selector("#banner:visible")
            ask(page, "Is anybody there?")
            assert "does not answer" in page.locator(".message .note.error").last.inner_text()
            process = start()
            page.wait_for_selector("#banner", state="hidden")
            page.get_by_text("Try again").last.click()
            holds(
                page, "document.querySelector('.message:last-child .answer > .text')?.textContent.length > 10"
            )
            page.click("#stop")
            finished(page)
    finally:
        process.terminate()
        process.wait(30)
        os.kill(cores[0], signal.SIGKILL)  # nobody was left to end it


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_under_a_proxys_path(browser, engine):
    app: Any = create_app(engine, ServerConfig(root_path="/llm"), ["m"])

    async def proxied(scope: Any, receive: Any, send: Any) -> None:
        # As uvicorn tells it (--root-path) behind a proxy that takes the path away.
        assert scope["type"] != "http" or scope["path"].startswith("/llm/")
        await app({**scope, "root_path": "/llm"}, receive, send)

    with threaded_server(lambda: proxied) as server, watched_page(browser, server.url) as watched:
        page = watched.open("/llm/")
        ask(page, "hello")
        assert texts(page) == ["hello", "A short answer."]
        assert page.evaluate(
            "Object.keys(localStorage).some((key) => key.startsWith('jaxserve:/llm/:chat:'))"
        )


# --- smoothness -----------------------------------------------------------------------------------------

WATCH_FRAMES = """() => {
    window.frames_ms = []; window.long_tasks = [];
    let last = performance.now();
    const tick = (now) => { window.frames_ms.push(now - last); last = now; requestAnimationFrame(tick); };
    requestAnimationFrame(tick);
    new PerformanceObserver((list) => window.long_tasks.push(...list.getEntries().map((entry) => entry.duration)))
        .observe({entryTypes: ["longtask"]});
}"""


def test_200_messages_stay_smooth(page, engine, watched):
    messages: list[dict[str, Any]] = []
    for number in range(100):
        messages.append({"role": "user", "content": f"Question {number}"})
        answer = {
            "role": "assistant",
            "content": MARKDOWN * 3,
            "reasoning": "",
            "tool_calls": [],
            "status": "done",
        }
        messages.append({**answer, "error": None, "finish_reason": "stop", "tokens": None, "stats": None})
    chat = {"id": "big", "title": "Big", "created": 1, "updated": 1, "settings": {}, "messages": messages}
    page.evaluate("chat => localStorage.setItem('jaxserve:/:chat:big', JSON.stringify(chat))", chat)
    page.evaluate("() => { localStorage.setItem('jaxserve:/:current', 'big'); sessionStorage.clear(); }")
    began = time.monotonic()
    page = watched.open()
    assert page.locator(".message").count() == 200
    opened = time.monotonic() - began
    engine.scripts["long"] = (MARKDOWN * 4) + "\n```\n" + "code " * 200
    page.evaluate(WATCH_FRAMES)
    began = time.monotonic()
    ask(page, "A long one")
    took = time.monotonic() - began
    frames = sorted(page.evaluate("window.frames_ms"))
    tasks = page.evaluate("window.long_tasks")
    print(
        f"\n200 messages: opened in {opened:.2f} s; {len(engine.scripts['long'])} tokens streamed in {took:.1f} s, "
        f"{len(frames)} frames, median {statistics.median(frames):.0f} ms, "
        f"95 % {frames[int(0.95 * len(frames))]:.0f} ms, longest {frames[-1]:.0f} ms; "
        f"{len(tasks)} long tasks, {sum(tasks):.0f} ms in all, longest {max(tasks, default=0):.0f} ms"
    )
    assert statistics.median(frames) < 250
    assert sum(tasks) < 1000 * took * 0.8
    at_end = "(() => { const log = document.getElementById('log');"
    at_end += " return log.scrollHeight - log.scrollTop - log.clientHeight < 5; })()"
    holds(page, at_end)


# --- looks ----------------------------------------------------------------------------------------------


def test_on_a_phone(browser, server):
    phone = {"viewport": PHONE, "has_touch": True, "is_mobile": True, "reduced_motion": "reduce"}
    with watched_page(browser, server.url, **phone) as watched:
        page = watched.open()
        page.tap("#input")
        page.keyboard.type("markdown")
        page.keyboard.press("Enter")  # begins a line here
        assert page.locator("#input").input_value() == "markdown\n"
        page.tap("#send")
        finished(page)
        for opener, panel in (
            ("#open-engine", "#engine"),
            ("#open-settings", "#settings"),
            ("#toggle-sidebar", "#chats"),
        ):
            page.tap(opener)
            page.wait_for_selector(f"{panel}:visible")
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
            assert page.evaluate("document.getElementById('main').inert")
            page.keyboard.press("Escape")
            page.wait_for_selector("#scrim", state="hidden")
        assert page.evaluate("document.getElementById('log').scrollWidth") <= PHONE["width"]
        assert page.evaluate("document.getAnimations().length") == 0


def test_theme_and_focus(page, watched):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(ground)
    assert dark != light
    page.click("#theme")
    assert page.evaluate(ground) == light
    page = watched.open()
    assert page.evaluate(ground) == light  # chosen, and kept
    page.click("#theme")
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) == dark

    page.evaluate("document.querySelector('.skip').focus()")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "input"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "input"
    assert page.evaluate("document.getElementById('log').getAttribute('role')") == "log"
    ask(page, "hello")
    assert page.locator("#live").text_content() == "A short answer."
    unnamed = """() => [...document.querySelectorAll("button, input, select, textarea")].filter((one) =>
        !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length)).map((one) => one.id)"""
    assert page.evaluate(unnamed) == []


# --- the engine's view ------------------------------------------------------------------------------------


def test_the_view_rests_in_hidden_tabs(page, watched):
    def asked() -> int:
        return sum(url.endswith("/metrics") for url in watched.urls)

    if not page.locator("#engine").is_visible():
        page.click("#open-engine")
    page.wait_for_timeout(100)
    until(lambda: page.evaluate("1") == 1 and asked() >= 2)
    page.evaluate(
        """() => {
            Object.defineProperty(document, "hidden", {get: () => window.is_hidden, configurable: true});
            window.is_hidden = true;
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
    )
    page.wait_for_timeout(400)
    before = asked()
    page.wait_for_timeout(1600)
    assert asked() == before
    page.evaluate(
        "() => { window.is_hidden = false; document.dispatchEvent(new Event('visibilitychange')); }"
    )
    until(lambda: page.evaluate("1") == 1 and asked() > before)
    page.click("#close-panel")
    page.wait_for_timeout(400)
    before = asked()
    page.wait_for_timeout(1600)
    assert asked() == before


def test_numbers_from_metrics(page):
    """What changed between two readings, as Prometheus would say it."""
    text = """# TYPE x
jaxserve:generation_tokens_total{engine="0",model_name="a\\"b"} %d
jaxserve:iteration_tokens_total_sum{engine="0"} %d
jaxserve:iteration_tokens_total_count{engine="0"} %d
jaxserve:padding_tokens_total{engine="0"} %d
jaxserve:steps_total{engine="0",num_tokens="8"} %d
jaxserve:steps_total{engine="0",num_tokens="64"} %d
jaxserve:inter_token_latency_seconds_bucket{engine="0",le="0.01"} %d
jaxserve:inter_token_latency_seconds_bucket{engine="0",le="0.025"} %d
jaxserve:inter_token_latency_seconds_bucket{engine="0",le="+Inf"} %d
jaxserve:inter_token_latency_seconds_count{engine="0"} %d
"""
    before, after = text % (5, 0, 0, 0, 0, 0, 0, 0, 0, 0), text % (105, 72, 4, 16, 3, 1, 2, 10, 10, 10)
    found = page.evaluate(
        """async ([before, after]) => {
            const {reading, between, batchBetween} = await import("/page/metrics.js");
            const [one, other] = [reading(before, 0), reading(after, 1000)];
            const batch = batchBetween(one, other);
            const itl = between(one.itl, other.itl);
            const {perStep, paddingShare, shapes} = batch;
            return [other.generated - one.generated, perStep, paddingShare, shapes, itl.quantile(0.6)];
        }""",
        [before, after],
    )
    assert found == [100, 18, 16 / 88, [[8, 3], [64, 1]], pytest.approx(0.0175)]


# --- Markdown -----------------------------------------------------------------------------------------------

CASES = {
    "a *b* **c** ***d*** _e_ __f__ ~~g~~ `h`": (
        "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <em>e</em> <strong>f</strong> "
        "<del>g</del> <code>h</code></p>"
    ),
    "2 * 3 * 4, snake_case_name, ~5, a*b": "<p>2 * 3 * 4, snake_case_name, ~5, a*b</p>",
    "**bold *both* bold**": "<p><strong>bold <em>both</em> bold</strong></p>",
    "**open": "<p>**open</p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# H\ntext": '<h3 class="heading-1">H</h3><p>text</p>',
    "- a\n- b\n\ntext": "<ul><li>a</li><li>b</li></ul><p>text</p>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "1. a\n   - x\n   - y\n2. b": '<ol start="1"><li>a<ul><li>x</li><li>y</li></ul></li><li>b</li></ol>',
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    r"\*a\* <b>": "<p>*a* &lt;b&gt;</p>",
    "text 1 < 2 & 3": "<p>text 1 &lt; 2 &amp; 3</p>",
    "`` a`b ``": "<p><code>a`b</code></p>",
    "[x](ftp://a) [y](//a)": "<p>[x](ftp://a) [y](//a)</p>",
}
STREAMED = [
    *CASES,
    MARKDOWN,
    ATTACK,
    "- a\n\n1. b\n2. c\n\n2",
    "text\n| a | b |\n|--|--| x\n",
    "a\n- b\nc\n\n  d\n- [x] e\n> f\ng",
]


def test_markdown(page):
    rendered = page.evaluate(
        """async (sources) => {
            const {MarkdownStream} = await import("/page/markdown.js");
            return sources.map((source) => {
                const whole = document.createElement("div");
                new MarkdownStream(whole).update(source, true);
                const different = [];
                for (const size of [1, 2, 3, 7]) {
                    const piece = document.createElement("div");
                    const stream = new MarkdownStream(piece);
                    for (let end = size; end < source.length; end += size) stream.update(source.slice(0, end));
                    stream.update(source, true);
                    if (piece.innerHTML !== whole.innerHTML) different.push([size, piece.innerHTML]);
                }
                return [whole.innerHTML, different];
            });
        }""",
        STREAMED,
    )
    for source, (whole, different) in zip(STREAMED, rendered):
        assert not different, (source, whole, different)
        if source in CASES:
            got = re.sub(r' (?:target|rel|title)="[^"]*"', "", whole)
            assert got == CASES[source], source


def test_markdown_of_any_shape_takes_little_time(page):
    sources = [
        "[" * 50_000, "![" * 25_000 + "](", "*" * 50_000, "**a " * 20_000, "_a*b_" * 10_000, "`" * 30_000 + "a",
        "> " * 20_000, "- " * 20_000, "1. " * 20_000, "|" * 50_000 + "\n|" + "-|" * 20_000, "[a](" * 10_000,
        "http://" * 10_000, "<http://" * 10_000, "\\" * 50_000, "#" * 50_000, "`a" * 20_001, "~~a" * 20_000,
    ]  # fmt: skip
    times = page.evaluate(
        """async (sources) => {
            const {MarkdownStream} = await import("/page/markdown.js");
            return sources.map((source) => {
                const began = performance.now();
                new MarkdownStream(document.createElement("div")).update(source, true);
                return Math.round(performance.now() - began);
            });
        }""",
        sources,
    )
    slow = {source[:12]: ms for source, ms in zip(sources, times) if ms > 5000}
    print("\nms:", times)
    assert not slow
