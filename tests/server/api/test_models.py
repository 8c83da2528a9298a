"""The list of models, as the clients of both vendors read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic.types
import openai.types
import pytest
from server_harness import WEATHER, Running, line, scripted

from ds4.server.api.chat_types import ChatCompletionRequest
from ds4.server.api.models import CREATED, model_id, model_ids

NAMES = ["ds4-tiny", "deepseek-v4-flash", "deepseek-v4-pro"]
SAMPLES: dict[str, Any] = {
    "tools": [WEATHER],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "stop": ["x"],
    "seed": 7,
    "stream": False,
    "reasoning_effort": "high",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(line("</think>", "Hi"), ctx=256, max_tokens=1000) as running:
        yield running


def test_the_list_has_the_models_own_name_first_and_both_shapes(server: Running) -> None:
    listed = server.http.get("/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == NAMES
    assert listed["object"] == "list"
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, NAMES[0], NAMES[-1])
    for entry in listed["data"]:
        openai.types.Model.model_validate(entry, strict=True)
        read = anthropic.types.ModelInfo.model_validate(entry)
        assert read.created_at.timestamp() == CREATED
        assert (read.max_input_tokens, read.max_tokens, read.display_name) == (256, 256, "ds4-tiny")
        assert entry["top_provider"] == {
            "context_length": 256, "max_completion_tokens": 256, "is_moderated": False,
        }  # fmt: skip
        assert entry["name"] == "ds4-tiny"
        assert server.http.get(f"/v1/models/{entry['id']}").json() == entry


def test_anthropics_client_lists_and_finds_them(server: Running) -> None:
    http = anthropic.DefaultHttpxClient(trust_env=False)
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, http_client=http)
    assert [model.id for model in client.models.list(limit=1)] == NAMES
    for name in NAMES:
        assert client.models.retrieve(name).id == name
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude")


def test_every_parameter_it_claims_is_accepted(server: Running) -> None:
    claimed = server.http.get("/v1/models").json()["data"][0]["supported_parameters"]
    assert set(claimed) == set(SAMPLES)
    assert set(claimed) <= set(ChatCompletionRequest.model_fields)
    for name in claimed:
        body = {"messages": [{"role": "user", "content": "x"}], name: SAMPLES[name]}
        assert server.post(body).status_code == 200, name


def test_names_of_shapes() -> None:
    assert model_id("flash") == "deepseek-v4-flash"
    assert model_id("other") == "ds4-other"
    assert model_ids("ds4-other") == ["ds4-other", "ds4-tiny", "deepseek-v4-flash", "deepseek-v4-pro"]
    assert model_ids("deepseek-v4-pro") == ["deepseek-v4-pro", "ds4-tiny", "deepseek-v4-flash"]
