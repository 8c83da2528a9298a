"""Log probabilities, penalties, bias and seeds, on the wire."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionTokenLogprob
from server_harness import WEATHER, Running, call_pieces, line, random_engine, scripted, serving, tokenizer

from ds4.chat.events import Event, ReasoningDelta, TextDelta
from ds4.chat.stream import StreamParser
from ds4.server.api.token_logprobs import CompletionLogprobs
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig
from ds4.server.logprobs import TextLogprobs, TokenLogprob

HELLO: Any = [{"role": "user", "content": "Hello"}]
MALFORMED = ["\n\n", "<", "｜DSML｜", "tool_calls", ">\n", "Oh."]


@pytest.fixture(scope="module")
def nonsense() -> Iterator[Running]:
    with serving(Backend(random_engine(), "m"), ServerConfig(ctx=1024)) as server:
        yield server


def tokens_of(logprobs: Any) -> list[str]:
    return [token["token"] for token in logprobs["content"]]


def streamed(server: Running, **body: Any) -> list[dict[str, Any]]:
    text = server.post({"messages": HELLO, "stream": True, **body}).text
    return [json.loads(part[6:])["choices"][0] for part in text.split("\n\n") if part.startswith("data: {")]


def whole(server: Running, **body: Any) -> dict[str, Any]:
    answer = server.post({"messages": HELLO, **body})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@pytest.mark.parametrize(
    ("pieces", "body", "expected"),
    [
        (["Hm.", "</think>", "Hi", " there"], {}, ["Hi", " there"]),
        (["Hm.", "</think>", "\n\n", "Hi"], {}, ["\n\n", "Hi"]),
        (["</think>", "a<", "tool", "b"], {"tools": [WEATHER]}, ["a<", "tool", "b"]),
        (["</think>", "one", " STO", "P", "x"], {"stop": ["STOP"]}, ["one", " STO"]),
        (["</think>", "Look.", *call_pieces(("get_weather", []))], {"tools": [WEATHER]}, ["Look."]),
        (["</think>", *call_pieces(("get_weather", []))], {"tools": [WEATHER]}, []),
        (["only reasoning"], {}, []),
        (["<think", ">", "hm", "</think>", "Hi"], {"thinking": False}, ["Hi"]),
        (["</think>", "base64:4p4=", "base64:mA==", "!"], {}, None),
    ],
)
def test_the_tokens_are_those_of_the_text(pieces: list[str], body: dict[str, Any], expected: list[str] | None) -> None:
    with scripted(line(*pieces)) as server:
        body = {"logprobs": True, "top_logprobs": 1, **body}
        choice = whole(server, **body)
        chunks = streamed(server, **body)
        told = [token for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["content"]]
        assert told == choice["logprobs"]["content"]
        for token in told:
            ChatCompletionTokenLogprob.model_validate(token, strict=True)
            assert token["logprob"] == 0.0
            assert [top["token"] for top in token["top_logprobs"]] == [token["token"]]
        if expected is not None:
            assert tokens_of(choice["logprobs"]) == expected
        else:
            assert b"".join(bytes(token["bytes"]) for token in told).decode() == choice["message"]["content"]
        # A token comes with the chunk that shows its beginning.
        shown = ""
        for chunk in chunks:
            delta = chunk["delta"].get("content") or ""
            if chunk["logprobs"]:
                assert delta
                assert chunk["logprobs"]["content"][0]["token"][:1] in (*delta, "\ufffd")
            shown += delta
        assert whole(server, **{**body, "logprobs": False, "top_logprobs": 0})["logprobs"] is None


def test_both_attempts_at_an_answer_are_told() -> None:
    with scripted(line("</think>", "Wait.", *MALFORMED), line("</think>", "No", " call.")) as server:
        choice = whole(server, tools=[WEATHER], logprobs=True)
        assert choice["message"]["content"] == "Wait.\n\nNo call."
        assert tokens_of(choice["logprobs"]) == ["Wait.", "No", " call."]


def test_a_block_that_becomes_text_is_told() -> None:
    with scripted(line("</think>", "Wait.", *MALFORMED)) as server:
        choice = whole(server, tools=[WEATHER], logprobs=True)
        assert "".join(tokens_of(choice["logprobs"])) == choice["message"]["content"].replace(
            "Wait.\n\nWait.", "Wait.Wait."
        )


def test_what_is_no_text_is_forgotten() -> None:
    told = TextLogprobs()
    told.add(TokenLogprob(b"<th", 0))
    told.forget()
    told.follow([ReasoningDelta("abc")])
    told.add(TokenLogprob(b"x", -1))
    assert told.take() == ()
    told.follow([TextDelta("x")])
    assert told.take() == (TokenLogprob(b"x", -1),)
    assert told.take() == ()


def test_what_the_server_injects_belongs_to_no_token() -> None:
    pieces = ["Now.", "<", "｜DSML｜", "tool_calls", ">", "No", " call", "STOP"]
    with scripted(line(*pieces)) as server:
        choice = whole(server, tools=[WEATHER], stop=["STOP"], logprobs=True)
        assert choice["message"]["content"].strip() == "No call"
        assert tokens_of(choice["logprobs"]) == ["No", " call"]


def test_a_token_that_ends_the_reasoning_may_go_on() -> None:
    with scripted(line("Hm.</th", "ink>One", " two", "STOP")) as server:
        choice = whole(server, stop=["STOP"], logprobs=True)
        assert choice["message"]["content"] == "One two"
        assert tokens_of(choice["logprobs"]) == [" two"]


def spans(text: bytes) -> list[int]:
    """Where each character begins that clients see for these bytes."""
    begins: list[int] = []
    done = 0
    while done < len(text):
        try:
            good, bad = text[done:].decode(), 0
        except UnicodeDecodeError as error:
            good, bad = text[done : done + error.start].decode(), error.end - error.start
        for char in good:
            begins.append(done)
            done += len(char.encode())
        if bad:
            begins.append(done)
            done += bad
    return begins


@given(
    text=st.lists(st.sampled_from([b"a", b"\x80", b"\xe4", b"\xe4\xbd", b"\xf0\x9f", "ü😀你".encode(), b"ST"])).map(
        b"".join
    )
    | st.binary(max_size=20),
    cuts=st.lists(st.integers(0, 30)),
    tail=st.sampled_from([b"", b"STOP", b"STOPabc"]),
)
def test_any_bytes_cut_anywhere(text: bytes, cuts: list[int], tail: bytes) -> None:
    """A token is told if its first byte is in a character that is seen, and comes with that character."""
    whole_text = text + tail
    ends = sorted({0, len(whole_text), *(cut for cut in cuts if cut < len(whole_text))})
    told, parser = TextLogprobs(), StreamParser(False, None, stops=["STOP"])
    shown, found = "", []

    def follow(events: list[Event]) -> None:
        nonlocal shown
        shown += "".join(event.text for event in events if isinstance(event, TextDelta))
        told.follow(events)
        found.extend(told.take())
        begins = [*spans(whole_text), len(whole_text)]
        seen = begins[len(shown)] if len(shown) < len(begins) else len(whole_text)
        assert [token.logprob for token in found] == [begin for begin in added if begin < seen]

    added: list[int] = []
    for begin, end in itertools.pairwise(ends):
        if parser.done:
            break
        added.append(begin)
        told.add(TokenLogprob(whole_text[begin:end], begin))
        follow(parser.push(whole_text[begin:end]))
    follow(parser.finish("stop"))


def test_bytes_that_are_no_characters_do_not_tell_of_a_call() -> None:
    with scripted(line("</think>", *["base64:gA=="] * 4, *call_pieces(("get_weather", [])))) as server:
        choice = whole(server, tools=[WEATHER], logprobs=True)
        assert [token["bytes"] for token in choice["logprobs"]["content"]] == [[0x80]] * 4


def test_probabilities_of_a_real_model(nonsense: Running) -> None:
    body = {"thinking": False, "max_tokens": 12, "logprobs": True, "top_logprobs": 20, "seed": 3}
    choice = whole(nonsense, **body)
    found = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in found).decode(errors="replace") == choice["message"]["content"]
    for token in found:
        values = [top["logprob"] for top in token["top_logprobs"]]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1
        assert token["logprob"] <= values[0]
    chunks = streamed(nonsense, **body)
    assert [token for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["content"]] == found
    greedy = whole(nonsense, **{**body, "temperature": 0})["logprobs"]["content"]
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in greedy)


def bytes_of(token: str) -> bytes:
    """The bytes of a token of completions."""
    if not token.startswith("bytes:"):
        return token.encode()
    return re.sub(rb"\\x(..)", lambda found: bytes.fromhex(found[1].decode()), token[6:].encode())


def test_completions(nonsense: Running) -> None:
    body: Any = {"model": "m", "prompt": "x", "max_tokens": 8, "seed": 5, "logprobs": 2, "extra_body": {"think": False}}
    choice = nonsense.client.completions.create(**body).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert b"".join(map(bytes_of, choice.logprobs.tokens)).decode(errors="replace") == choice.text
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs or ())
    for token, offset, top in zip(
        choice.logprobs.tokens, choice.logprobs.text_offset or (), choice.logprobs.top_logprobs or (), strict=True
    ):
        assert choice.text[offset:].startswith(token) or token.startswith("bytes:")
        assert len(top) == 2
    chunks = list(nonsense.client.completions.create(stream=True, **body))
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [part is None for part in parts] == [not chunk.choices[0].text for chunk in chunks]
    assert parts[-1] is None
    assert [token for part in parts if part for token in part.tokens or ()] == choice.logprobs.tokens
    assert [place for part in parts if part for place in part.text_offset or ()] == choice.logprobs.text_offset
    for wanted, count in ((0, 0), (True, 0), (None, None), (False, None)):
        answer = nonsense.post({**body, "logprobs": wanted, "think": False}, "/v1/completions").json()["choices"][0]
        told = answer["logprobs"]
        assert (told is None) == (count is None)
        assert told is None or (len(told["tokens"]) == 8 and told["top_logprobs"] is None)


@pytest.mark.parametrize(
    ("wanted", "count"),
    [({"top_logprobs": 2}, 2), ({"include": ["message.output_text.logprobs"]}, 0), ({"include": ["other"]}, None)],
)
def test_responses(nonsense: Running, wanted: Any, count: int | None) -> None:
    body: Any = {
        "model": "m",
        "input": "x",
        "max_output_tokens": 8,
        "extra_body": {"seed": 5, "think": False},
        **wanted,
    }
    answer = nonsense.client.responses.create(**body)
    part: Any = answer.output[0].content[0]  # type: ignore[union-attr,index]
    assert (answer.top_logprobs or 0) == (count or 0)
    if count is None:
        assert part.logprobs == []
        return
    assert b"".join(bytes(token.bytes) for token in part.logprobs).decode(errors="replace") == answer.output_text
    assert all(len(token.top_logprobs) == count for token in part.logprobs)
    deltas, done = [], None
    for event in nonsense.client.responses.create(stream=True, **body):
        if event.type == "response.output_text.delta":
            deltas += event.logprobs
        elif event.type == "response.output_text.done":
            done = event.logprobs
        elif event.type == "response.incomplete":
            assert event.response.output[0].content[0].logprobs == part.logprobs  # type: ignore[union-attr,index]
    assert [token.token for token in deltas] == [token.token for token in part.logprobs]
    assert done is not None
    assert [token.logprob for token in done] == [token.logprob for token in part.logprobs]


def test_bias_and_penalties_change_what_is_written(nonsense: Running) -> None:
    body = {"thinking": False, "max_tokens": 10, "temperature": 0}
    wanted = tokenizer().encode(" the")[0]
    piece = tokenizer().token_bytes(wanted).decode()
    assert whole(nonsense, **body, logit_bias={str(wanted): 100})["message"]["content"] == piece * 10
    punished = whole(
        nonsense, **body, logit_bias={str(wanted): 3}, presence_penalty=2, frequency_penalty=2, logprobs=True
    )
    assert len(set(tokens_of(punished["logprobs"]))) > 5
    answer = nonsense.client.responses.create(
        model="m", input="x", max_output_tokens=3, extra_body={"presence_penalty": 1.5, "think": False}
    )
    assert answer.model_dump()["presence_penalty"] == 1.5


def test_the_same_seed_writes_the_same_answer(nonsense: Running) -> None:
    def answer(seed: int) -> str:
        text: str = whole(nonsense, thinking=False, max_tokens=20, seed=seed)["message"]["content"]
        return text

    assert answer(7) == answer(7) != answer(8)
    assert answer(2**64 - 1) == answer(2**64 - 1)
    for seed in (0, -7):
        assert len({answer(seed) for _ in range(3)}) > 1


@pytest.mark.parametrize("seed", [2**64 - 1, 2**63, 1e19, 7.9, -(2**63)])
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_seeds_of_64_bits_are_taken_and_others_are_not(seed: float, path: str, nonsense: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", "max_tokens": 1}
    if path != "chat/completions":
        body.pop("messages")
    if path == "responses":
        body.pop("prompt")
    assert nonsense.post({**body, "seed": seed}, f"/v1/{path}").status_code == 200
    for wrong in (2**64, -(2**63) - 1):
        answer = nonsense.post({**body, "seed": wrong}, f"/v1/{path}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seed")
        assert f"from {-(2**63)} to {2**64 - 1}" in answer.json()["error"]["message"]


ODD = (b"\xe2\x80", b"\xe2\x80\xa6", b"\xf0\x9f", b" \xf0", b"\xff\\", "\ufffd".encode(), b"a")


def test_tokens_of_completions_that_are_no_characters_keep_their_bytes() -> None:
    top = tuple((piece, -1.0 - i) for i, piece in enumerate(ODD))
    told = CompletionLogprobs(len(ODD)).write([TokenLogprob(piece, value, top) for piece, value in top])
    names = ["bytes:\\xe2\\x80", "…", "bytes:\\xf0\\x9f", "bytes: \\xf0", "bytes:\\xff\\x5c", "\ufffd", "a"]
    assert told["tokens"] == names
    for name, value, entry in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert list(entry) == names[::-1]
        assert entry[name] == value
