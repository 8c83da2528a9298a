"""Checks JSON as it arrives, and completes it when it does not."""

from __future__ import annotations

import re

from ds4.chat.json_text import MAX_DEPTH, dump_string

_SPACE = re.compile(r"[ \t\r\n\v\f]+")
_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_QUOTED_RUN = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# Python's spellings are a frequent slip and can mean nothing else.
_WORDS = (
    ("true", "true"),
    ("false", "false"),
    ("null", "null"),
    ("True", "true"),
    ("False", "false"),
    ("None", "null"),
)
# json.loads refuses integers beyond 4300 digits.
_MAX_SCALAR = 4000
_SIMPLE_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonStream:
    """One JSON value that arrives in pieces.

    `feed` returns what is certain, without the white space between tokens; `close` what is missing to make the pieces
    returned so far one JSON value. Numbers keep their characters. Mended on the way: raw control characters and
    unknown escapes in strings, halves of surrogate pairs, a comma before a closing bracket, Python's True, False, None.

    Attributes:
        failed: no JSON; nothing more will be returned.
        started: something was returned.
        in_string: inside quotes (also tracked after a failure).
    """

    def __init__(self) -> None:
        self.failed = False
        self.started = False
        self.in_string = False
        self._stack: list[str] = []
        self._mode = "value"  # value, key, colon, after, string, scalar
        self._comma = False
        self._is_key = False
        self._pending = ""  # a scalar, or an escape, that is not complete
        self._top = ""  # a number or word that is the whole value: what follows may show that it is none
        self._high = ""  # the escape of the first half of a surrogate pair
        self._escaped = False  # after a failure: behind a backslash

    @property
    def complete(self) -> bool:
        """Whether a whole value was seen."""
        return self._mode == "after" and not self._stack

    def feed(self, text: str) -> str:
        out: list[str] = []
        at = 0
        while at < len(text):
            if self.failed:
                self._track(text, at)
                break
            if self._mode == "string":
                at = self._string(text, at, out)
            elif self._mode == "scalar":
                at = self._scalar(text, at, out)
            else:
                space = _SPACE.match(text, at)
                at = space.end() if space else self._token(text, at, out)
        self.started = self.started or bool(out)
        return "".join(out)

    def close(self) -> str:
        """Return what completes the value. A key without value gets null; half a token is finished or dropped."""
        out: list[str] = []
        if self._mode == "scalar":
            self._end_scalar(out, cut=True)
        out.append(self._top)
        self._top = ""
        if self._mode == "string":
            self._flush_high(out)
            out.append('"')
            self._mode = "colon" if self._is_key else "after"
        if self._mode == "colon":
            out.append(":null")
        elif self._mode == "value" and not self._comma and (not self._stack or self._stack[-1] == "{"):
            out.append("null")
        out.extend("}" if opener == "{" else "]" for opener in reversed(self._stack))
        return "".join(out)

    # ---- between strings --------------------------------------------------------------------------------------------

    def _token(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        mode = self._mode
        if char in "}]":
            opener = "{" if char == "}" else "["
            allowed = mode == "after" or (mode == "key" and char == "}") or (mode == "value" and char == "]")
            if not self._stack or self._stack[-1] != opener or not allowed:
                return self._fail(at)
            self._stack.pop()
            self._comma = False
            out.append(char)
            self._mode = "after"
        elif mode == "after" and char == "," and self._stack:
            self._comma = True
            self._mode = "key" if self._stack[-1] == "{" else "value"
        elif mode == "colon" and char == ":":
            out.append(":")
            self._mode = "value"
        elif char == '"' and mode in ("key", "value"):
            self._emit_comma(out)
            out.append('"')
            self._is_key = mode == "key"
            self._mode = "string"
            self.in_string = True
        elif mode == "value" and char in "{[":
            if len(self._stack) >= MAX_DEPTH:
                return self._fail(at)
            self._emit_comma(out)
            out.append(char)
            self._stack.append(char)
            self._mode = "key" if char == "{" else "value"
        elif mode == "value" and _SCALAR.match(char):
            self._mode = "scalar"
            return at
        else:
            return self._fail(at)
        return at + 1

    def _emit_comma(self, out: list[str]) -> None:
        if self._comma:
            out.append(",")
            self._comma = False

    def _scalar(self, text: str, at: int, out: list[str]) -> int:
        match = _SCALAR.match(text, at)
        if match:
            self._pending += match.group()
            if len(self._pending) > _MAX_SCALAR:
                return self._fail(at)
            return match.end()
        self._end_scalar(out, cut=False)
        return at

    def _end_scalar(self, out: list[str], cut: bool) -> None:
        pending = self._pending
        number = _NUMBER.match(pending)
        value = next((json for word, json in _WORDS if (word.startswith(pending) if cut else word == pending)), None)
        if value is None and number and (cut or number.end() == len(pending)):
            value = number.group()
        if value is None and cut:
            value = "null"
        if value is None:
            self.failed = True
            return
        self._pending = ""
        self._mode = "after"
        if not self._stack:
            self._top = value
            return
        self._emit_comma(out)
        out.append(value)

    def finish(self) -> str:
        """Return the number or word that is the whole value, once nothing follows; marks a failure if it is none."""
        # Inside a list or an object the value is not whole; `close` writes what there is of it.
        if self._mode == "scalar" and not self.failed and not self._stack:
            self._end_scalar([], cut=False)
        top, self._top = self._top, ""
        return "" if self.failed else top

    # ---- inside strings ---------------------------------------------------------------------------------------------

    def _string(self, text: str, at: int, out: list[str]) -> int:
        if self._pending:
            return self._escape(text, at, out)
        char = text[at]
        if char == "\\":
            self._pending = char
            return at + 1
        self._flush_high(out)
        if char == '"':
            out.append('"')
            self.in_string = False
            self._mode = "colon" if self._is_key else "after"
            return at + 1
        run = _RUN.match(text, at)
        if run:
            out.append(dump_string(run.group())[1:-1])
            return run.end()
        out.append(dump_string(char)[1:-1])
        return at + 1

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        pending = self._pending
        if len(pending) == 1 and char != "u":
            self._pending = ""
            self._flush_high(out)
            # A backslash before anything else (a regular expression, a path) stands for itself.
            out.append(f"\\{char}" if char in _SIMPLE_ESCAPES else "\\\\")
            return at + 1 if char in _SIMPLE_ESCAPES else at
        if len(pending) > 1 and char not in _HEX:
            self._pending = ""
            self._flush_high(out)
            out.append("\\" + pending)
            return at
        self._pending += char
        if len(self._pending) == 6:
            self._unit(self._pending, out)
            self._pending = ""
        return at + 1

    def _unit(self, escape: str, out: list[str]) -> None:
        code = int(escape[2:], 16)
        if 0xDC00 <= code < 0xE000:
            out.append(self._high + escape if self._high else "\\ufffd")
            self._high = ""
            return
        self._flush_high(out)
        if 0xD800 <= code < 0xDC00:
            self._high = escape
        else:
            out.append(escape)

    def _flush_high(self, out: list[str]) -> None:
        if self._high:
            out.append("\\ufffd")
            self._high = ""

    # ---- after a failure --------------------------------------------------------------------------------------------

    def _fail(self, at: int) -> int:
        self.failed = True
        return at

    def _track(self, text: str, at: int) -> None:
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            run = _QUOTED_RUN.match(text, at)
            if run:
                at = run.end()
                continue
            if text[at] == '"':
                self.in_string = not self.in_string
            else:
                self._escaped = self.in_string
            at += 1
