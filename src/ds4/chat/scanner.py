"""Reads a generation as it grows: where the reasoning ends, what is text, what is a tool call.

Everything that interprets sampled text is this one machine: the final parse feeds it the whole text, the stream feeds
it pieces, and the decode state asks it where it stands. It looks at every character once; what it holds back is
bounded by the length of a tag, except for white space, which may turn out to belong to a block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ds4.chat.arguments import CallWriter, Value
from ds4.chat.events import Event, Problem, ReasoningDelta
from ds4.chat.message import Message
from ds4.chat.states import Phase, State
from ds4.chat.stops import StopFilter
from ds4.chat.tags import (
    BLOCK_TAG,
    INVOKE_HEAD,
    SPACE,
    BodyEnd,
    Grow,
    Tag,
    held_tag,
    read_tag,
    without_cut_tag,
)
from ds4.chat.text_writer import TextWriter

_THINK, _END_THINK = "<think>", "</think>"
# Deeper than this nobody nests parameters.
_MAX_NESTING = 32
# Long texts are read in steps of this many characters, so that cutting tags off the front stays cheap.
_STEP = 4096


class Scanner:
    """The state machine; `feed` and `finish` return events, `message` what they add up to.

    Args:
        thinking: the prompt ended inside reasoning.
        tools: names of the active tools; None or empty: nothing is a tool call.
        decode: names and values are escaped (template profile ds4).
        recovered: the reasoning was closed for the model (see `recover`).
        parallel: whether more than one call is wanted; if not, the machine is done after the first.
        stops: ends the answer early, if one of them occurs in its text or in a value that is a string. Reasoning, tags,
            and the white space around tags are not looked at.
        keep: collect the message (the decode state needs none).
        hold: wait at a marked block that cannot be read and has no call yet, until `give_up` makes it text.
        forced: a block has to come first: white space that nothing follows is the begin of one.
        verbatim: the text is no answer of the chat format: nothing is reasoning, not even behind a `<think>`.

    Attributes:
        reasoning_closed: the end of the reasoning was seen, or there was none.
        saw_start, saw_end: a block began; its end tag was seen.
        dangling_start: a complete start tag stands in the reasoning.
        orphan_closers: number of end tags outside any block.
        failed: the block has calls that cannot be read.
    """

    def __init__(
        self,
        thinking: bool = True,
        tools: Collection[str] | None = None,
        *,
        decode: bool = False,
        recovered: bool = False,
        parallel: bool = True,
        stops: StopFilter | None = None,
        keep: bool = True,
        hold: bool = False,
        forced: bool = False,
        verbatim: bool = False,
    ) -> None:
        self.reasoning_closed = not thinking
        self.saw_start = False
        self.saw_end = False
        self.dangling_start = False
        self.orphan_closers = 0
        self.failed = False
        self._phase = Phase.TEXT if verbatim else Phase.START
        self._tools = frozenset(tools or ())
        self._thinking = thinking
        self._decode = decode
        self._recovered = recovered
        self._parallel = parallel
        self._keep = keep
        self._hold = hold
        self._flushed = False
        self._buffer = ""
        self._space: list[str] = []  # white space that is text or part of a block, whatever follows
        self._events: list[Event] = []
        self._reasoning: list[str] = []
        self._raw: list[str] = []
        self._problems: list[str] = []
        self._plain = False  # the block's tags have no marker
        self._bare = False  # calls without a block around them
        self._cut = False  # ended by `parallel`, so the block has no end
        self._repaired = False
        self._writing = TextWriter(self._events.append, keep, stops, forced)
        self._writer = CallWriter(self._events.append, keep)
        self._value: Value | None = None

    # ---- what callers ask -------------------------------------------------------------------------------------------

    @property
    def in_reasoning(self) -> bool:
        return self._phase is Phase.REASONING or (self._phase is Phase.START and self._thinking)

    @property
    def calls_begun(self) -> int:
        return self._writer.begun

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._writing.stop_string

    @property
    def finished_calls(self) -> bool:
        """Whether the block is over, so that nothing of what may follow counts."""
        return self._phase is Phase.DONE

    @property
    def open_block(self) -> bool:
        """Whether a block has begun and its end is missing."""
        if self._phase is Phase.TAGS:
            return not self._bare or self._writer.depth > 0
        return self._phase is Phase.VALUE

    @property
    def malformed(self) -> bool:
        """Whether a marked block is no call, and that shows while nothing of it has left.

        It breaks the grammar before its first call (and is held back, see `hold`), or it is over without one, or
        `flush` said that nothing follows. Not so a block in plain XML: text that explains tags looks the same.
        """
        if self._phase is Phase.HELD:
            return self.stop_string is None
        cut = self._flushed and self.open_block and self.stop_string is None
        over = cut or self._phase is Phase.DONE
        return over and self.saw_start and not (self._plain or self._writer.begun)

    @property
    def state(self) -> State:
        value = self._value
        if self._phase is Phase.TAGS:
            return State.STRUCTURAL
        if self._phase is not Phase.VALUE or value is None:
            return State.OUTSIDE
        if self._buffer.startswith("</") or (value.undecided and len(self._buffer) > 1):
            return State.STRUCTURAL
        if not value.is_json:
            return State.STRING_BODY
        return State.JSON_STRING if value.in_string else State.JSON_STRUCTURAL

    def message(self) -> Message:
        """Return what was read so far."""
        calls = () if self.failed else tuple(self._writer.calls)
        exact = bool(calls) and not (self._cut or self._repaired or self.open_block)
        return Message(
            reasoning="".join(self._reasoning),
            content="".join(self._writing.content),
            tool_calls=calls,
            raw_dsml="".join(self._raw) if exact else "",
            problems=tuple(self._problems),
            reasoning_closed=self.reasoning_closed,
            complete=not (self._repaired or self.failed),
        )

    def block_text(self) -> str:
        """Return the text of the block that could not be read, with the white space before it."""
        return without_cut_tag("".join(self._raw) + self._buffer)

    def recover(self) -> None:
        """Note that the reasoning is being closed for the model, because it began a block inside.

        From then on the tags of a call count without the block around them, if a tool of that name is active.
        """
        self._recovered = True

    # ---- input ------------------------------------------------------------------------------------------------------

    def feed(self, text: str) -> list[Event]:
        """Read more text. Returns the events that are certain."""
        for at in range(0, len(text), _STEP):
            self._feed(text[at : at + _STEP])
        return self._take()

    def _feed(self, text: str) -> None:
        if self._phase is Phase.START:
            text = self._start(self._buffer + text)
        if self.in_reasoning:
            text = self._reason(self._buffer + text)
        if not self.in_reasoning and self._phase is not Phase.START:
            self._scan(text)

    def give_up(self) -> list[Event]:
        """Take a block that is held back as text after all, and hold none from now on."""
        self._hold = False
        if self._phase is Phase.HELD:
            self._give_up(self._problems[-1])
            self._scan("")
        return self._take()

    def flush(self) -> list[Event]:
        """Nothing follows: read what waited for a stop string. `finish` must come next, or `give_up` and `finish`."""
        self._flushed = True
        if not self.in_reasoning:
            if self._phase is Phase.START:
                self._phase = Phase.TEXT
                held, self._buffer = self._buffer, ""
                self._scan(held)
            self._pass_held()
        return self._take()

    def finish(self) -> list[Event]:
        """The generation is over. Returns the remaining events; an open call is closed with what is there."""
        self._events.extend(self.flush() + self.give_up())
        if self.open_block and self._plain and not self._writer.begun:
            self._fail("the text ended at the start of a tool call")
        rest = without_cut_tag(self._buffer) if self._tools else self._buffer
        if self.in_reasoning:
            self.reasoning_closed = False
            self._emit_reasoning(rest)
        elif self._phase is Phase.TEXT:
            self._writing.write_last("".join(self._space) + rest)
        elif self.failed:
            self._consume(len(self._buffer))
        elif self.open_block:
            self._repair()
        elif not self._writer.begun:
            self._problems.append("a tool call block without a call")
        self._buffer = ""
        self._space.clear()
        self._phase = Phase.DONE
        return self._take()

    def _take(self) -> list[Event]:
        events = self._events.copy()
        self._events.clear()  # the list itself is shared with the writer
        return events

    # ---- reasoning --------------------------------------------------------------------------------------------------

    def _start(self, text: str) -> str:
        """Drop a `<think>` at the very start, which some checkpoints repeat; it opens reasoning in any mode."""
        self._buffer = ""
        if text.startswith(_THINK):
            text = text[len(_THINK) :]
            self._thinking = True
            self.reasoning_closed = False
        elif _THINK.startswith(text):
            self._buffer = text
            return ""
        self._phase = Phase.REASONING if self._thinking else Phase.TEXT
        return text

    def _reason(self, text: str) -> str:
        """Read reasoning; returns the text behind its end."""
        if self._phase is Phase.START:
            return ""
        end = text.find(_END_THINK)
        if end >= 0:
            self._buffer = ""
            self._emit_reasoning(text[:end])
            self.reasoning_closed = True
            self._phase = Phase.TEXT
            return text[end + len(_END_THINK) :]
        hold = len(text)
        at = text.rfind("<", max(0, hold - len(_END_THINK) + 1))
        if at >= 0 and _END_THINK.startswith(text[at:]):
            hold = at
        elif self._tools:
            hold = held_tag(text, invokes=False)
        self._buffer = text[hold:]
        self._emit_reasoning(text[:hold])
        return ""

    def _emit_reasoning(self, text: str) -> None:
        if not text:
            return
        if self._tools and not self.dangling_start:
            # A tag is never split here, as its beginning is held back.
            self.dangling_start = any(not match.group(1) for match in BLOCK_TAG.finditer(text))
        self._events.append(ReasoningDelta(text))
        if self._keep:
            self._reasoning.append(text)

    # ---- text -------------------------------------------------------------------------------------------------------

    def _scan(self, text: str) -> None:
        if self.stop_string is not None:
            return
        if not self._tools:
            self._emit_text(text)
            return
        self._buffer += text
        steps: dict[Phase, Callable[[], bool]] = {
            Phase.TEXT: self._text,
            Phase.TAGS: self._tags,
            Phase.VALUE: self._read_value,
            Phase.HELD: lambda: False,
            Phase.DONE: self._ignore,
        }
        while self._buffer and steps[self._phase]():
            pass

    def _emit_text(self, text: str) -> None:
        self._writing.write(text)
        self._end_at_stop()

    def _pass_held(self) -> None:
        """Let go what was held back as it could have become a stop string: as text, or as a value."""
        if self._value is None:
            self._writing.write_held()
        else:
            self._feed_value(self._value, self._writing.held())
        self._end_at_stop()

    def _end_at_stop(self) -> None:
        if self.stop_string is not None:
            # Nothing behind it counts.
            self._buffer = ""
            self._space.clear()
            if not self._writer.begun:
                self._phase = Phase.TEXT

    def _pass_text(self, end: int) -> None:
        """Emit the buffer up to `end`, but keep white space there: it belongs to the block if one follows."""
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        solid = text.rstrip(SPACE)
        if solid:
            self._emit_text("".join(self._space) + solid)
            self._space.clear()
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])

    def _text(self) -> bool:
        buffer = self._buffer
        block = BLOCK_TAG.search(buffer)
        invoke = INVOKE_HEAD.search(buffer) if self._recovered else None
        if invoke and (not block or invoke.start() < block.start()):
            tag = read_tag(buffer, invoke.start(), self._decode)
            if isinstance(tag, Grow):
                self._pass_text(invoke.start())
                return False
            if tag and tag.name in self._tools:
                self._open_block(invoke.start(), tag, bare=True)
            else:
                self._pass_text(tag.end if tag else invoke.end())
            return True
        if block and not block.group(1):
            tag = read_tag(buffer, block.start())
            if isinstance(tag, Tag):
                self._open_block(block.start(), tag, bare=False)
                return True
        if block:
            # An end without a start means nothing.
            self.orphan_closers += 1
            self._pass_text(block.end())
            return True
        self._pass_text(held_tag(buffer, invokes=self._recovered))
        return False

    def _open_block(self, start: int, tag: Tag, bare: bool) -> None:
        self._pass_text(start)
        if self.stop_string is not None:
            return
        self._raw = self._space
        self._space = []
        self._plain = tag.plain
        self._bare = bare
        self.saw_start = True
        self._phase = Phase.TAGS
        if not bare:
            self._consume(tag.end - start)

    # ---- tags -------------------------------------------------------------------------------------------------------

    def _consume(self, end: int) -> str:
        taken, self._buffer = self._buffer[:end], self._buffer[end:]
        if self._keep:
            self._raw.append(taken)
        return taken

    def _tags(self) -> bool:
        buffer = self._buffer
        start = len(buffer) - len(buffer.lstrip(SPACE))
        if start:
            if self._bare and not self._writer.depth:
                # Behind a bare call: part of the block only if another tag follows.
                self._space.append(buffer[:start])
                self._buffer = buffer[start:]
            else:
                self._consume(start)
            return True
        tag = read_tag(buffer, 0, self._decode)
        if isinstance(tag, Grow):
            return False
        ended = self._bare and not self._writer.depth and not self.failed
        if tag and tag.plain == self._plain and not (ended and tag.word == "tool_calls" and not tag.closing):
            self._raw.extend(self._space)
            self._space.clear()
            self._consume(tag.end)
            self._take_tag(tag)
        elif ended:
            # One block a turn: calls in a block behind bare ones would be made twice.
            self._phase = Phase.DONE
        else:
            self._fail("text between the tags of a tool call")
            if self.failed:
                # Only a recogniser from here on: skip to what may be the next tag.
                following = buffer.find("<", 1)
                self._consume(len(buffer) if following < 0 else following)
        return True

    def _take_tag(self, tag: Tag) -> None:
        self._pass_held()
        if self.stop_string is not None:
            return
        writer = self._writer
        if tag.word == "tool_calls":
            if writer.depth:
                self._fail(f"a tool call block ended or began inside the call of {writer.name!r}")
            elif not tag.closing:
                self._fail("a tool call block began inside another")
            if tag.closing and self._plain and not writer.begun:
                self._fail("a tool call block without a call")
            elif tag.closing:
                self.saw_end = True
                self._phase = Phase.DONE
        elif tag.word == "invoke":
            if not tag.closing:
                self._begin_call(tag)
            elif writer.depth:
                writer.end()
                if not self._parallel:
                    self._cut = True
                    self._phase = Phase.DONE
            else:
                self._fail("the end of a call that did not begin")
        elif not tag.closing:
            self._begin_parameter(tag)
        elif writer.depth > 1:
            writer.close_object()
        else:
            self._fail("the end of a parameter that did not begin")

    def _begin_call(self, tag: Tag) -> None:
        if self._writer.depth:
            self._fail(f"a call began inside the call of {self._writer.name!r}")
        elif tag.name is None:
            self._fail("a call without the name of a tool")
        elif not self.failed:
            self._writer.begin(tag.name)

    def _begin_parameter(self, tag: Tag) -> None:
        writer = self._writer
        if not writer.depth:
            self._fail("a parameter outside a call")
            if not self.failed:
                return
        elif tag.name is None:
            self._fail(f"a parameter without a name in the call of {writer.name!r}")
        elif writer.depth > _MAX_NESTING:
            self._fail("parameters nested too deeply")
        name = tag.name or ""
        if not self.failed:
            writer.key(name)
        self._value = Value(name, BodyEnd(tag.plain, tag.exact, self._decode), tag.string, writer.write)
        self._phase = Phase.VALUE

    # ---- values -----------------------------------------------------------------------------------------------------

    def _read_value(self) -> bool:
        value = self._value
        if value is None:
            raise RuntimeError("the scanner reads a value without having begun one")
        if value.undecided:
            return self._decide(value)
        found = value.end.find(self._buffer)
        if found is None:
            hold = value.end.held(self._buffer)
            if hold:
                self._value_text(value, self._consume(hold))
            return False
        start, end = found
        text, rest = self._buffer[:start], self._buffer
        self._value_text(value, text)
        if self.stop_string is None:
            self._pass_held()
        if self.stop_string is not None:
            return False
        self._buffer = rest
        self._consume(end)
        was_text = value.as_text
        if not value.finish():
            self._fail(f"the parameter {value.name!r} of {self._writer.name!r} is not complete JSON")
        self._note_text(value, was_text)
        self._value = None
        self._phase = Phase.TAGS
        return True

    def _value_text(self, value: Value, text: str) -> None:
        # The syntax of JSON is no text, and clients get it without its white space.
        self._feed_value(value, text if value.is_json else self._writing.cut(text))
        self._end_at_stop()

    def _feed_value(self, value: Value, text: str) -> None:
        if not text:
            return
        was_text = value.as_text
        if not value.feed(text):
            self._fail(f"the parameter {value.name!r} of {self._writer.name!r} is not JSON")
        self._note_text(value, was_text)

    def _note_text(self, value: Value, was_text: bool) -> None:
        if value.as_text and not was_text and not self.failed:
            place = f"the parameter {value.name!r} of {self._writer.name!r}"
            self._problems.append(f"{place} is not JSON: taken as a string")

    def _decide(self, value: Value) -> bool:
        """Find out what a value without `string` is: a string, or nested parameters, which make one JSON object."""
        space = len(self._buffer) - len(self._buffer.lstrip(SPACE))
        if space:
            value.hold(self._consume(space))
            return True
        tag = read_tag(self._buffer, 0)
        if isinstance(tag, Grow):
            return False
        if tag and tag.word == "parameter" and not tag.closing and tag.plain == self._plain:
            self._value = None
            self._phase = Phase.TAGS
            if not self.failed:
                self._writer.open_object()
        else:
            value.decide_string()
        return True

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _ignore(self) -> bool:
        """What follows a block is dropped."""
        self._buffer = ""
        return False

    def _fail(self, message: str) -> None:
        """The block cannot be read. If a call of it has left, it is followed to its end, and else it is text."""
        if self.failed:
            return
        self._problems.append(message)
        if not self._writer.begun:
            if self._hold and not self._plain:
                self._pass_held()
                self._phase = Phase.HELD
            else:
                self._give_up(message)
            return
        self.failed = True
        self._close_call()
        self._events.append(Problem(message, streamed=True))
        self._writer.muted = True

    def _close_call(self) -> None:
        """Close the JSON of the open call, so that what was streamed can be read."""
        if self._writer.depth:
            if self._value is not None:
                self._value.close()
            self._writer.end()

    def _repair(self) -> None:
        """The generation ended inside a block: close what is open, or drop a block without any call.

        At a stop string the open call is dropped as well: it was not the model that ended it.
        """
        stopped = self.stop_string is not None
        self._repaired = True
        if not self._writer.begun:
            self._problems.append("the text ended at the start of a tool call")
            return
        if stopped:
            self._problems.append("a stop string ended the text inside a tool call")
        else:
            self._problems.append("the text ended inside a tool call, which was closed")
        if self._value is not None:
            self._value.cut(self._buffer)
        if self._writer.depth:
            self._writer.end(drop=stopped)

    def _give_up(self, message: str) -> None:
        """What was read of the block is text, and so is what follows, unless another block begins there."""
        self._events.append(Problem(message, streamed=False))
        block = "".join(self._raw)
        self._raw = []
        self._phase = Phase.TEXT
        self._buffer = block + self._buffer
        self._pass_text(len(block))
