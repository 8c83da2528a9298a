"""What every API is: a path, a parser, and an answer that turns replies into the API's frames or its whole body."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from ds4.server.config import ServerConfig
from ds4.server.errors import ApiError
from ds4.server.request import Admitted, ChatRequest, Done, Events
from ds4.server.turns import TurnMemory


@dataclass(frozen=True)
class ApiContext:
    """What parsers may look at besides the request.

    Attributes:
        config: how the server runs.
        model: the loaded model's name.
        turns: earlier answers that a request may continue by an id.
        vocab: number of token ids.
    """

    config: ServerConfig
    model: str
    turns: TurnMemory
    vocab: int


class Answer(Protocol):
    """The answer to one request on the wire: a stream of frames, or one body.

    Of a stream, `opened` comes first, `admitted` before everything else that the worker replies. The last `done`, or
    `failed`, ends it.
    """

    keep_alive: bytes

    def opened(self) -> bytes:
        """The frames that may go out before the request is admitted; maybe none."""
        ...

    def admitted(self, reply: Admitted) -> bytes:
        """The frames that need the prompt's token counts; maybe none."""
        ...

    def events(self, reply: Events) -> bytes:
        """The frames of new events; maybe none."""
        ...

    def done(self, reply: Done) -> bytes:
        """The frames of the end; of several answers each has one."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The frames of a failure after the first byte."""
        ...

    def whole(self, ends: Sequence[Done]) -> dict[str, Any]:
        """The body of the answers that are not streamed: as many as the request asks for, one where it cannot ask.

        Raises ApiError if this is none.
        """
        ...


@dataclass(frozen=True)
class Ask:
    """A request of one API, parsed.

    Attributes:
        request: what the client asked for.
        stream: whether the answer is a stream.
        answer: makes the answer from the number of the job.
    """

    request: ChatRequest
    stream: bool
    answer: Callable[[int], Answer]


@dataclass(frozen=True)
class Api:
    """One API.

    Attributes:
        path: where it is POSTed to.
        summary: one line for the page at /docs.
        body: the type of its body, for the description of the API.
        parse: a JSON object to a request; raises ApiError.
        conversation: its field that holds the conversation, which errors about the length name.
        anthropic: errors have Anthropic's shape, else OpenAI's.
        format: its field that gives the form of the text, which errors about its schema name.
    """

    path: str
    summary: str
    body: type[BaseModel]
    parse: Callable[[Mapping[str, Any], ApiContext], Ask]
    conversation: str
    anthropic: bool = False
    format: str = "response_format"
