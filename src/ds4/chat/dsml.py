"""DSML, the markup of tool calls: reading a finished generation, following a growing one, writing calls.

Grammar (`｜DSML｜` is one token of the vocabulary):

    block  := "<｜DSML｜tool_calls>" call* "</｜DSML｜tool_calls>"
    call   := "<｜DSML｜invoke" attributes ">" param* "</｜DSML｜invoke>"
    param  := "<｜DSML｜parameter" attributes ">" value "</｜DSML｜parameter>"

with white space between tags. A value is a string if its tag says `string="true"` or nothing, else JSON; it ends at
the first closing tag, also inside quotes.

Escapes. The official format has none: in profile `official` names and values mean exactly what they say, so
`&lt;/｜DSML｜parameter>` is those characters and a string that holds the closing tag itself cannot be written (the
bytes the model sampled are replayed, so this concerns only calls that are written anew). In profile `ds4` the `<` of a
closing tag inside a string is written `&lt;`, and only that sequence is read back; attributes have the five entities
of XML.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ds4.chat.dsml_text import calls_text, write_calls
from ds4.chat.message import Message
from ds4.chat.scanner import Scanner
from ds4.chat.states import State
from ds4.chat.tools import tool_schemas

__all__ = ["END_THINK_INJECTION", "DecodeState", "State", "calls_text", "parse", "tool_names", "write_calls"]

# What closes the reasoning for a model that began a tool call inside.
END_THINK_INJECTION = "</think>\n\n"

_GREEDY = frozenset({State.STRUCTURAL, State.JSON_STRUCTURAL})


def tool_names(tools: Sequence[Any] | Collection[str] | None) -> frozenset[str]:
    """Return the names of tools given in any API's shape, or of names (a set, or any collection of plain names)."""
    if not tools:
        return frozenset()
    names = [tool for tool in tools if isinstance(tool, str) and not tool.lstrip().startswith("{")]
    if len(names) == len(tools):
        return frozenset(names)
    return frozenset(schema.name for schema in tool_schemas(list(tools)))


def parse(
    text: str,
    thinking: bool = True,
    tools: Sequence[Any] | Collection[str] | None = None,
    *,
    profile: str = "official",
    recovered: bool = False,
) -> Message:
    """Return the message that a whole generation is.

    Args:
        text: the generated text behind the prompt, without the end-of-sentence marker.
        thinking: the prompt ended in `<think>`, so the text begins inside the reasoning.
        tools: the active tools, or their names. Without any, tags of tool calls are plain text.
        profile: the template profile, which says whether values are escaped.
        recovered: the reasoning was closed by END_THINK_INJECTION.

    Calls of a block that is cut off are completed (`complete` is False then and `raw_dsml` empty). A block that breaks
    the grammar is text: `content` holds it and `problems` says why. If it does so before its first call, what follows
    is read as if no block had begun. Never raises for what a model wrote.
    """
    scanner = Scanner(thinking, tool_names(tools), decode=profile == "ds4", recovered=recovered)
    scanner.feed(text)
    scanner.finish()
    message = scanner.message()
    if scanner.failed and scanner.calls_begun:
        # A stream has sent calls by now; here nothing is out, and the text says what the model meant.
        return replace(message, content=message.text + scanner.block_text())
    return message


class DecodeState:
    """Says after every token what kind of text comes next. Time is linear in what is pushed.

    Args:
        thinking: the prompt ended in `<think>`.
        tools: the active tools or their names; without any the state is always OUTSIDE.
        profile: the template profile.
        verbatim: nothing is reasoning (see `StreamParser`).
    """

    def __init__(
        self,
        thinking: bool = True,
        tools: Sequence[Any] | Collection[str] | None = None,
        *,
        profile: str = "official",
        verbatim: bool = False,
    ) -> None:
        decode = profile == "ds4"
        self._scanner = Scanner(thinking, tool_names(tools), decode=decode, keep=False, verbatim=verbatim)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes | str) -> State:
        """Take the bytes of one token; returns the state behind it."""
        text = piece if isinstance(piece, str) else self._decoder.decode(piece)
        if text:
            self._scanner.feed(text)
        return self._scanner.state

    def inject(self, text: str = END_THINK_INJECTION) -> State:
        """Take text that was fed to the model to close its reasoning."""
        self._scanner.recover()
        return self.push(text)

    @property
    def state(self) -> State:
        return self._scanner.state

    @property
    def greedy(self) -> bool:
        """Whether the next token is syntax: take the most probable one."""
        # Of a block that cannot be read nobody knows what is syntax.
        return self._scanner.state in _GREEDY and not self._scanner.failed

    @property
    def in_reasoning(self) -> bool:
        return self._scanner.in_reasoning

    @property
    def saw_start(self) -> bool:
        """Whether a block began."""
        return self._scanner.saw_start

    @property
    def saw_end(self) -> bool:
        """Whether the block's end tag was seen: the generation is over."""
        return self._scanner.saw_end

    @property
    def open_block(self) -> bool:
        """Whether a block began that is not over: the end of the sentence must not come now."""
        return self._scanner.open_block

    @property
    def failed(self) -> bool:
        """Whether a call was begun that cannot be read. (A block is plain text if that shows before its first call.)"""
        return self._scanner.failed

    @property
    def dangling_start(self) -> bool:
        """Whether the reasoning is open and holds a complete start tag: it should be closed for the model."""
        return self._scanner.dangling_start and self._scanner.in_reasoning

    @property
    def orphan_closers(self) -> int:
        """Number of end tags without a start (they are text)."""
        return self._scanner.orphan_closers
