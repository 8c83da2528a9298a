"""Long prompts: the same tokens in pieces, and a refusal that costs nothing."""

from __future__ import annotations

import functools
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_harness import line, scripted, tokenizer, tokenizer_metadata

from ds4.chat.message import Message
from ds4.chat.rendered import Rendered
from ds4.errors import ContextOverflowError
from ds4.gguf.vocabulary import PROTOCOL_TOKENS
from ds4.server import encoding
from ds4.server.config import ServerConfig
from ds4.server.encoding import PIECE, Encoder, LongPromptError
from ds4.server.prompting import PromptBuilder
from ds4.server.request import ChatRequest
from ds4.tokenizer import Tokenizer

PARTS = st.sampled_from(
    [
        *"ab Zé9\n\r\t.,<+/|｜ß中文，。あ😀_\u00a0\u2028\u0301\x1c\x85\ud800", "  ", "\n\n", " x", "12345", "don't",
        "<think>", "</think>", "｜DSML｜", "<｜User｜>", "<｜end▁of▁sentence｜>",
    ]
)  # fmt: skip


@functools.cache
def greedy_tokenizer() -> Tokenizer:
    """Joins whatever it may join: so two texts with equal tokens were cut into words at the same places."""
    metadata = tokenizer_metadata()
    special = list(PROTOCOL_TOKENS.values())
    letters = [text for text in metadata["tokenizer.ggml.tokens"] if len(text) == 1][:256]
    # The characters that stand for the bytes of white space, digits, letters and others.
    some = ["Ġ", "Ċ", "č", "ĉ", *"0123459abZ.,<+/|_'x", "Ã", "©", "ä", "¸", "Ń"]
    pairs = [(a, b) for a in some for b in some]
    longer = [(a + b, a + b) for a, b in pairs]
    merges = [*pairs, *longer]
    tokens = [*dict.fromkeys([*letters, *(a + b for a, b in merges)]), *special]
    return Tokenizer.from_metadata(
        {
            **{key: metadata[key] for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre")},
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
            "tokenizer.ggml.token_type": [1] * (len(tokens) - len(special)) + [3] * len(special),
        }
    )


@settings(max_examples=300)
@given(st.lists(PARTS, max_size=40).map("".join), st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_the_pieces_of_a_text_have_the_tokens_of_the_text(text: str, start: int, length: int, greedy: bool) -> None:
    used = greedy_tokenizer() if greedy else tokenizer()
    rendered = Rendered(text, ((start, start + length),) if start + length <= len(text) and length else ())
    whole = used.encode_chat(rendered)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "PIECE", 3)
        encoder = Encoder(used, 1000)
        assert encoder.encode(rendered) == encoder.encode_prompt(rendered) == whole
        assert encoder.count(rendered) == len(whole)
        pieces = list(encoding._pieces(rendered))
    assert "".join(pieces) == text


def test_a_text_of_many_kinds_is_really_cut() -> None:
    for text in ("word " * PIECE, "line\n" * PIECE, "4a" * PIECE, "中，" * PIECE):
        sizes = [len(piece) for piece in encoding._pieces(text)]
        assert len(sizes) >= 2
        assert max(sizes) < PIECE + 10


def overflow(text: str, context: int) -> ContextOverflowError:
    with pytest.raises(ContextOverflowError) as caught:
        Encoder(tokenizer(), context).encode_prompt(text)
    return caught.value


def test_the_words_that_clients_look_for_are_the_same_and_the_number_is_one_that_the_prompt_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "PIECE", 1000)
    exact = overflow("a b c d " * 100, 256)
    words = "Prompt has {} tokens, but the configured context size is {} tokens"
    assert str(exact) == words.format(len(tokenizer().encode("a b c d " * 100)), 256)
    for text in ("word " * 1000, "中 文" * 1000, "<｜end▁of▁sentence｜>" * 1000):
        tokens = len(tokenizer().encode_chat(text))
        for context in (256, tokens - 125, tokens):
            error = overflow(text, context)
            assert context <= error.prompt_tokens <= tokens
            assert str(error).startswith(words.format(error.prompt_tokens, context))
            assert (error.prompt_tokens == tokens) == (str(error) == words.format(tokens, context))
            assert str(error).endswith("(at least: it was not counted to its end)") == isinstance(
                error, LongPromptError
            )
        assert len(Encoder(tokenizer(), tokens + 1).encode_prompt(text)) == tokens


def test_a_prompt_far_over_the_context_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = PromptBuilder(tokenizer(), ServerConfig(), 4096, None)
    request = ChatRequest("m", (Message(role="user", content="word " * 1_000_000),))
    monkeypatch.setattr(type(tokenizer()), "encode_chat", lambda *_: pytest.fail("it was tokenised"))
    builder._encoder._least("")  # looks through the vocabulary once
    tracemalloc.start()
    with pytest.raises(LongPromptError):
        builder.prompt(request)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 5_000_000


def test_clients_see_it_as_the_error_they_know() -> None:
    with scripted(line("x"), ctx=256) as server:
        answer = server.post({"messages": [{"role": "user", "content": "word " * 100_000}]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["n_ctx"]) == ("context_length_exceeded", 256)
    assert error["n_prompt_tokens"] >= 256
    assert f"Prompt has {error['n_prompt_tokens']} tokens, but the configured context size is 256" in error["message"]
