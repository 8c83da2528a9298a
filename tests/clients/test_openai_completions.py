"""The official openai client against the server: text completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_harness import Running, line, random_engine, scripted, serving

from ds4.server.backend import Backend
from ds4.server.config import ServerConfig

GREEDY: dict[str, Any] = {"model": "ds4-tiny", "temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="module", params=[False, True], ids=["templated", "raw"])
def model(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server over the real graph with random weights."""
    config = ServerConfig(ctx=4096, raw_completions=request.param)
    with serving(Backend(random_engine(), "ds4-custom"), config) as running:
        yield running


def test_streaming_equals_not_streaming_at_temperature_0(model: Running) -> None:
    options = {**GREEDY, "prompt": "Grüße 😀, 2 < 3", "extra_body": {"think": False}}
    whole = model.client.completions.create(**options)
    assert whole.usage is not None
    assert 0 < whole.usage.completion_tokens <= 16
    text, finish, usage = "", None, None
    for chunk in model.client.completions.create(stream=True, stream_options={"include_usage": True}, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.text
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].text
    assert finish == whole.choices[0].finish_reason
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    # The same prompt again is live.
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= whole.usage.prompt_tokens - 1


def test_reasoning_is_not_part_of_the_text() -> None:
    with scripted(line("hm", "</think>", "Hi", "!")) as server:
        answer = server.client.completions.create(model="m", prompt="Say hi")
        assert answer.choices[0].text == "Hi!"
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == 1
        chunks = server.client.completions.create(model="m", prompt=["Say hi"], stream=True)
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "Hi!"


def test_what_it_cannot_do_is_an_error_that_names_the_field() -> None:
    with scripted(line("</think>", "x"), ctx=64) as server:
        for field, value in (("n", 20), ("best_of", 2), ("echo", True), ("suffix", "x"), ("logprobs", 25)):
            with pytest.raises(openai.BadRequestError, match=field) as caught:
                server.client.completions.create(model="m", prompt="x", **{field: value})  # type: ignore[call-overload]
            assert caught.value.param == field
        with pytest.raises(openai.BadRequestError, match="token ids"):
            server.client.completions.create(model="m", prompt=[1, 2, 3])
        with pytest.raises(openai.BadRequestError, match="context size is 64 tokens") as caught:
            server.client.completions.create(model="m", prompt="word " * 100)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("given", ["right", "wrong", "header"])
def test_the_client_needs_the_key_of_the_server(given: str) -> None:
    with scripted(line("</think>", "x"), api_keys=("right",)) as server:
        client = server.client.with_options(api_key="right" if given == "right" else "wrong")
        headers = {"x-api-key": "right"} if given == "header" else {}
        if given == "wrong":
            with pytest.raises(openai.AuthenticationError, match="not one of this server's") as caught:
                client.completions.create(model="m", prompt="x")
            assert caught.value.code == "invalid_api_key"
        else:
            assert client.completions.create(model="m", prompt="x", extra_headers=headers).choices[0].text == "x"
