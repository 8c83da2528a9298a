"""Anchors as JSON: they come back as they were, and nonsense is left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds4.chat.message import ToolCall
from ds4.server.anchors import MAX_ANCHORS, anchor_values, read_anchors, ways
from ds4.server.slots import Anchor, Prefix, digest


def anchor(tokens: int, **changes: Any) -> Anchor:
    """An anchor at the end of so many tokens."""
    values: dict[str, Any] = {
        "front": Prefix.of(b"front" * tokens), "bare": Prefix.of(b"bare"), "ids": digest(b"ids"),
        "opened": 2, "held": 3, "reasoning": digest(b"why"), "shown": Prefix.of(b"shown"), "content": digest(b"text"),
        "calls": (ToolCall("f", '{"a":1}', "call_1"),), "tokens": tokens, "extra": (7, 1),
    }  # fmt: skip
    return Anchor(**{**values, **changes})


def test_anchors_come_back() -> None:
    anchors = [anchor(5), anchor(9, shown=None, calls=(), extra=())]
    meta = json.loads(json.dumps({"anchors": anchor_values(anchors)}))
    assert read_anchors(meta, 9, 100) == anchors
    assert read_anchors(meta, 8, 100) == anchors[:1], "an answer behind the end of the state"


def test_the_last_ones_are_kept() -> None:
    anchors = [anchor(n) for n in range(1, MAX_ANCHORS + 10)]
    assert [value["tokens"] for value in anchor_values(anchors)] == list(range(10, MAX_ANCHORS + 10))


def test_the_ways_are_those_of_the_last_answer() -> None:
    last = anchor(9)
    assert ways([last, anchor(5)]) == [
        ["front", last.front.length, last.front.digest.hex()],
        ["bare", last.bare.length, last.bare.digest.hex()],
    ]
    assert ways([]) == []


@pytest.mark.parametrize("meta", [{}, {"anchors": None}, {"anchors": [1, "x", {}, {"front": 1}, []]}, {"anchors": {}}])
def test_nonsense_is_left_out(meta: dict[str, Any]) -> None:
    assert read_anchors(meta, 10, 100) == []


@pytest.mark.parametrize(
    "change",
    [
        {"front": [1]},
        {"front": [-1, "ab"]},
        {"ids": "xyz"},
        {"held": -1},
        {"tokens": "many"},
        {"tokens": 0},
        {"opened": float("inf")},
        {"calls": [["a"]]},
        {"extra": None},
        {"extra": [100]},
        {"extra": [-1]},
    ],
)
def test_a_damaged_anchor_is_left_out(change: dict[str, Any]) -> None:
    (value,) = anchor_values([anchor(5)])
    assert read_anchors({"anchors": [{**value, **change}]}, 10, 100) == []
