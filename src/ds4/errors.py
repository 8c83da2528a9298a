"""Errors that a person or a client can cause; the message is meant to be read by them.

Anything else that is raised is a defect of the program.
"""

from __future__ import annotations


class Ds4Error(Exception):
    """Base of all errors that wrong input can cause. The text says what was wrong, where, and what to do."""


class FileFormatError(Ds4Error):
    """A model file that cannot be used: not GGUF, damaged, or not the model it says it is."""


class RequestError(Ds4Error):
    """A request that cannot be served as it is."""


class ContextOverflowError(RequestError):
    """A prompt that does not fit the context.

    Attributes:
        prompt_tokens: length of the prompt, in tokens.
        context: size of the context, in tokens.
    """

    def __init__(self, prompt_tokens: int, context: int) -> None:
        super().__init__(f"Prompt has {prompt_tokens} tokens, but the configured context size is {context} tokens")
        self.prompt_tokens = prompt_tokens
        self.context = context
