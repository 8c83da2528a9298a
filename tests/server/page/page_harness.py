"""A browser on the page, over a scripted model whose steps a test lets go one by one."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_harness import Running, call_pieces

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# In a container Chromium has no sandbox of its own, and nobody wants it to look for updates.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip

CALL = ["I", " need", " it", ".", "</think>", "Let me look.", *call_pieces(
    ("get_weather", [("city", ["Ro", "me"], True), ("days", ["3"], False)])  # type: ignore[list-item]
)]  # fmt: skip

GOOD = ("</think>", "Fine", ".")
LONG = "Tell me about " + "the many small parts of a clock, and " * 20
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


def missing() -> str:
    """Why there is no browser here; empty if there is one."""
    if CHROMIUM is None:
        return "not run: no Chromium here (Debian's package chromium); see `make test-page` in docs/testing.md"
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "not run: playwright is not installed; `make test-page` installs it"
    return ""


class Pace:
    """The clock of a scripted model: a step ends when the test lets it go."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left = 0
        self._open = False

    def __call__(self, seconds: float) -> bool:
        with self._changed:
            assert self._changed.wait_for(lambda: self._open or self._left > 0, 60)
            self._left -= 1
        return False

    def let(self, steps: int) -> None:
        """Let some steps go."""
        with self._changed:
            self._left += steps
            self._changed.notify_all()

    @property
    def left(self) -> int:
        """Steps that may go and did not."""
        with self._changed:
            return self._left

    def open(self) -> None:
        """Let all go from now on."""
        with self._changed:
            self._open = True
            self._changed.notify_all()


class Tab:
    """The page in a browser, as a person has it. What the page must never do is noted."""

    def __init__(self, browser: Any, server: Running, **context: Any) -> None:
        self.server = server
        options = {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light", **context}
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(30_000)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        self.page.on("console", self._said)
        self.page.on("request", self._asked)
        self.page.goto(server.url + "/")
        self.page.wait_for_selector("#model:not(:empty)")

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.context.close()
        # A test that failed says why itself.
        assert kind is not None or self.faults == []

    def _said(self, message: Any) -> None:
        # The browser itself reports each status above 399.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.faults.append(f"console: {message.text}")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(self.server.url + "/"):
            self.faults.append(f"request to {request.url}")

    def send(self, text: str) -> None:
        """Write a message and send it."""
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")

    def answer(self, number: int = 1) -> Any:
        """The nth answer once it is complete."""
        found = self.page.locator(".answer").nth(number - 1)
        self.page.wait_for_selector(f":nth-match(.answer, {number}):not(.live)")
        return found

    def ask(self, text: str) -> Any:
        """Send a message, and wait for its answer."""
        count: int = self.page.locator(".answer").count()
        self.send(text)
        return self.answer(count + 1)

    def sees(self, selector: str, text: str | re.Pattern[str], nth: int = 0) -> None:
        """Wait until the nth element of a selector has a text."""
        from playwright.sync_api import expect

        expect(self.page.locator(selector).nth(nth)).to_have_text(text, timeout=30_000)

    def offer(self, **fields: str) -> None:
        """Offer the example tool to the model, with other values in some fields."""
        self.page.click("#panel-toggle")
        if not self.page.locator("#tools-section").get_attribute("open"):
            self.page.click("#tools-section > summary")
        self.page.click("#add-tool")
        for label, text in fields.items():
            self.page.get_by_label(label).fill(text)

    def reused(self, number: int) -> tuple[int, int]:
        """How many tokens of its prompt the nth answer reused, and of how many, as the page says it."""
        words = self.answer(number).locator(".numbers").inner_text().split("reused ")[1].split()
        return int(words[0].replace(",", "")), int(words[2].replace(",", ""))

    def focused(self) -> str:
        """What has the focus: its id, label or text."""
        script = "(e => e.id || e.getAttribute('aria-label') || e.textContent)(document.activeElement)"
        return str(self.page.evaluate(script))

    def tab_to(self, name: str) -> None:
        """Press Tab until the focus is there."""
        for _ in range(40):
            if self.focused() == name:
                return
            self.page.keyboard.press("Tab")
        pytest.fail(f"Tab does not lead to {name!r}")

    def stored(self) -> str:
        """All that the browser keeps for longer than the tab lives."""
        return str(self.page.evaluate("JSON.stringify(localStorage)"))


Opens = Callable[..., Tab]


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(Path(str(CHROMIUM))), args=list(FLAGS))
        yield browser
        browser.close()
