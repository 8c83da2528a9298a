"""Log probabilities as the APIs write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds4.engine.logprobs import MAX_TOP
from ds4.server.errors import ApiError
from ds4.server.logprobs import Places, TokenLogprob


def check_top(value: int | None, field: str) -> int:
    """A number of alternatives; None is 0. Raises ApiError 400."""
    if value is not None and not 0 <= value <= MAX_TOP:
        raise ApiError(400, f"{field} is {value}; it must be a whole number from 0 to {MAX_TOP}", param=field)
    return value or 0


def logprob_objects(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Tokens as chat and Responses write them."""
    return [
        {**_entry(token.piece, token.logprob), "top_logprobs": [_entry(*entry) for entry in token.top]}
        for token in tokens
    ]


def _entry(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(piece), "bytes": list(piece), "logprob": logprob}


def without_bytes(objects: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The objects as events of Responses have them."""

    def bare(entry: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in entry.items() if key != "bytes"}

    return [{**bare(token), "top_logprobs": [bare(entry) for entry in token["top_logprobs"]]} for token in objects]


class CompletionLogprobs:
    """Tokens as completions write them, with their places in the whole text."""

    def __init__(self, top: int) -> None:
        """`top`: how many alternatives each token comes with."""
        self._top = top
        self._places = Places()

    def write(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The object for the next tokens."""
        tops = [{_name(piece): logprob for piece, logprob in reversed(token.top)} for token in tokens]
        return {
            "tokens": [_name(token.piece) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            # Of tokens with the same bytes the most probable one counts.
            "top_logprobs": tops if self._top else None,
            "text_offset": [self._places.next(token.piece) for token in tokens],
        }


def _text(piece: bytes) -> str:
    return piece.decode(errors="replace")


def _name(piece: bytes) -> str:
    """A token as a key: its text, or, where it is no text of whole characters, its bytes as OpenAI writes them."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(map(_byte, piece))


def _byte(byte: int) -> str:
    return chr(byte) if 0x20 <= byte < 0x7F and byte != ord("\\") else f"\\x{byte:02x}"
