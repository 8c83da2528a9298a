"""More of the page in headless Chromium: keys, errors, colours, widths, the keyboard, and the real small model."""

from __future__ import annotations

import re
from typing import Any

import pytest
from page_harness import BACKGROUND, GOOD, LONG, Opens, Pace, Tab
from server_harness import call_pieces, line, serving

from ds4.engine import EngineConfig
from ds4.engine.loading import load
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig

NARROW = {"viewport": {"width": 360, "height": 640}}

# ---- keys and errors ------------------------------------------------------------------------------------------------


def test_a_server_with_keys_asks_for_one(tab: Opens) -> None:
    opened = tab(line(*GOOD), api_keys=("secret-key",))
    page = opened.page
    assert page.locator("#model").inner_text() == "ds4-tiny"
    problem = opened.ask("Hello").locator(".problem")
    assert problem.locator(".what").inner_text().startswith("this server needs an API key")
    assert "under Settings" in problem.inner_text()
    problem.get_by_text("Enter the key").click()
    assert opened.focused() == "key"
    page.wait_for_selector("#sessions-note:has-text('with an API key')")
    page.keyboard.insert_text("ключ")
    problem.get_by_role("button", name="Try again").click()
    page.wait_for_selector(".what:has-text('cannot be sent')")
    page.fill("#key", "wrong")
    problem.get_by_role("button", name="Try again").click()
    page.wait_for_selector(".what:has-text('is not one of this server')")
    page.fill("#key", "secret-key")
    problem.get_by_role("button", name="Try again").click()
    opened.sees(".prose", "Fine.")
    page.wait_for_selector("#sessions .badge:has-text('this one')")
    assert "secret-key" not in opened.stored()


def test_errors_say_what_to_do(tab: Opens) -> None:
    fails = line("</think>", "begun", " and", fail_at=3)
    opened = tab(fails, line(*GOOD), line(*GOOD), ctx=400)
    page = opened.page
    broken = opened.ask("Hello")
    assert broken.locator(".what").inner_text() == "the script fails at step 3"
    assert "Try again" in broken.inner_text()
    assert broken.locator(".prose").inner_text().startswith("begun")
    broken.get_by_role("button", name="Try again").click()
    opened.sees(".prose", "Fine.")
    too_long = opened.ask(3 * LONG)
    assert "larger --ctx" in too_long.inner_text()
    assert too_long.locator(".what").inner_text() == page.locator("#status").inner_text().partition(" Edit")[0]
    page.click("#panel-toggle")
    page.fill("#temperature", "7")
    refused = opened.ask("Hello again")
    assert refused.locator(".what").inner_text().startswith("Temperature: ")


def test_a_server_that_is_gone_is_an_error_with_a_way_on(tab: Opens) -> None:
    opened = tab(line(*GOOD))
    opened.context.route("**/v1/chat/completions", lambda route: route.abort())
    gone = opened.ask("Hello")
    assert gone.locator(".what").inner_text() == "The server does not answer"
    assert "still running" in gone.inner_text()
    opened.context.unroute("**/v1/chat/completions")
    unreadable = ["data: {\n\n", "data: null\n\n"]
    opened.context.route("**/v1/chat/completions", lambda route: route.fulfill(body=unreadable.pop()))
    for _ in range(2):
        gone.get_by_role("button", name="Try again").click()
        opened.sees(".what", "The server's answer cannot be read")
    assert unreadable == []
    opened.context.unroute("**/v1/chat/completions")
    gone.get_by_role("button", name="Try again").click()
    opened.sees(".prose", "Fine.")


def test_the_settings_are_sent(tab: Opens) -> None:
    opened = tab(line("Thought", "</think>", *["x"] * 20), line(*["y"] * 5))
    page = opened.page
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.click("#panel-toggle")
    page.fill("#temperature", "0.5")
    page.fill("#max-tokens", "4")
    page.fill("#system", "Be brief.")
    assert opened.ask("One").locator(".notice").inner_text().startswith("The answer was cut at the limit")
    page.select_option("#effort", "none")
    page.fill("#max-tokens", "")
    second = opened.ask("Two")
    assert second.locator(".prose").inner_text() == "yyyyy"
    assert not second.locator(".thinking").is_visible()
    first, last = bodies
    assert (first["temperature"], first["max_tokens"], first["model"]) == (0.5, 4, "ds4-tiny")
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"}]
    assert "reasoning_effort" not in first
    assert last["reasoning_effort"] == "none"
    assert "max_tokens" not in last
    assert last["messages"][2]["reasoning_content"] == "Thought"


# ---- colours, widths, keyboard, sessions ----------------------------------------------------------------------------


def test_the_colours_are_the_systems_until_others_are_chosen(tab: Opens) -> None:
    page = tab(line(*GOOD)).page

    def dark() -> bool:
        return max(int(part) for part in page.evaluate(BACKGROUND)[4:-1].split(",")) < 80

    assert not dark()
    page.emulate_media(color_scheme="dark")
    assert dark()
    button = page.locator("#theme")
    button.click()
    assert (button.get_attribute("aria-label"), dark()) == ("Colours: light", False)
    page.reload()
    assert not dark()
    button.click()
    page.emulate_media(color_scheme="light")
    assert (button.get_attribute("aria-label"), dark()) == ("Colours: dark", True)
    button.click()
    assert (button.get_attribute("aria-label"), dark()) == ("Colours: as the system", False)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_colours(tab: Opens, scheme: str) -> None:
    """Contrast of at least 4.5 for all text that is shown (WCAG 2, level AA)."""
    opened = tab(line("Hm", "</think>", "A `code` [link](https://e.org)\n\n> quote"), context={"color_scheme": scheme})
    opened.page.click("#panel-toggle")
    opened.ask("Hello")
    opened.page.locator(".thinking summary").click()
    worst = opened.page.evaluate(CONTRAST)
    assert [entry for entry in worst if entry["ratio"] < 4.5] == []
    assert len(worst) > 20


CONTRAST = """() => {
  const parts = (color) => {
    const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    return .2126 * x + .7152 * y + .0722 * z;
  };
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = parts(getComputedStyle(node).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  for (let text; (text = walker.nextNode()); ) {
    const node = text.parentElement;
    const shown = node.checkVisibility({ opacityProperty: true }) && !node.closest(".hidden, noscript");
    if (!text.data.trim() || !shown) continue;
    const [a, b] = [light(parts(getComputedStyle(node).color)), light(ground(node))];
    found.push({ text: text.data.trim(), ratio: (Math.max(a, b) + .05) / (Math.min(a, b) + .05) });
  }
  return found;
}"""


def test_a_narrow_screen_shows_everything_without_scrolling_sideways(tab: Opens) -> None:
    wide = "| a | b |\n|---|---|\n| " + "long " * 30 + "| x |\n\n```\n" + "x" * 200 + "\n```\n\n" + "y" * 200
    opened = tab(line("</think>", wide), context=NARROW)
    page = opened.page
    opened.ask("z" * 200)
    fits = "['html', '#scroller'].every((part) => document.querySelector(part).scrollWidth <= innerWidth)"
    assert page.evaluate(fits)
    page.click("#panel-toggle")
    assert opened.focused() == "panel-close"
    assert page.evaluate("document.querySelector('#main').inert")
    assert page.evaluate(fits)
    page.keyboard.press("Escape")
    assert not page.locator("#panel").is_visible()
    assert opened.focused() == "panel-toggle"
    assert not page.evaluate("document.querySelector('#main').inert")


def test_a_call_with_long_names_fits_on_a_narrow_screen(tab: Opens) -> None:
    name = "part_" * 12
    call = call_pieces((name, [(name, ["z" * 200], True)]))
    opened = tab(line("</think>", *call), context=NARROW)
    page = opened.page
    opened.offer(Name=name)
    page.click("#panel-close")
    opened.ask("Hello")
    assert page.evaluate("document.querySelector('#scroller').scrollWidth <= innerWidth")
    assert page.evaluate("document.querySelector('.call dd').clientWidth > innerWidth / 3")


def test_on_a_touch_screen_enter_begins_a_line(tab: Opens) -> None:
    opened = tab(line(*GOOD), context={**NARROW, "is_mobile": True, "has_touch": True})
    page = opened.page
    assert not page.locator(".keys").is_visible()
    page.tap("#message")
    page.keyboard.type("One")
    page.keyboard.press("Enter")
    page.keyboard.type("two")
    page.tap("#send")
    opened.answer()
    assert page.locator(".said").inner_text() == "One\ntwo"
    assert page.get_by_role("button", name="Edit").is_visible()


def test_all_of_it_goes_by_keyboard(tab: Opens) -> None:
    pace = Pace()
    opened = tab(line("Hm", "</think>", "a", " b", then="repeat", step_ms=1), line(*GOOD), wait=pace)
    page, keys = opened.page, opened.page.keyboard
    assert opened.focused() == "message"
    keys.type("One")
    keys.press("Shift+Enter")
    keys.type("two")
    keys.press("Enter")
    assert page.locator(".said").inner_text() == "One\ntwo"
    pace.let(4)
    opened.sees(".prose", re.compile("^a b"))
    keys.press("Tab")
    assert opened.focused() == "stop"
    keys.press("Enter")
    opened.answer()
    pace.open()
    assert opened.focused() == "message"
    # Backwards from the message: what can be done with the turns.
    keys.press("Shift+Tab")
    assert opened.focused() == "Regenerate"
    keys.press("Shift+Tab")
    keys.press("Enter")
    assert page.locator(".reasoning").inner_text() == "Hm"
    keys.press("Shift+Tab")
    assert opened.focused() == "Edit"
    keys.press("Enter")
    keys.type("!")
    keys.press("Enter")
    opened.sees(".prose", "Fine.")
    assert page.locator(".said").inner_text() == "One\ntwo!"
    # From the top: the link over the bar, then the bar, then the panel.
    page.evaluate("document.activeElement.blur()")
    opened.tab_to("Skip to the message")
    keys.press("Enter")
    assert opened.focused() == "message"
    page.evaluate("document.activeElement.blur()")
    opened.tab_to("panel-toggle")
    keys.press("Enter")
    for name in ("panel-close", "key", "effort", "temperature", "max-tokens", "system"):
        opened.tab_to(name)


NAMELESS = """() => {
  const named = (node) => node.getAttribute("aria-label") || node.labels?.length || node.textContent.trim();
  const used = document.querySelectorAll("button, input, select, textarea, a, summary, [role=img]");
  return [...used].filter((node) => !named(node)).map((node) => node.outerHTML);
}"""


def test_everything_that_can_be_used_has_a_name(tab: Opens) -> None:
    opened = tab(line("Hm", "</think>", "```\ncode\n```"))
    opened.offer()
    opened.ask("Hello")
    nameless = opened.page.evaluate(NAMELESS)
    assert nameless == []


def test_the_live_sessions_are_listed(tab: Opens) -> None:
    opened = tab(line(*GOOD), max_sessions=3)
    page = opened.page
    page.click("#panel-toggle")
    page.wait_for_selector("#sessions:has-text('No conversation is live.')")
    opened.server.post({"messages": [{"role": "user", "content": "From elsewhere"}]})
    opened.ask("From here")
    page.wait_for_selector("#sessions li:has-text('Request 2'):has-text('idle'):has-text('this one')")
    assert "this one" not in page.locator("#sessions li:has-text('Request 1')").inner_text()
    assert page.locator("#sessions-count").inner_text() == "2 of 3"
    page.click("#new")
    page.wait_for_selector("#sessions:not(:has-text('this one')):has-text('Request 2')")
    page.click("#new")
    page.click("#panel-close")
    assert opened.focused() == "panel-toggle"


def test_two_tabs_show_the_same_conversation(tab: Opens) -> None:
    opened = tab(line(*GOOD))
    other = opened.context.new_page()
    other.goto(opened.server.url)
    opened.ask("Hello")
    other.wait_for_selector(".prose:has-text('Fine.')")
    assert other.locator(".said").inner_text() == "Hello"


def test_an_edit_stays_when_another_tab_goes_on(tab: Opens) -> None:
    opened = tab(line(*GOOD), line(*GOOD))
    opened.ask("Hello")
    other = opened.context.new_page()
    other.goto(opened.server.url)
    other.focus("#message")
    other.keyboard.press("ArrowUp")
    other.keyboard.type(" you")
    opened.ask("Again")
    other.wait_for_selector(".answer:nth-of-type(4)")
    assert other.get_by_label("Edit your message").input_value() == "Hello you"


def test_a_reader_who_scrolled_up_is_left_there(tab: Opens) -> None:
    pace = Pace()
    opened = tab(line("</think>", *["line\n\n"] * 200, step_ms=1), wait=pace, context={"reduced_motion": "reduce"})
    page = opened.page
    opened.send("Hello")
    pace.let(60)
    page.locator(".prose p").nth(50).wait_for()
    assert page.evaluate(
        "(s => s.scrollHeight - s.scrollTop - s.clientHeight < 80)(document.querySelector('#scroller'))"
    )
    page.evaluate("document.querySelector('#scroller').scrollTop = 0")
    page.wait_for_selector("#latest", state="visible")
    pace.open()
    opened.answer()
    assert page.evaluate("document.querySelector('#scroller').scrollTop") == 0
    page.click("#latest")
    page.wait_for_selector("#latest", state="hidden")


# ---- the real model -------------------------------------------------------------------------------------------------


def test_the_small_model_calculates_and_goes_on_live(browser: Any) -> None:
    config = ServerConfig(ctx=2048)
    engine = load(None, "cpu", config=EngineConfig(context=2048, threads=1))
    with serving(Backend(engine, "ds4-tiny"), config) as server, Tab(browser, server) as opened:
        opened.page.click("#panel-toggle")
        opened.page.fill("#temperature", "0")
        answer = opened.ask("What is 12 + 30?")
        assert "42" in answer.locator(".prose").inner_text()
        assert answer.locator(".thinking .label").inner_text().startswith("Thought for ")
        opened.ask("What is 5 + 4?")
        reused, prompt = opened.reused(2)
        assert reused >= 0.6 * prompt
