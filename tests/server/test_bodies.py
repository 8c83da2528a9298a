"""Bodies that nobody means well: they are refused with a reason, or answered."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from server_harness import Running, line, scripted

from ds4.server import bodies

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with scripted(line("</think>", "Hi", " there"), ctx=256, max_body_bytes=100_000) as running:
        yield running


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"messages":' * 200 + b"[]" + b"}" * 200, "messages"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "nested deeper than 256"),
        (b"[" * 40_000, "nested deeper than 256"),
        (b'{"a":' * 18_000, "nested deeper than 256"),
        (b'{"temperature":1e999,"messages":[]}', "1e999 is too large"),
        (b'{"temperature":-1e999}', "-1e999 is too large"),
        (b'{"max_tokens":' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"temperature":0.' + b"9" * 90_000 + b"}", "messages"),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', "not UTF-8 at byte 39"),
        (b'{"messages":Infinity}', "Infinity is not JSON"),
        (b'{"messages":[],"messages":3}', "messages"),
        (b'{"messages":[{"role":"user","content":"x"}],"seed":' + b"9" * 4000 + b"}", "seed"),
        (b'{"messages":[{"role":"user","content":"x"}],"temperature":' + b"9" * 4000 + b"}", "temperature"),
        (b'{"messages":[{"role":"user","content":"x"}],"logit_bias":{"1":' + b"9" * 4000 + b"}}", "logit_bias"),
        (b'{"messages":[{"role":"user","content":"x"}],"n":1e308}', "n"),
    ],
)
def test_hostile_json_is_a_400_that_says_why(server: Running, body: bytes, said: str) -> None:
    answer = server.http.post(CHAT, content=body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_odd_but_lawful_json_is_answered(server: Running) -> None:
    text = rb'[{"role":"user","content":"a\u0000b\ud800c\udfff"}]'
    for odd in (
        b'{"messages":3,"messages":' + text + b"}",
        b'\xef\xbb\xbf{"messages":' + text + b"}",
        b'{"messages":' + text + b',"max_tokens":' + b"9" * 4000 + b',"top_k":' + b"9" * 4000 + b"}",
        b'{"messages":' + text + b',"model":"\\ud83d","metadata":' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}",
        b' \n{"messages":' + text + b',"":0,"\\u0000":"\\u0000"}\n ',
        b'{"messages":[{"role":"user","content":"a\xed\xa0\x80b"}]}',
    ):
        answer = server.http.post(CHAT, content=odd)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "Hi there"


ODD = r'"a\\u0000b\\ud800c\\udfff"'
HUGE = "9" * 4000
TURNS = f'[{{"role":"user","content":{ODD}}}]'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", f'"messages":{TURNS},"stop":{ODD},"max_tokens":{HUGE},"top_k":{HUGE}'),
        ("/v1/completions", f'"prompt":{ODD},"stop":[{ODD}],"max_tokens":{HUGE},"top_k":{HUGE}'),
        ("/v1/responses", f'"input":{TURNS},"instructions":{ODD},"max_output_tokens":{HUGE}'),
        ("/v1/messages", f'"messages":{TURNS},"system":{ODD},"stop_sequences":[{ODD}],"max_tokens":{HUGE}'),
        ("/v1/messages/count_tokens", f'"messages":{TURNS},"system":{ODD},"max_tokens":{HUGE}'),
    ],
)
@pytest.mark.parametrize("stream", ["true", "false"])
def test_odd_texts_and_huge_limits_are_answered_on_all_paths(
    server: Running, path: str, body: str, stream: str
) -> None:
    answer = server.http.post(path, content=f'{{"model":{ODD},"metadata":{{"a":{ODD}}},"stream":{stream},{body}}}')
    assert answer.status_code == 200, answer.text
    assert "Hi there" in answer.text or path.endswith("count_tokens") or stream == "true"
    answer.content.decode()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"])
def test_all_paths_refuse_what_is_no_usable_json(server: Running, path: str) -> None:
    for body in (b"", b"[" * 40_000, b'{"max_tokens":' + b"9" * 5000 + b"}", b'{"top_p":1e999}', b'{"a":NaN}', b"\xff"):
        answer = server.http.post(path, content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("invalid JSON request: ")
        assert ("type" in answer.json()) == path.startswith("/v1/messages")


def test_a_body_of_too_many_values_is_refused_before_it_is_read() -> None:
    with scripted(line("</think>", "x")) as server:
        empty = b'{"messages":[' + b"{}," * (bodies.MAX_VALUES // 2) + b"{}]}"
        answer = server.http.post(CHAT, content=empty)
        assert answer.status_code == 413
        assert "commas and brackets" in answer.json()["error"]["message"]
        fine = json.dumps({"messages": HELLO, "metadata": {"a": "," * (bodies.MAX_VALUES - 100)}}).encode()
        assert server.http.post(CHAT, content=fine).status_code == 200
