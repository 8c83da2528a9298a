"""The one reader of DSML tags, for finished text and for text that is still growing.

A tag is `<`, maybe `/`, a marker, a word, attributes, `>`. The marker is `｜DSML｜`; also read are the spellings that
models slip into: the first bar missing, ASCII bars, doubled bars, and no marker at all (plain XML). Attribute values
may stand in typographic quotes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

MARK = "｜DSML｜"
PARAMETER_END = f"</{MARK}parameter>"
ESCAPED_PARAMETER_END = "&lt;" + PARAMETER_END[1:]
SPACE = " \t\r\n\v\f"
# A tag longer than this is not one: what is held back while it grows has to be bounded.
MAX_TAG = 1024

_MARKER = "[｜|]{0,2}DSML[｜|]{1,2}"
_WORDS = ("tool_calls", "invoke", "parameter")
_DOUBLE = "“”„‟″"
_SINGLE = "‘’"


def _prefixes(word: str) -> str:
    return "|".join(sorted({word[:n] for n in range(1, len(word) + 1)}, key=len, reverse=True))


_ANY_PREFIX = "|".join(_prefixes(word) for word in _WORDS)
_HEAD = re.compile(f"<(/?)({_MARKER})?({'|'.join(_WORDS)})(?=(.))", re.DOTALL)
_MARKER_PREFIX = "[｜|]{0,2}(?:D|DS|DSM|DSML)?"
_PARTIAL_HEAD = re.compile(f"</?(?:{_MARKER_PREFIX}|(?:{_MARKER})?(?:{_ANY_PREFIX})?)")
_PARTIAL_CLOSE = re.compile(f"<(?:/(?:{_MARKER_PREFIX}|{_MARKER}(?:{_prefixes('parameter')})?))?")
_LOOSE_CLOSE = re.compile(f"</{_MARKER}parameter>")
_LONGEST_CLOSE = len("</｜｜DSML｜｜parameter>")

BLOCK_TAG = re.compile(f"<(/?)({_MARKER})?tool_calls>")
INVOKE_HEAD = re.compile(f"<({_MARKER})?invoke[\\s>]")
# The end of a text that may be the start of a tag with a marker, or of a plain block tag.
_PARTIAL_PLAIN = _prefixes("tool_calls")
_PARTIAL_MARKED = f"{_MARKER}(?:{_ANY_PREFIX}|(?:{'|'.join(_WORDS)})\\s[^<>]*)?"
_HELD_TAG = re.compile(f"</?(?:{_MARKER_PREFIX}|{_PARTIAL_MARKED}|{_PARTIAL_PLAIN})")
_HELD_INVOKE = re.compile(f"<(?:{_prefixes('invoke')}|invoke\\s[^<>]*)")
_HAS_MARKER = re.compile("</?[｜|]|</?DSML[｜|]")

_VALUE = f"\"[^\"]*\"|'[^']*'|[{_DOUBLE}][^{_DOUBLE}\"]*[{_DOUBLE}\"]|[{_SINGLE}][^{_SINGLE}']*[{_SINGLE}']"
_ATTRIBUTE = re.compile(f"(?:^|\\s)([A-Za-z_][\\w-]*)\\s*=\\s*({_VALUE})")
_WELL_FORMED = re.compile(f"(?:\\s+[A-Za-z_][\\w-]*\\s*=\\s*(?:{_VALUE}))*\\s*")
_WHOLE_ATTRIBUTES = re.compile(_WELL_FORMED.pattern + ">")
_CANONICAL = re.compile(r'\s+name="(.*?)"(?:\s+string="(true|false)")?\s*', re.DOTALL)
_CANONICAL_END = re.compile(_CANONICAL.pattern + ">", re.DOTALL)
_ENTITY = re.compile("&(amp|lt|gt|quot|apos);")
_ENTITIES = (("amp", "&"), ("lt", "<"), ("gt", ">"), ("quot", '"'), ("apos", "'"))


class Grow(Enum):
    """The text may become a tag when it grows."""

    MORE = 0


@dataclass(frozen=True, slots=True)
class Tag:
    """A complete tag.

    Attributes:
        word: `tool_calls`, `invoke` or `parameter`.
        closing: whether it is `</...>`.
        plain: written without the marker.
        exact: written with exactly the marker `｜DSML｜`.
        end: index behind its `>`.
        name: the `name` attribute, None if absent.
        string: the `string` attribute, None if absent or neither true nor false.
    """

    word: str
    closing: bool
    plain: bool
    exact: bool
    end: int
    name: str | None = None
    string: bool | None = None


def read_tag(text: str, start: int, decode: bool = False) -> Tag | Grow | None:
    """Read the tag at `start`: a Tag, None if there is none, or Grow.MORE if more text is needed to know.

    `decode` says whether entities in attribute values are decoded.
    """
    head = _HEAD.match(text, start)
    if head is None:
        if len(text) - start > 32:
            return None
        return Grow.MORE if _PARTIAL_HEAD.fullmatch(text, start) else None
    slash, marker, word, following = head.groups()
    closing, plain, exact = bool(slash), marker is None, marker == MARK
    at = head.end()
    if following == ">":
        return Tag(word, closing, plain, exact, at + 1)
    if following not in SPACE:
        return None
    if closing or word == "tool_calls":
        rest = text[at : start + MAX_TAG].lstrip(SPACE)
        if not rest:
            return Grow.MORE if len(text) < start + MAX_TAG else None
        return Tag(word, closing, plain, exact, text.index(">", at) + 1) if rest[0] == ">" else None
    end = _tag_end(text, at, start + MAX_TAG)
    if not isinstance(end, int):
        return end
    name, string = _attributes(text[at : end - 1], decode)
    return Tag(word, closing, plain, exact, end, name, string)


def _tag_end(text: str, start: int, limit: int) -> int | Grow | None:
    """Return the index behind the `>` that ends a tag whose attributes start at `start`.

    A name may hold `>` as nothing escapes it, so the end is the first one that leaves whole attributes before it. If
    there is none on the line, quotes are missing, and the first `>` counts.
    """
    first = text.find(">", start, limit)
    line = -1 if first < 0 else text.find("\n", first, limit)
    # One pass over the text, not one for each `>` in a name: this runs again with every token that makes a tag grow.
    matches = [match for pattern in (_WHOLE_ATTRIBUTES, _CANONICAL_END) if (match := pattern.match(text, start, limit))]
    end = min((match.end() for match in matches), default=0)
    if end and (line < 0 or end <= line):
        return end
    if first >= 0 and (line >= 0 or len(text) >= limit):
        return first + 1
    return None if len(text) >= limit else Grow.MORE


def _attributes(text: str, decode: bool) -> tuple[str | None, bool | None]:
    if not _WELL_FORMED.fullmatch(text):
        # A name with a quote inside, written as it is.
        canonical = _CANONICAL.fullmatch(text)
        if canonical:
            name, flag = canonical.groups()
            return (_decode(name) if decode else name), None if flag is None else flag == "true"
    found: dict[str, str] = {}
    for key, value in _ATTRIBUTE.findall(text):
        found.setdefault(key, value[1:-1])
    name = found.get("name")
    flag = {"true": True, "false": False}.get(found.get("string", "").strip().lower())
    return (_decode(name) if decode and name is not None else name), flag


def _decode(text: str) -> str:
    entities = dict(_ENTITIES)
    return _ENTITY.sub(lambda match: entities[match.group(1)], text)


def held_tag(text: str, invokes: bool) -> int:
    """Return from where on the end of a text has to wait, as it may become a tag; len(text) if nothing has to.

    `invokes`: whether a plain `<invoke` counts as well.
    """
    at = text.rfind("<", max(0, len(text) - MAX_TAG))
    if at < 0 or text.find(">", at) >= 0:
        return len(text)
    if _HELD_TAG.fullmatch(text, at) or (invokes and _HELD_INVOKE.fullmatch(text, at)):
        return at
    return len(text)


def without_cut_tag(text: str) -> str:
    """Return a text that ended too early without the piece of a marked tag at its end."""
    at = held_tag(text, invokes=False)
    return text[:at] if at < len(text) and _HAS_MARKER.match(text, at) else text


@dataclass(frozen=True, slots=True)
class BodyEnd:
    """Finds the end of a parameter's value.

    A tag with the exact marker is closed only by its exact twin, so that a value may quote any other spelling. Only a
    tag that is itself misspelt is closed by any spelling with a marker.
    """

    plain: bool
    exact: bool
    decode: bool

    def find(self, text: str, start: int = 0) -> tuple[int, int] | None:
        """Return start and end of the first closing tag behind `start`, if it is there."""
        if self.plain or self.exact:
            closer = "</parameter>" if self.plain else PARAMETER_END
            at = text.find(closer, start)
            return None if at < 0 else (at, at + len(closer))
        match = _LOOSE_CLOSE.search(text, start)
        return match.span() if match else None

    def held(self, text: str) -> int:
        """Return from where on the end of the text may be the start of a closing tag or of an escape."""
        tail = max(0, len(text) - _LONGEST_CLOSE)
        at = text.rfind("<", tail)
        if at >= 0:
            piece = text[at:]
            if self.plain or self.exact:
                hold = ("</parameter>" if self.plain else PARAMETER_END).startswith(piece)
            else:
                hold = _PARTIAL_CLOSE.fullmatch(piece) is not None
            if hold:
                return at
        if self.decode:
            at = text.rfind("&", max(0, len(text) - len(ESCAPED_PARAMETER_END) + 1))
            if at >= 0 and ESCAPED_PARAMETER_END.startswith(text[at:]):
                return at
        return len(text)

    def unescape(self, text: str) -> str:
        """Undo the escape of a string value."""
        return text.replace(ESCAPED_PARAMETER_END, PARAMETER_END) if self.decode else text


def markers(block: str) -> list[tuple[int, int]]:
    """Return where the tags of a whole block have their markers `｜DSML｜`: ranges (start, end), in order.

    Names, values and spaces between tags may hold the same characters; those are not markers. Of text that does not
    follow the grammar only the tags before it count.
    """
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(block):
        if block[at] in SPACE:
            at += 1
            continue
        tag = read_tag(block, at)
        if not isinstance(tag, Tag):
            break
        found += _marker(block, at)
        at = tag.end
        if tag.word != "parameter" or tag.closing or _begins_nested(block, tag):
            continue
        end = BodyEnd(tag.plain, tag.exact, decode=False).find(block, at)
        if end is None:
            break
        found += _marker(block, end[0])
        at = end[1]
    return found


def _marker(block: str, tag_start: int) -> list[tuple[int, int]]:
    head = _HEAD.match(block, tag_start)
    at = -1 if head is None else block.find(MARK, tag_start, head.end())
    return [] if at < 0 else [(at, at + len(MARK))]


def _begins_nested(block: str, outer: Tag) -> bool:
    """Whether a parameter that does not say what it holds begins with another one."""
    if outer.string is not None:
        return False
    at = outer.end
    while at < len(block) and block[at] in SPACE:
        at += 1
    tag = read_tag(block, at)
    return isinstance(tag, Tag) and tag.word == "parameter" and not tag.closing and tag.plain == outer.plain
