"""Conversations as text: the prompt template, tool calls in DSML, and reading what the model wrote.

Pure functions and small state machines; nothing here reads files or sockets.
"""

from ds4.chat.dsml import DecodeState, State, parse, tool_names
from ds4.chat.message import Message, Part, ToolCall
from ds4.chat.rendered import Rendered
from ds4.chat.stream import StreamParser
from ds4.chat.template import render, render_reply, render_tail
from ds4.chat.tools import tool_schemas, tools_block

__all__ = [
    "DecodeState",
    "Message",
    "Part",
    "Rendered",
    "State",
    "StreamParser",
    "ToolCall",
    "parse",
    "render",
    "render_reply",
    "render_tail",
    "tool_names",
    "tool_schemas",
    "tools_block",
]
