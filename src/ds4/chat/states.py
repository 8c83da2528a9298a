"""Where a reader of a generation stands."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """What kind of text the next token continues."""

    OUTSIDE = "outside"
    STRUCTURAL = "structural"
    STRING_BODY = "string_body"
    JSON_STRUCTURAL = "json_structural"
    JSON_STRING = "json_string"


class Phase(Enum):
    """What the reader waits for."""

    START = 0
    REASONING = 1
    TEXT = 2
    TAGS = 3  # in a block, between values
    VALUE = 4
    HELD = 5  # behind what makes a block unreadable, see `hold`
    DONE = 6
