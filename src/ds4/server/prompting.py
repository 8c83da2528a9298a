"""From a request to its prompt: put sampled calls back, render, tokenise, check the length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ds4.chat.effort import resolve
from ds4.chat.message import Message
from ds4.chat.rendered import Rendered
from ds4.chat.template import ASSISTANT, BOS, END_THINK, THINK, render
from ds4.server.config import ServerConfig
from ds4.server.constraints import ANY_OBJECT, Enforcement, Grammars
from ds4.server.encoding import Encoder
from ds4.server.replay import ReplayMemory
from ds4.server.request import ChatRequest, Prompt
from ds4.tokenizer import Tokenizer


class PromptBuilder:
    """Renders and tokenises requests. Thread-safe: handlers use it while the worker runs."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ServerConfig,
        context: int,
        replay: ReplayMemory | None,
        vocab: int | None = None,
    ) -> None:
        """`vocab`: number of logits, if that is more than the tokenizer has ids."""
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, vocab)
        self._config = config
        self._context = context
        self._replay = replay
        self._encoder = Encoder(tokenizer, context)

    def encode(self, text: Rendered) -> list[int]:
        """Tokens of rendered text; special strings in clients' text count only if the server was told so."""
        return self._encoder.encode(self._trusted(text))

    def build(self, request: ChatRequest) -> tuple[Prompt, Future[Enforcement] | None]:
        """The prompt of a request, and what its answer has to follow, if there are rules (as `Grammars.submit`).

        Raises RequestError: ContextOverflowError if it does not fit, and as `Grammars.submit`.
        """
        prompt = self.prompt(request)
        return prompt, self._grammars.submit(request.rules(self._config.template))

    def check(self, request: ChatRequest) -> None:
        """Raises SchemaError for a schema that cannot be enforced, if that is seen without preparing its grammar."""
        self._grammars.check(request.rules(self._config.template))

    def prepare(self) -> None:
        """Read what constraints need of the vocabulary, so that no request has to wait for that."""
        self._grammars.prepare()

    def prompt(self, request: ChatRequest) -> Prompt:
        """The prompt of a request, without its constraint. Raises ContextOverflowError if it does not fit."""
        replayed: Counter[str] = Counter()
        messages = self._messages(request, replayed)
        text = self._render(request, messages)
        ids = self._encoder.encode_prompt(self._trusted(text))
        return Prompt(text, ids, self._tokenizer.key_bytes(ids), messages, replayed)

    def count(self, request: ChatRequest) -> int:
        """The number of tokens of the prompt, whether it fits or not. Raises RequestError."""
        return self._encoder.count(self._trusted(self._render(request, self._messages(request, Counter()))))

    def _trusted(self, text: Rendered) -> str:
        """The text, with its client spans if these count."""
        return text if self._config.safe_client_text else str(text)

    def _messages(self, request: ChatRequest, replayed: Counter[str]) -> tuple[Message, ...]:
        """The messages with the sampled bytes of their calls, as far as these are known."""
        if self._replay is None:
            return request.messages
        return tuple(self._replay.attach(message, replayed, request.tools) for message in request.messages)

    def _render(self, request: ChatRequest, messages: Sequence[Message]) -> Rendered:
        if request.text is not None:
            return BOS + Rendered(request.text, ((0, len(request.text)),))
        effort = request.effort
        if request.thinking:
            effort = resolve(effort, self._config.effort_profile, self._context)
        text = render(
            messages,
            request.tools,
            request.thinking,
            effort,
            self._config.template,
            effort_profile=self._config.effort_profile,
            response_format=_shown_schema(request),
        )
        if _turn_is_open(text) or (messages and messages[-1].open_end):
            return text
        # Nobody spoke after the model, or nobody at all. It would go on behind its end of sentence.
        return text + ASSISTANT + (THINK if request.thinking else END_THINK)


def _shown_schema(request: ChatRequest) -> Mapping[str, Any] | None:
    """The schema that the model is told; `any object` tells it nothing that the request does not say."""
    schema = request.content_schema
    return schema if isinstance(schema, Mapping) and schema is not ANY_OBJECT else None


def _turn_is_open(text: Rendered) -> bool:
    """Whether a prompt ends in a turn of the model that is to be written."""
    ends_in_client_text = bool(text.client_spans) and text.client_spans[-1][1] == len(text)
    return text.endswith((THINK, END_THINK)) and not ends_in_client_text
