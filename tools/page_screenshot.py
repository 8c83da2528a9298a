"""Takes the picture of the page that the README shows: the page at / over a scripted model, in headless Chromium.

    .venv/bin/python tools/page_screenshot.py docs/page.png [--dark] [--width 390]

Needs Chromium and playwright (`make test-page` installs the latter). Nothing in the picture was measured: the answers
are written in this file.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MARK = "｜DSML｜"
CALL = [
    "\n\n<", MARK, "tool_calls>\n<", MARK, 'invoke name="get_weather">\n',
    "<", MARK, 'parameter name="city" string="true">', "Rome", "</", MARK, "parameter>\n",
    "<", MARK, 'parameter name="days" string="false">', "2", "</", MARK, "parameter>\n",
    "</", MARK, "invoke>\n</", MARK, "tool_calls>",
]  # fmt: skip
ANSWER = """Tomorrow is the better day:

| | sky | wind |
|---|---|---|
| today | rain until the evening | strong |
| **tomorrow** | clear, 24 degrees | light |

Take the path along the *Tiber*; it is in the shade until noon."""


def words(text: str) -> list[str]:
    """A text as pieces of a script."""
    return re.findall(r"\s*\S+", text)


SCRIPT: list[dict[str, Any]] = [
    {
        "pieces": [*words("A walk depends on the weather, so I look it up for both days."), "</think>", *CALL],
        "step_ms": 20,
    },
    {
        "pieces": [*words("Rain today, clear sky tomorrow. So tomorrow it is."), "</think>", *words(ANSWER)],
        "step_ms": 20,
    },
]


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def take(url: str, file: Path, width: int, height: int, dark: bool) -> None:
    """Go through the conversation, and take the picture."""
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        page.goto(url)
        if width > 960:
            page.click("#panel-toggle")
        page.evaluate(
            "tool => localStorage.setItem('ds4.tools', JSON.stringify([tool]))",
            {"name": "get_weather", "description": "", "parameters": '{"type": "object"}', "strict": False},
        )
        page.reload()
        page.wait_for_selector("#model:not(:empty)")
        if width > 960:
            page.click("#tools-section > summary")
        page.fill("#message", "Shall I walk through Rome today or tomorrow?")
        page.press("#message", "Enter")
        page.wait_for_selector(".call.open")
        page.keyboard.insert_text('{"today": "rain", "tomorrow": "clear, 24 degrees"}')
        page.keyboard.press("Enter")
        page.wait_for_selector(".answer:nth-child(3):not(.live)")
        if width > 960:
            page.wait_for_selector("#sessions .badge >> text=this one")
        page.screenshot(path=file)
        browser.close()


def main() -> int:
    """Take the picture; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1180)
    parser.add_argument("--height", type=int, default=820)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.jsonl"
        script.write_text("".join(json.dumps(line) + "\n" for line in SCRIPT), encoding="utf-8")
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "ds4.server.main",
            "--scripted",
            str(script),
            "--port",
            str(port),
            "-c",
            "8192",
        ]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            try:
                for line in server.stderr or ():
                    if "ready on" in line:
                        take(f"http://127.0.0.1:{port}", options.file, options.width, options.height, options.dark)
                        break
                else:
                    print("the server did not start", file=sys.stderr)
                    return 1
            finally:
                server.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
