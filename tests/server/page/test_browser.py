"""The page in headless Chromium: what a person sees and does. Run by `make test-page`; skipped without Chromium."""

from __future__ import annotations

import re

import pytest
from page_harness import CALL, GOOD, LONG, Opens, Pace
from server_harness import call_pieces, line
from worker_harness import look_until

# ---- a message and its answer ---------------------------------------------------------------------------------------


def test_thinking_is_seen_folded_and_then_the_answer(tab: Opens) -> None:
    pace = Pace()
    script = line("First", " line.\n", "Second", " thought", "</think>", "It", " is", " **so**", ".", step_ms=1)
    opened = tab(script, wait=pace)
    page = opened.page
    opened.send("Why?")
    thinking = page.locator(".thinking")
    pace.let(3)
    opened.sees(".peek", "Second thought")
    assert thinking.locator(".label").inner_text() == "Thinking"
    assert thinking.get_attribute("open") is None
    assert page.locator("#stop").is_visible()
    assert not page.locator("#send").is_visible()
    thinking.locator("summary").click()
    assert thinking.locator(".reasoning").inner_text() == "First line.\nSecond thought"
    pace.let(3)
    opened.sees(".prose", re.compile("^It is"))
    assert thinking.locator(".label").inner_text().startswith("Thought for ")
    assert thinking.get_attribute("open") is not None  # opened by hand, so it stays
    pace.open()
    answer = opened.answer()
    assert answer.locator(".prose").inner_text() == "It is so."
    assert answer.locator(".prose strong").inner_text() == "so"
    numbers = answer.locator(".numbers").inner_text()
    assert numbers.startswith("9 tokens · ")
    assert "tokens/s, first after" in numbers
    assert "reused 0 of " in numbers
    assert page.locator("#status").inner_text() == "Answer: It is **so**."
    assert page.locator("#send").is_visible()


def test_text_is_never_html_and_code_tables_and_links_are_shown(tab: Opens) -> None:
    text = (
        "<img src=x onerror=alert(1)> [bad](javascript:alert(2)) [good](https://example.org/a) ![i](https://e.org/i.png)"
        "\n\n```js\n<b>x</b>\n```\n\n| a | b |\n|---|---|\n| 1 | <i>2</i> |\n\n- one\n- two\n  1. deep\n"
    )
    opened = tab(line("<b>r</b>", "</think>", text))
    opened.ask("<b>me</b> & you")
    page = opened.page
    assert page.locator(".said").inner_text() == "<b>me</b> & you"
    prose = page.locator(".prose")
    assert "<img src=x onerror=alert(1)> [bad](javascript:alert(2))" in prose.inner_text()
    hrefs = prose.locator("a").evaluate_all("links => links.map(link => link.href)")
    assert hrefs == ["https://example.org/a", "https://e.org/i.png"]
    assert prose.locator("a").first.get_attribute("rel") == "noopener noreferrer nofollow"
    assert prose.locator("figure code").inner_text() == "<b>x</b>"
    assert prose.locator("td").all_inner_texts() == ["1", "<i>2</i>"]
    assert prose.locator("ul > li").count() == 2
    assert prose.locator("ol > li").inner_text() == "deep"
    assert page.locator("img:not(.bar img)").count() == 0
    assert page.locator(".answer b, .answer i, .said b").count() == 0


def test_text_begins_where_its_script_does(tab: Opens) -> None:
    hebrew = "\u05e9\u05dc\u05d5\u05dd"
    opened = tab(line("</think>", f"{hebrew}.\n\nHello.\n\n- {hebrew}\n\n```\ncode\n```"))
    opened.ask(f"{hebrew}?")
    side = """node => {
      const range = document.createRange();
      range.selectNodeContents(node);
      const [text, box] = [range.getBoundingClientRect(), node.getBoundingClientRect()];
      return text.left - box.left > box.right - text.right ? "right" : "left";
    }"""
    paragraphs = opened.page.locator(".prose > p")
    assert [paragraph.evaluate(side) for paragraph in paragraphs.all()] == ["right", "left"]
    assert opened.page.locator(".prose li").evaluate(side) == "right"
    assert opened.page.locator(".said").evaluate("node => getComputedStyle(node).unicodeBidi") == "plaintext"


def test_the_next_turn_reuses_what_was_said(tab: Opens) -> None:
    opened = tab(line("Hm", ".", "</think>", "One", "."), line("So", "</think>", "Two"))
    opened.ask(LONG)
    opened.ask("And then?")
    reused, prompt = opened.reused(2)
    assert reused >= 0.9 * prompt
    said = opened.page.locator("#reuse").get_attribute("aria-label")
    assert said.startswith(f"reused {reused} of {prompt} prompt tokens (9")
    assert f"of {4096:,} tokens of the context" in opened.page.locator("#kv").get_attribute("aria-label")


def test_a_long_prompt_says_how_far_it_is_read(tab: Opens) -> None:
    pace = Pace()
    opened = tab(line(*GOOD, prefill_ms_per_token=1), wait=pace, chunk=16)
    questions = opened.server.worker._questions
    label = opened.page.locator(".label")
    opened.send(LONG)
    for _ in range(10):
        # The page asks once a second, and is answered between two chunks.
        look_until(lambda: any(not question.answer.cancelled() for question in list(questions._waiting)))
        pace.let(1)
        if label.inner_text().startswith("Reading the prompt, "):
            break
    opened.sees(".label", re.compile("^Reading the prompt, .* of .* tokens$"))
    pace.open()
    opened.answer()


def test_a_full_server_says_that_it_is(tab: Opens) -> None:
    pace = Pace()
    opened = tab(line("</think>", "a", then="repeat", step_ms=1), line(*GOOD), wait=pace, max_sessions=1)
    other = opened.context.new_page()
    other.goto(opened.server.url)
    opened.send("First")
    look_until(lambda: opened.server.worker.status()["running"])
    other.fill("#message", "Second")
    other.press("#message", "Enter")
    other.get_by_text("Waiting for a place: others are being answered").wait_for()
    opened.page.keyboard.press("Escape")
    pace.open()
    other.get_by_text("Fine.", exact=True).wait_for()


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_a_call_is_shown_and_answered_by_hand(tab: Opens) -> None:
    pace = Pace()
    opened = tab(line(*CALL, step_ms=1), line("Good", "</think>", "Sunny", "."), line(*GOOD), wait=pace)
    page = opened.page
    opened.offer()
    opened.send("The weather in Rome?")
    pace.let(CALL.index("Ro") + 1)
    opened.sees(".call pre", re.compile("Ro"))
    assert page.locator(".call form").count() == 0  # it is not complete
    pace.open()
    opened.answer()
    call = page.locator(".call")
    assert call.locator(".name").inner_text() == "get_weather"
    assert call.locator("dt").all_inner_texts() == ["city", "days"]
    assert call.locator("dd").all_inner_texts() == ["Rome", "3"]
    assert opened.focused() == "Result of get_weather"
    assert page.locator("#send").is_disabled()
    assert page.locator("#hint").inner_text() == "The model waits for the result of get_weather."
    page.keyboard.type("24 degrees")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("clear sky")
    page.keyboard.press("Enter")
    assert opened.answer(2).locator(".prose").inner_text() == "Sunny."
    assert call.locator(".result").inner_text() == "24 degrees\nclear sky"
    reused, prompt = opened.reused(2)
    assert reused >= 0.9 * prompt
    # Another result replaces what came after the first one.
    call.get_by_text("Edit result").click()
    field = page.get_by_label("Result of get_weather")
    assert field.input_value() == "24 degrees\nclear sky"
    field.fill("rain")
    field.press("Enter")
    opened.sees(".prose", "Fine.", nth=1)
    assert page.locator(".answer").count() == 2
    assert call.locator(".result").inner_text() == "rain"


def test_a_result_that_is_edited_while_an_answer_is_written_is_not_lost(tab: Opens) -> None:
    pace = Pace()
    opened = tab(
        line(*CALL), line("</think>", "Rain"), line("</think>", "a", step_ms=1), line("</think>", "Sun"), wait=pace
    )
    page = opened.page
    opened.offer()
    pace.let(100)
    opened.ask("And the weather?")
    field = page.get_by_label("Result of get_weather")
    field.fill("rain")
    field.press("Enter")
    opened.answer(2)
    page.get_by_role("button", name="Edit result").click()
    field.fill("sun")
    pace.let(-pace.left)
    opened.send("Thanks")
    page.wait_for_selector(".answer.live")
    field.press("Enter")
    field.press("End")
    page.keyboard.type("n")
    pace.open()
    opened.answer(3)
    page.keyboard.type("y")  # the field still has the focus
    assert field.input_value() == "sunny"
    field.press("Enter")
    opened.sees(".prose", "Sun", nth=1)
    assert page.locator(".result").inner_text() == "sunny"


def test_of_several_calls_all_are_answered(tab: Opens) -> None:
    both = [*CALL[: CALL.index("</think>") + 1], *_calls("Oslo", "Bergen")]
    opened = tab(line(*both), line(*GOOD))
    page = opened.page
    opened.offer()
    opened.send("Both?")
    opened.answer()
    page.get_by_label("Result of get_weather").nth(1).fill("a draft")
    page.get_by_label("Result of get_weather").nth(0).fill("cold")
    assert page.get_by_text("Keep result (1 more to answer)").count() == 2
    page.get_by_label("Result of get_weather").nth(0).press("Enter")
    assert page.locator(".answer").count() == 1
    assert page.get_by_label("Result of get_weather").input_value() == "a draft"
    assert opened.focused() == "Result of get_weather"
    page.get_by_text("Send result").click()
    assert opened.answer(2).locator(".prose").inner_text() == "Fine."


def _calls(*cities: str) -> list[str]:
    return call_pieces(*(("get_weather", [("city", city, True)]) for city in cities))  # type: ignore[misc]


def test_a_tool_that_cannot_be_sent_says_why_and_is_not(tab: Opens) -> None:
    opened = tab(line(*GOOD), line(*GOOD))
    page = opened.page
    opened.offer()
    for label, text, problem in (
        ("Parameters (JSON schema)", "{", "The parameters are no JSON"),
        ("Parameters (JSON schema)", "[]", "The parameters are a JSON schema"),
        ("Name", "two words", "A name has up to 64"),
    ):
        field = page.locator(".tool").get_by_label(label)
        before = field.input_value()
        field.fill(text)
        assert problem in page.locator(".tool p.wrong").inner_text()
        assert page.locator("#tools-count").inner_text() == "none"
        field.fill(before)
    assert page.locator("#tools-count").inner_text() == "1 offered"
    page.get_by_text("Remove").click()
    assert page.locator("#tools-count").inner_text() == "none"
    assert opened.focused() == "add-tool"
    opened.ask("Hello")


# ---- stop, edit, regenerate, reload ---------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["Escape", "button"])
def test_stop_keeps_what_there_is_and_the_conversation_goes_on(tab: Opens, by: str) -> None:
    pace = Pace()
    opened = tab(line("</think>", "a", " b", then="repeat", step_ms=1), line(*GOOD), wait=pace)
    page = opened.page
    opened.send("Never end")
    pace.let(6)
    opened.sees(".prose", re.compile("^a b b"))
    if by == "Escape":
        page.keyboard.press("Escape")
    else:
        page.click("#stop")
    answer = opened.answer()
    assert answer.locator(".notice").inner_text() == "Stopped."
    assert answer.locator(".prose").inner_text().startswith("a b b")
    assert opened.focused() == "message"
    pace.open()
    assert opened.server.worker.wait_idle(30)  # nobody writes on for nobody
    assert opened.ask("Go on").locator(".prose").inner_text() == "Fine."


def test_an_edit_replaces_what_follows_and_reuses_what_precedes(tab: Opens) -> None:
    opened = tab(line("</think>", "One"), line("</think>", "Two"), line("</think>", "Three"), line("</think>", "Four"))
    page = opened.page
    opened.ask(LONG)
    opened.ask("Second question")
    opened.ask("Third question")
    question = page.locator(".question").nth(1)
    question.hover()
    question.get_by_text("Edit").click()
    field = page.get_by_label("Edit your message")
    assert field.input_value() == "Second question"
    field.press("Escape")
    assert page.locator(".answer").count() == 3
    assert opened.focused() == "Edit"
    page.keyboard.press("Enter")
    field.fill("Another question")
    field.press("Enter")
    opened.sees(".prose", "Four", nth=1)
    assert page.locator(".said").all_inner_texts()[1:] == ["Another question"]
    assert page.locator(".answer").count() == 2
    reused, prompt = opened.reused(2)
    assert reused >= 0.8 * prompt


def test_what_is_edited_while_an_answer_is_written_is_not_lost(tab: Opens) -> None:
    pace = Pace()
    opened = tab(line(*GOOD), line("</think>", "a", step_ms=1), line("</think>", "Three"), wait=pace)
    page = opened.page
    pace.let(10)
    opened.ask("First")
    page.keyboard.press("ArrowUp")
    field = page.get_by_label("Edit your message")
    field.fill("Another first")
    page.focus("#message")
    page.keyboard.press("ArrowUp")
    assert opened.focused() == "Edit your message"
    pace.let(-pace.left)
    opened.send("Second")
    page.wait_for_selector(".answer.live")
    field.press("Enter")
    assert field.input_value() == "Another first"
    assert page.get_by_role("button", name="Send again").is_disabled()
    pace.open()
    opened.answer(2)
    field.press("Enter")
    opened.sees(".prose", "Three")
    assert page.locator(".said").all_inner_texts() == ["Another first"]


def test_the_arrow_edits_the_last_message(tab: Opens) -> None:
    opened = tab(line("</think>", "One"), line("</think>", "Two"))
    opened.ask("First")
    opened.page.keyboard.press("ArrowUp")
    assert opened.focused() == "Edit your message"
    opened.page.keyboard.type(" and more")
    opened.page.keyboard.press("Enter")
    opened.sees(".prose", "Two")
    assert opened.page.locator(".said").all_inner_texts() == ["First and more"]


def test_regenerate_gives_another_answer_to_the_same_prompt(tab: Opens) -> None:
    opened = tab(line("</think>", "One"), line("</think>", "Two"))
    opened.ask(LONG)
    opened.page.get_by_text("Regenerate").click()
    opened.sees(".prose", "Two")
    reused, prompt = opened.reused(1)
    assert reused >= prompt - 2
    assert opened.page.locator(".answer").count() == 1


def test_a_reload_keeps_the_conversation_the_tools_and_the_settings_but_not_the_key(tab: Opens) -> None:
    pace = Pace()
    opened = tab(line(*CALL), line("</think>", "a", " b", then="repeat", step_ms=1), wait=pace)
    page = opened.page
    opened.offer(Description="Of a city")
    page.fill("#system", "Be brief.")
    page.fill("#key", "my-secret")
    opened.send("Call it")
    opened.answer()
    page.reload()
    assert page.locator(".said").inner_text() == "Call it"
    assert page.locator(".call .state").inner_text() == "waits for your result"
    assert page.locator("#tools-count").inner_text() == "1 offered"
    assert page.locator("#system").input_value() == "Be brief."
    assert page.locator("#key").input_value() == "my-secret"  # the tab is the same one
    assert "my-secret" not in opened.stored()
    # An answer that is being written is cut off, and can be written again.
    page.get_by_label("Result of get_weather").fill("warm")
    page.keyboard.press("Enter")
    pace.let(5)
    opened.sees(".prose", re.compile("^a b"), nth=1)
    page.reload()
    assert page.locator(".notice:visible").inner_text() == "This answer was cut off when the page was left."
    assert page.locator(".prose").nth(1).inner_text().startswith("a b")
    pace.open()
    assert opened.server.worker.wait_idle(30)


def test_a_new_conversation_deletes_the_old_one_unless_that_is_undone(tab: Opens) -> None:
    opened = tab(line(*GOOD))
    page = opened.page
    opened.ask("Remember me")
    page.click("#new")
    assert page.locator(".turn").count() == 0
    assert page.locator("#empty").is_visible()
    assert "Remember me" not in opened.stored()
    page.get_by_text("Undo").click()
    assert page.locator(".said").inner_text() == "Remember me"
    assert "Remember me" in opened.stored()
    page.click("#new")
    page.reload()
    assert page.locator(".turn").count() == 0


def test_what_is_stored_by_others_does_no_harm(tab: Opens) -> None:
    opened = tab(line(*GOOD))
    for stored in (
        '[{"role":"assistant"}]',
        "{",
        '"x"',
        '[{"role":"user","text":5}]',
        "null",
        '[{"role":"system"}]',
        "[{}, 5]",
    ):
        opened.page.evaluate(
            "text => { for (const name of ['conversation', 'tools', 'settings', 'theme', 'panel'])"
            " localStorage.setItem('ds4.' + name, text) }",
            stored,
        )
        opened.page.reload()
        opened.page.wait_for_selector("#model:not(:empty)")
        assert opened.page.locator(".turn").count() == 0
    opened.ask("Hello")


def test_an_answer_of_very_many_parts_is_shown(tab: Opens) -> None:
    opened = tab(line(*GOOD))
    script = """text => localStorage.setItem("ds4.conversation", JSON.stringify([{
      role: "assistant", reasoning: "", text, calls: [], finish: "stop", error: null, numbers: {},
    }]))"""
    opened.page.evaluate(script, "`a` " * 150_000)
    opened.page.reload()
    opened.page.wait_for_selector("#model:not(:empty)")
    assert opened.page.locator(".prose code").count() == 150_000


def test_a_conversation_that_does_not_fit_the_storage_goes_on(tab: Opens) -> None:
    opened = tab(line(*GOOD), line(*GOOD))
    page = opened.page
    page.evaluate("for (let size = 2 ** 23; size; size >>= 1) try { localStorage[size] = 'x'.repeat(size) } catch {}")
    opened.ask("Hello")
    opened.sees("#hint", re.compile("too long to be kept"))
    page.evaluate("for (const name of Object.keys(localStorage)) if (+name) delete localStorage[name]")
    opened.ask("Again")
    assert not page.locator("#hint").is_visible()
    assert "Again" in opened.stored()
