"""The model's turns in a prompt, found in its key bytes, and the prompt without what it says of their reasoning.

In key bytes a byte 0xFF stands before each special token, so that markers are found exactly.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from ds4.chat.message import Message
from ds4.chat.template import ASSISTANT, END_THINK, EOS, THINK

_MARK, _THINK, _END_THINK, _END = (b"\xff" + text.encode() for text in (ASSISTANT, THINK, END_THINK, EOS))

_TURN = re.compile(
    # Reasoning has no marker of a turn in it, though it may have markup of calls.
    rb"(?P<front>%s)(?:%s(?P<reasoning>[^\xff]*+(?:\xff(?!%s|</think>)[^\xff]*+)*+)(?=%s))?"
    % (re.escape(_MARK), _THINK, "<｜".encode(), _END_THINK)
)


@dataclass(frozen=True)
class OpenedTurn:
    """A turn of the model.

    Attributes:
        front: key bytes up to and with its `<｜Assistant｜>`.
        bare: how many those are without reasoning.
        reasoning: its own reasoning as plain text, without white space around it; empty if there is none.
        text: where its `</think>` is, if it has one.
        end: where its end of sentence ends; 0 if it is not known to be there.
        message: what was rendered as this turn, if that is known.
        ids: the ids of all calls before it, as a hash of them; empty if they are not known.
    """

    front: int
    bare: int
    reasoning: bytes
    text: int
    end: int = 0
    message: Message | None = None
    ids: bytes = b""


@dataclass(frozen=True)
class Outline:
    """The model's turns in a prompt.

    Attributes:
        turns: all, in order.
        bare: the prompt's key bytes without the reasoning of turns whose reasoning is closed.
        by_front, by_bare: the turns by these of their attributes.
    """

    turns: Sequence[OpenedTurn]
    bare: bytes
    by_front: Mapping[int, OpenedTurn]
    by_bare: Mapping[int, OpenedTurn]


def outline(key: bytes, messages: Sequence[Message] = ()) -> Outline:
    """The turns in the key bytes of a prompt that these messages were rendered to."""
    turns: list[OpenedTurn] = []
    pieces: list[bytes] = []
    at = length = 0
    for match in _TURN.finditer(key):
        front = match.end("front")
        pieces.append(key[at:front])
        length += front - at
        at = match.end()
        reasoning = (match["reasoning"] or b"").replace(b"\xff", b"").strip()
        turns.append(OpenedTurn(front, length, reasoning, at))
    pieces.append(key[at:])
    _assign(turns, key, messages)
    return Outline(
        tuple(turns), b"".join(pieces), {turn.front: turn for turn in turns}, {turn.bare: turn for turn in turns}
    )


class SharedReasoning:
    """Whether turns leave their reasoning out, or have the true one: for all beginnings of two lists of turns.

    There may be more true turns than shown ones: a client does not see that a call was written twice. Which turn is
    which is not known then, but they have one order.
    """

    def __init__(self, shown: Sequence[OpenedTurn], true: Sequence[OpenedTurn]) -> None:
        pairs = enumerate(zip(shown, true, strict=False))
        self._alike = next(
            (i for i, (a, b) in pairs if a.reasoning and a.reasoning != b.reasoning), min(len(shown), len(true))
        )
        # How many true turns the first shown ones need at least; none are enough where the list ends.
        self._needed = [0]
        at = 0
        for turn in shown:
            if turn.reasoning:
                at = next((i for i in range(at, len(true)) if true[i].reasoning == turn.reasoning), len(true)) + 1
                if at > len(true):
                    break
            self._needed.append(at)

    def holds(self, shown: int, true: int) -> bool:
        """Whether it is so for the first `shown` and the first `true` turns."""
        if shown == true:
            return shown <= self._alike
        return shown < len(self._needed) and self._needed[shown] <= true


def _assign(turns: list[OpenedTurn], key: bytes, messages: Sequence[Message]) -> None:
    """Find the message of each turn. Only those that have a marker of their own are known for certain."""
    ends = [match.end() for match in re.finditer(re.escape(_END), key)]
    # An answer that is to be continued has no end.
    spoken = [i for i, message in enumerate(messages) if message.role == "assistant" and not message.open_end]
    if len(ends) != len(spoken):
        # A client's text was allowed to become special tokens.
        return
    fronts = [turn.front for turn in turns]
    ids = blake2b(digest_size=16)
    first = 0
    for i, end in zip([*spoken, -1], [*ends, len(key) + 1], strict=True):
        last = bisect_left(fronts, end)
        turns[first:last] = [replace(turn, ids=ids.digest()) for turn in turns[first:last]]
        if i >= 0:
            if last - first == 1 and not (i and messages[i - 1].role == "latest_reminder"):
                turns[first] = replace(turns[first], end=end, message=messages[i])
            ids.update("".join(f"{call.id}\n" for call in messages[i].tool_calls).encode("utf-8", "replace"))
        first = last
