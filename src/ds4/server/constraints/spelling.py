"""Keeps ordinary tokens from spelling out what only a special token may say.

A grammar over tokens tells `｜DSML｜` the token from the same characters written one by one; whoever reads the answer
sees text, and would take both for a tag. So the token that would complete such a text is forbidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SPACE = b" \t\r\n\v\f"


class Spelling:
    """A text that must not be completed, and the tokens that would do it.

    Args:
        tokens: (id, bytes) of the ordinary tokens.
        text: the text, of two or more bytes.
        spaced: white space may stand before its last byte.
    """

    def __init__(self, tokens: Iterable[tuple[int, bytes]], text: bytes, spaced: bool = False) -> None:
        head, last = text[:-1], text[-1:]
        escaped = [re.escape(head[i : i + 1]) for i in range(len(head))]
        gap = b"[" + _SPACE + b"]*" if spaced else b""
        whole = re.compile(b"".join(escaped) + gap + re.escape(last))
        begun = gap
        for byte in reversed(escaped):
            begun = b"(?:" + byte + begun + b")?"
        self._begun = re.compile(begun.removesuffix(b"?") + rb"\Z")
        able = [(id, piece) for id, piece in tokens if last in piece]
        by_first: dict[int, list[tuple[int, bytes]]] = {}
        for id, piece in able:
            by_first.setdefault(piece[0], []).append((id, piece))
        always = {id for id, piece in able if whole.search(piece)}
        self._completing = {b"": tuple(sorted(always))}
        states = [text[:size] for size in range(1, len(text))] + ([head + b" "] if spaced else [])
        for state in states:
            # What goes on from here begins with the next byte, or with that behind a shorter begin at the state's end.
            ends = [end for size in range(1, len(state) + 1) if text.startswith(end := state[-size:].rstrip(_SPACE))]
            firsts = {text[len(end)] for end in ends} | (set(_SPACE) if spaced and head in ends else set())
            found = {id for first in firsts for id, piece in by_first.get(first, ()) if whole.search(state + piece)}
            self._completing[state] = tuple(sorted(always | found))

    def follow(self, begun: bytes, piece: bytes) -> bytes:
        """What is begun of the text behind a further token, when `begun` was before it."""
        match = self._begun.search(begun + piece)
        # However long the white space is, it is the same to what follows.
        return match.group().rstrip(_SPACE) + b" " * match.group()[-1:].isspace() if match else b""

    def completing(self, begun: bytes) -> tuple[int, ...]:
        """The tokens that complete the text."""
        return self._completing[begun]
