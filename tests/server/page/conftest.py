"""A browser for the tests of the page, and the page in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from page_harness import Opens, Pace, Tab, chromium, missing
from server_harness import scripted


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium; without one its tests are skipped.

    Not for longer than a module: while it is there this thread has a running event loop, which other tests cannot have.
    """
    if why := missing():
        pytest.skip(why)
    with chromium() as started:
        yield started


@pytest.fixture
def tab(browser: Any) -> Iterator[Opens]:
    """Opens the page over a script: its lines, then `context` for the browser, and the server's options."""
    with ExitStack() as stack:

        def opens(*lines: dict[str, Any], context: dict[str, Any] | None = None, **options: Any) -> Tab:
            server = stack.enter_context(scripted(*lines, **{"ctx": 4096, **options}))
            if isinstance(pace := options.get("wait"), Pace):
                stack.callback(pace.open)
            return stack.enter_context(Tab(browser, server, **(context or {})))

        yield opens
