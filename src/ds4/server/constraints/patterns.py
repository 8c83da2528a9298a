"""Regular expressions of schemas, which are those of ECMA-262, in the dialect that grammars are made of.

Grammars match whole strings, know no anchors, and read classes, escapes and flags as Rust's `regex` does. So a pattern
is read here and written anew: characters as code points, and what may stand before and behind a match spelled out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from llguidance import LLMatcher

from ds4.server.constraints.rules import SchemaError

_LAST = 0x10FFFF
_MAX_DEPTH = 64
_MAX_REPEAT = 100_000
_NEVER = "[a&&b]"
_META = frozenset("\\.+*?()|[]{}^$&~-#")

Ranges = Sequence[tuple[int, int]]

_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = (*_DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = (
    (0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_LINE_END: Ranges = ((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029))
_CONTROLS = {"t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD, "0": 0}
_REPEAT = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
_FLAGS = re.compile(r"\?([is]*):")
_NAMED = re.compile(r"\?P?<[A-Za-z_]\w*>")
_LOOK = ("?=", "?!", "?<=", "?<!")


def whole(pattern: object, where: str, *, nul: bool = True) -> str:
    """The pattern of the whole strings in which a pattern is found.

    Args:
        pattern: what a schema gives.
        where: the place in the schema, for errors.
        nul: whether a string may hold U+0000.

    Raises:
        SchemaError: it is none of ECMA-262, or has what a grammar cannot do: lookaround, references, word boundaries,
            anchors inside it.
    """
    if not isinstance(pattern, str):
        raise SchemaError(f"{where}: pattern must be a string")
    reader = _Reader(pattern, where)
    return _Writer(reader, nul).alternatives(reader.read(), _Edge.OPEN, _Edge.OPEN)


@dataclass
class _Class:
    """One character: of these ranges or properties, or (negated) of none of them."""

    ranges: Ranges
    properties: Sequence[str] = ()
    negated: bool = False


@dataclass
class _Group:
    """Alternatives in parentheses; `flags` hold inside."""

    alternatives: list[_Sequence] = field(default_factory=list)
    flags: str = ""


@dataclass
class _Sequence:
    """Items one after the other, each with its repetition as text; anchors at the begin and the end."""

    items: list[tuple[_Class | _Group, str]] = field(default_factory=list)
    begin: bool = False
    end: bool = False


class _Reader:
    """Reads the syntax of ECMA-262."""

    def __init__(self, pattern: str, where: str) -> None:
        self._text, self._where, self._at = pattern, where, 0

    def wrong(self, why: str) -> SchemaError:
        """An error about the pattern."""
        shown = self._text if len(self._text) <= 200 else self._text[:200] + "..."
        return SchemaError(f"{self._where}: the pattern {shown!r} {why}".removeprefix(": "))

    def read(self) -> list[_Sequence]:
        """All of the pattern."""
        flags = ""
        if found := re.match(r"\(\?([is]+)\)", self._text):
            flags, self._at = found[1], found.end()
        read = self._alternatives(0, "s" in flags)
        if self._at < len(self._text):
            raise self.wrong("cannot be read: it closes a group that is not open")
        return [_Sequence([(_Group(read, "i"), "")])] if "i" in flags else read

    def _alternatives(self, depth: int, dot_all: bool) -> list[_Sequence]:
        if depth > _MAX_DEPTH:
            raise self.wrong(f"has groups nested deeper than {_MAX_DEPTH} levels")
        found = [_Sequence()]
        while self._at < len(self._text) and self._text[self._at] != ")":
            char = self._text[self._at]
            self._at += 1
            now = found[-1]
            if char == "|":
                found.append(_Sequence())
            elif char == "^":
                if now.items:
                    raise self.wrong("has an anchor in the middle, which is not supported")
                now.begin = True
            elif char == "$":
                now.end = True
            else:
                if now.end:
                    raise self.wrong("has an anchor in the middle, which is not supported")
                item = self._item(char, depth, dot_all)
                now.items.append((item, self._repetition()))
        return found

    def _item(self, char: str, depth: int, dot_all: bool) -> _Class | _Group:
        if char == "(":
            return self._group(depth, dot_all)
        if char == "[":
            return self._class()
        if char == ".":
            return _Class(() if dot_all else _LINE_END, negated=True)
        if char in "*+?" or (char == "{" and _REPEAT.match(self._text, self._at - 1)):
            raise self.wrong(f"cannot be read: {char!r} has nothing to repeat")
        return self._escape(False) if char == "\\" else _one(char)

    def _group(self, depth: int, dot_all: bool) -> _Group:
        flags = ""
        if self._text.startswith(_LOOK, self._at):
            raise self.wrong("has lookaround, which is not supported")
        if found := _FLAGS.match(self._text, self._at):
            flags, self._at = found[1], found.end()
        elif found := _NAMED.match(self._text, self._at):
            self._at = found.end()
        elif self._text.startswith("?", self._at):
            raise self.wrong("has a group '(?...' of a kind that is not supported")
        group = _Group(self._alternatives(depth + 1, dot_all or "s" in flags), "i" if "i" in flags else "")
        if not self._text.startswith(")", self._at):
            raise self.wrong("cannot be read: it has a group without an end")
        self._at += 1
        return group

    def _repetition(self) -> str:
        """How often the last item comes."""
        text = ""
        if self._text.startswith(("*", "+", "?"), self._at):
            text = self._text[self._at]
            self._at += 1
        elif found := _REPEAT.match(self._text, self._at):
            low, high = int(found[1]), int(found[3]) if found[3] else None
            if high is not None and high < low:
                raise self.wrong(f"cannot be read: {found[0]!r} has its numbers in the wrong order")
            if max(low, high or 0) > _MAX_REPEAT:
                raise self.wrong(f"repeats something more than {_MAX_REPEAT} times, which is not supported")
            text, self._at = found[0], found.end()
        # Which of several matches is found makes no difference.
        if text and self._text.startswith("?", self._at):
            self._at += 1
        return text

    def _class(self) -> _Class:
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges: list[tuple[int, int]] = []
        properties: list[str] = []
        while True:
            first = self._member()
            if first is None:
                return _Class(ranges, properties, negated)
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                first = self._range(first, self._member())
            ranges += first.ranges
            properties += first.properties

    def _range(self, first: _Class, second: _Class | None) -> _Class:
        """What `first-second` means in a class: beside an escape of several characters the `-` is one of them."""
        if second is None:
            raise self.wrong("cannot be read: it has a class without an end")
        low, high = _single(first), _single(second)
        if low is None or high is None:
            return _Class((*first.ranges, (0x2D, 0x2D), *second.ranges), (*first.properties, *second.properties))
        if high < low:
            raise self.wrong("cannot be read: a class has a range without two characters in their order")
        return _Class(((low, high),))

    def _member(self) -> _Class | None:
        """The next character or escape of a class; None: its end."""
        if self._at >= len(self._text):
            raise self.wrong("cannot be read: it has a class without an end")
        char = self._text[self._at]
        self._at += 1
        if char == "]":
            return None
        return self._escape(True) if char == "\\" else _one(char)

    def _escape(self, in_class: bool) -> _Class:
        """What stands behind a backslash."""
        char = self._text[self._at : self._at + 1]
        self._at += 1
        if char.lower() in ("d", "w", "s") and char:
            ranges = {"d": _DIGIT, "w": _WORD, "s": _SPACE}[char.lower()]
            return _Class(_rest(ranges) if char.isupper() else ranges)
        if char in ("p", "P") and (found := re.match(r"\{[\w=]+\}", self._text[self._at :])):
            self._at += found.end()
            if not _is_property(found[0]):
                raise self.wrong(f"has the unknown property '\\{char}{found[0]}'")
            return _Class((), (f"\\{char}{found[0]}",))
        if char in _CONTROLS and not (char == "0" and self._text[self._at : self._at + 1].isdecimal()):
            return _one(chr(_CONTROLS[char]))
        if char == "b" and in_class:
            return _one("\b")
        if char == "c" and (letter := self._text[self._at : self._at + 1]) and letter.isascii() and letter.isalpha():
            self._at += 1
            return _one(chr(ord(letter) % 32))
        if char in ("x", "u"):
            return _one(self._code(char))
        if char and not (char.isascii() and char.isalnum()):
            return _one(char)
        names = {"b": "a word boundary", "B": "a word boundary", "k": "a reference to a group", "": "no end"}
        name = "a reference to a group" if char.isdecimal() and char != "0" else names.get(char)
        raise self.wrong(f"has {name}, which is not supported" if name else f"has '\\{char}', which ECMA-262 has not")

    def _code(self, kind: str) -> str:
        """The character that hexadecimal digits name."""
        wanted = r"\{([0-9A-Fa-f]+)\}|([0-9A-Fa-f]{4})" if kind == "u" else r"\{([0-9A-Fa-f]+)\}|([0-9A-Fa-f]{2})"
        found = re.compile(wanted).match(self._text, self._at)
        code = int(found[1] or found[2], 16) if found else _LAST + 1
        if found is None or code > _LAST:
            raise self.wrong(f"cannot be read: '\\{kind}' needs the number of a character")
        self._at = found.end()
        if 0xD800 <= code < 0xDC00 and (low := re.compile(r"\\u(d[c-f][0-9a-f]{2})", re.I).match(self._text, self._at)):
            self._at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000:
            raise self.wrong("has half of a surrogate pair, which is no character")
        return chr(code)


class _Edge(Enum):
    """What is at a side of a part of the pattern."""

    OPEN = 0  # the string may go on there with anything, unless an anchor says that it does not
    END = 1  # the end of the string
    INNER = 2  # other parts of the pattern


class _Writer:
    """Writes what was read in the other dialect."""

    def __init__(self, reader: _Reader, nul: bool) -> None:
        self._reader, self._nul = reader, nul
        self._any = "(?s:.*)" if nul else r"[^\x00]*"

    def alternatives(self, sequences: Sequence[_Sequence], before: _Edge, behind: _Edge) -> str:
        """All that one of the sequences takes between these edges."""
        return "|".join(dict.fromkeys(self._sequence(one, before, behind) for one in sequences))

    def _sequence(self, sequence: _Sequence, before: _Edge, behind: _Edge) -> str:
        before, behind = self._anchored(sequence.begin, before), self._anchored(sequence.end, behind)
        items = sequence.items
        if not items:
            return self._any if _Edge.OPEN in (before, behind) else ""
        written = []
        for i, (item, times) in enumerate(items):
            left = before if i == 0 else _Edge.INNER
            right = behind if i == len(items) - 1 else _Edge.INNER
            if isinstance(item, _Group) and not times:
                # Anchors may stand inside it.
                written.append(f"(?{item.flags}:{self.alternatives(item.alternatives, left, right)})")
                continue
            text = self._class(item) if isinstance(item, _Class) else self._repeated(item)
            start = self._any if left is _Edge.OPEN else ""
            written.append(start + text + times + (self._any if right is _Edge.OPEN else ""))
        return "".join(written)

    def _repeated(self, group: _Group) -> str:
        return f"(?{group.flags}:{self.alternatives(group.alternatives, _Edge.INNER, _Edge.INNER)})"

    def _anchored(self, anchor: bool, edge: _Edge) -> _Edge:
        if anchor and edge is _Edge.INNER:
            raise self._reader.wrong("has an anchor in the middle, which is not supported")
        return _Edge.END if anchor else edge

    def _class(self, one: _Class) -> str:
        ranges = list(one.ranges)
        without_nul = not self._nul and bool(one.properties) and not one.negated
        if not self._nul:
            ranges = [*ranges, (0, 0)] if one.negated else [(max(low, 1), high) for low, high in ranges if high]
        code = _single(_Class(ranges, one.properties)) if not one.negated else None
        if code is not None:
            return _written(code)
        if not ranges and not one.properties:
            return "(?s:.)" if one.negated else _NEVER
        members = [_written(low) if low == high else f"{_written(low)}-{_written(high)}" for low, high in ranges]
        text = f"[{'^' if one.negated else ''}{''.join(members)}{''.join(one.properties)}]"
        return rf"[{text}--\x00]" if without_nul else text


@functools.cache
def _is_property(name: str) -> bool:
    """Whether there are such characters; `name` stands in braces."""
    return not LLMatcher.validate_grammar(rf"start: /[\p{name}]/")


def _one(char: str) -> _Class:
    return _Class(((ord(char), ord(char)),))


def _single(one: _Class) -> int | None:
    """The only character of a class, if it has only one."""
    if one.properties or len(one.ranges) != 1 or one.ranges[0][0] != one.ranges[0][1]:
        return None
    return one.ranges[0][0]


def _rest(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All characters but these, which are in order."""
    start, rest = 0, []
    for low, high in ranges:
        rest.append((start, low - 1))
        start = high + 1
    return [*rest, (start, _LAST)]


def _written(code: int) -> str:
    char = chr(code)
    if char in _META:
        return "\\" + char
    return char if char.isprintable() and (code > 0x7F or char != "/") else f"\\x{{{code:x}}}"
