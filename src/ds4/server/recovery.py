"""A second attempt after a malformed tool call: what the model is told, and the one answer that a client gets.

The attempt that failed and what was said about it stay in the live state; the client sees neither. It sees the text
before the malformed block, followed by the second attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ds4.chat.events import Event, ReasoningDelta, TextDelta
from ds4.chat.message import Message
from ds4.chat.template import render_tail
from ds4.chat.tools import TOOLS_HEAD
from ds4.server.logprobs import TokenLogprob

MIN_ROOM = 32
"""Tokens that a second attempt must at least have: about those of the shortest call."""

_BREAK = "\n\n"
_MOST_DETAIL = 200
_SYNTAX = _BREAK.join(TOOLS_HEAD.split(_BREAK)[2:4])
"""The form of a call, as the tools' description has it."""

_TEXT = """The tool call was malformed ({detail}). It was not executed, and nobody has seen it.

A tool call has this form:

{syntax}

Write the call again in this form, with a tool and parameters that were described at the start, or answer without \
a tool call."""


def correction(problem: str, thinking: bool, profile: str) -> str:
    """The text that ends the model's turn, tells it what was wrong, and opens its next one. All of it is control text.

    The form of a call is repeated, but not the tools: they are in the live state, and evaluating a long description
    again would cost more than the answer. A marker in this text is the special token that the model is to write.
    """
    # Names that the model made up may be in it, and must not become special tokens.
    detail = problem[:_MOST_DETAIL].replace("<", "‹").replace("｜", "|")
    text = _TEXT.format(detail=detail, syntax=_SYNTAX)
    return str(render_tail([Message(role="tool", content=text)], thinking, profile))


@dataclass
class Earlier:
    """The attempt that failed, and how the second one is joined to it: streamed and whole answers get the same.

    Reasoning is joined to the reasoning before it only while no text has left: text is never followed by reasoning.

    Attributes:
        message: its reasoning and text before the block, and its problems.
        completion, reasoning: tokens so far, what was injected included.
        logprobs: the tokens of its text, if the request wants to know.
    """

    message: Message
    completion: int
    reasoning: int
    logprobs: tuple[TokenLogprob, ...] = ()
    _begun: set[type[Event]] = field(default_factory=set)

    def events(self, events: list[Event]) -> list[Event]:
        """The events that continue those of the first attempt."""
        joined: list[Event] = []
        for event in events:
            if isinstance(event, ReasoningDelta):
                if self.message.text:
                    continue
                event = ReasoningDelta(self._opening(event, self.message.reasoning) + event.text)
            elif isinstance(event, TextDelta):
                event = TextDelta(self._opening(event, self.message.text) + event.text)
            joined.append(event)
        return joined

    def join(self, message: Message) -> Message:
        """The second attempt's message as the whole answer."""
        first = self.message
        reasoning = first.reasoning
        if not first.text:
            reasoning += _between(reasoning, message.reasoning) + message.reasoning
        return replace(
            message,
            reasoning=reasoning,
            content=first.text + _between(first.text, message.text) + message.text,
            problems=(*first.problems, *message.problems),
        )

    def _opening(self, event: ReasoningDelta | TextDelta, before: str) -> str:
        """What comes between the attempts if this is the second one's first text of its kind."""
        if type(event) in self._begun:
            return ""
        self._begun.add(type(event))
        return _between(before, event.text)


def _between(first: str, second: str) -> str:
    return _BREAK if first and second and not (first[-1].isspace() or second[0].isspace()) else ""
