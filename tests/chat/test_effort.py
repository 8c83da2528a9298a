import hashlib

import pytest

from ds4.chat.effort import MAX_EFFORT_CONTEXT, effort_text, resolve
from ds4.errors import RequestError

THOROUGH_START = "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very thorough"
EXHAUSTIVE_START = "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\nYou MUST reason"


@pytest.mark.parametrize(
    ("effort", "profile", "level", "start"),
    [
        (None, "preview", "high", ""),
        ("low", "preview", "high", ""),
        ("xhigh", "preview", "high", ""),
        ("max", "preview", "max", THOROUGH_START),
        (None, "0731", "low", ""),
        ("minimal", "0731", "low", ""),
        ("high", "0731", "high", THOROUGH_START),
        ("max", "0731", "max", EXHAUSTIVE_START),
        ("none", "0731", "none", ""),
    ],
)
def test_levels_and_texts(effort: str | None, profile: str, level: str, start: str) -> None:
    assert resolve(effort, profile) == level
    text = effort_text(level, profile)
    assert text.startswith(start)
    assert bool(text) == bool(start)
    assert not text or (text.endswith(".\n\n") and text.count("\n") == 4)


def test_texts_are_the_known_bytes() -> None:
    digests = [hashlib.sha256(effort_text("max", profile).encode()).hexdigest() for profile in ("preview", "0731")]
    assert digests == [
        "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7",
        "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c",
    ]
    assert effort_text("high", "0731") == effort_text("max", "preview")


def test_max_needs_room() -> None:
    assert resolve("max", "preview", MAX_EFFORT_CONTEXT) == "max"
    assert resolve("max", "preview", MAX_EFFORT_CONTEXT - 1) == "high"
    assert resolve("low", "0731", 1000) == "low"


@pytest.mark.parametrize(("effort", "profile"), [("huge", "preview"), ("", "0731"), ("high", "0801")])
def test_unknown_names_are_refused(effort: str, profile: str) -> None:
    with pytest.raises(RequestError, match="use one of"):
        resolve(effort, profile)
