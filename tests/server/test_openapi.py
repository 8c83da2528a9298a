"""The description of the paths, for programs and for people."""

from __future__ import annotations

import html.parser
import re
from collections.abc import Iterator
from typing import Any

import pytest
from server_harness import Running, line, scripted

from ds4.server.api.registry import APIS
from ds4.server.docs_page import page, type_of
from ds4.server.openapi import body_schema


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(line("</think>", "Hi"), ctx=256) as running:
        yield running


@pytest.fixture(scope="module")
def schema(server: Running) -> dict[str, Any]:
    """The description that the server gives."""
    result: dict[str, Any] = server.http.get("/openapi.json").json()
    return result


def operations(schema: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(method, path, entry) for path, methods in schema["paths"].items() for method, entry in methods.items()]


def test_every_path_is_described_with_its_errors_and_an_id_of_its_own(schema: dict[str, Any]) -> None:
    gets = {"/health", "/metrics", "/stats", "/sessions", "/v1/models", "/v1/models/{id}"}
    posts = {api.path for api in APIS} | {"/v1/messages/count_tokens"}
    assert {path for method, path, _ in operations(schema) if method == "get"} == gets
    assert {path for method, path, _ in operations(schema) if method == "post"} == posts
    ids = [entry["operationId"] for _, _, entry in operations(schema)]
    assert len(set(ids)) == len(ids)
    assert "post_v1_chat_completions" in ids
    for method, path, entry in operations(schema):
        statuses = set(entry["responses"])
        assert {"200", "431"} <= statuses
        assert "422" not in statuses
        if method == "post":
            assert {"400", "401", "403", "413", "500"} <= statuses
            assert "messages" in entry["requestBody"]["content"]["application/json"]["schema"]["properties"] or (
                path in ("/v1/completions", "/v1/responses")
            )
        for status, response in entry["responses"].items():
            if (path, status) == ("/metrics", "200"):
                assert list(response["content"]) == ["text/plain"]
                continue
            answer = response["content"]["application/json"]["schema"]
            if status == "200":
                assert answer["type"] == "object"
                assert answer["required"]
            elif path != "/health" or status != "503":
                name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
                assert answer == {"$ref": f"#/components/schemas/{name}"}
    assert "text/event-stream" in schema["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert "security" not in schema


def test_bodies_have_types_descriptions_and_no_references() -> None:
    for api in APIS:
        described = body_schema(api.body)
        assert "$ref" not in repr(described)
        fields = described["properties"]
        assert set(fields) == set(api.body.model_fields)
        for name in ("model", "temperature", "top_p", "stream"):
            assert fields[name]["description"]
            assert "title" not in fields[name]
    options = body_schema(APIS[0].body)["properties"]["stream_options"]["anyOf"][0]
    assert options["properties"]["include_usage"]["description"]


class Reader(html.parser.HTMLParser):
    """What is in a page: its tags, its attributes, its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_every_path_and_field_and_loads_nothing(server: Running, schema: dict[str, Any]) -> None:
    answer = server.http.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    read = Reader(answer.text)
    assert read.open == []
    assert not {"script", "link", "img", "iframe", "object", "form"} & set(read.tags)
    links = [value for name, value in read.attributes if name in ("src", "href")]
    assert links
    assert all(link == "/openapi.json" or (link or "").startswith("#") for link in links)
    anchors = {value for name, value in read.attributes if name == "id"}
    assert {f"#{anchor}" for anchor in anchors} == set(links) - {"/openapi.json"}
    for method, path, entry in operations(schema):
        assert f"{method.upper()} {path}" in read.text
        assert entry["summary"] in read.text
        for status, response in entry["responses"].items():
            assert status in read.text
            assert response["description"] in read.text
        body = entry.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        for name, field in body.get("properties", {}).items():
            assert f"<code>{name}</code>" in answer.text
            assert field.get("description", "") in read.text
    for name in ("stream_options.include_usage", "array of object, required"):
        assert name in read.text


def test_everything_on_the_page_is_escaped() -> None:
    evil = "<script>alert(1)</script>\"'&"
    field = {"type": evil, "description": evil, "properties": {}}
    schema = {
        "info": {"title": evil, "version": evil, "description": evil},
        "paths": {
            f"/{evil}": {
                "get": {
                    "operationId": evil,
                    "summary": evil,
                    "parameters": [{"name": evil, "schema": {"const": evil}, "description": evil}],
                    "requestBody": {"content": {"application/json": {"schema": {"properties": {evil: field}}}}},
                    "responses": {
                        evil: {"description": evil, "content": {evil: {"schema": {"properties": {evil: {}}}}}}
                    },
                }
            }
        },
    }
    text = page(schema)
    assert "<script" not in text
    assert not re.search(r"=\"[^\"]*<", text)
    read = Reader(text)
    assert set(read.tags) <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "a", "ul", "li", "code", "table", "tr",
        "th", "td",
    }  # fmt: skip
    assert read.text.count("alert(1)") >= 14
    assert all(name in ("lang", "charset", "name", "content", "href", "id") for name, _ in read.attributes)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer"}, "integer"),
        ({}, "any"),
        ({"type": ["string", "null"]}, "string or null"),
        ({"type": "array"}, "array of any"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
         "string or array of string"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "object"),
        ({"enum": ["a", 1]}, "'a' or 1"),
    ],
)  # fmt: skip
def test_types_in_words(schema: dict[str, Any], words: str) -> None:
    assert type_of(schema) == words
