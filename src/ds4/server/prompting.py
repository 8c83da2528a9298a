"""From a request to its prompt: put sampled calls back, render, tokenise, check the length."""

from __future__ import annotations

from ds4.chat.effort import resolve
from ds4.chat.rendered import Rendered
from ds4.chat.template import BOS, render
from ds4.errors import ContextOverflowError
from ds4.server.config import ServerConfig
from ds4.server.replay import ReplayMemory
from ds4.server.request import ChatRequest, Prompt
from ds4.tokenizer import Tokenizer


class PromptBuilder:
    """Renders and tokenises requests. Thread-safe: handlers use it while the worker runs."""

    def __init__(self, tokenizer: Tokenizer, config: ServerConfig, context: int, replay: ReplayMemory | None) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._context = context
        self._replay = replay

    def encode(self, text: Rendered) -> list[int]:
        """Tokens of rendered text; special strings in clients' text count only if the server was told so."""
        return self._tokenizer.encode_chat(text if self._config.safe_client_text else str(text))

    def build(self, request: ChatRequest) -> Prompt:
        """The prompt of a request. Raises RequestError, and ContextOverflowError if it does not fit."""
        text = self._render(request)
        ids = self.encode(text)
        if len(ids) >= self._context:
            raise ContextOverflowError(len(ids), self._context)
        return Prompt(text, ids, self._tokenizer.key_bytes(ids))

    def count(self, request: ChatRequest) -> int:
        """The number of tokens of the prompt, whether it fits or not. Raises RequestError."""
        return len(self.encode(self._render(request)))

    def _render(self, request: ChatRequest) -> Rendered:
        if request.text is not None:
            return BOS + Rendered(request.text, ((0, len(request.text)),))
        messages = request.messages
        if self._replay is not None:
            messages = tuple(self._replay.attach(message) for message in messages)
        effort = request.effort
        if request.thinking:
            effort = resolve(effort, self._config.effort_profile, self._context)
        return render(
            messages,
            request.tools,
            request.thinking,
            effort,
            self._config.template,
            effort_profile=self._config.effort_profile,
        )
