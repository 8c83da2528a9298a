"""Continuations from lines, answers of chat completions and folders; what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ds4
from ds4.chat import render
from ds4.errors import Ds4Error
from ds4.evals.cases import Case, Reference, read_cases
from tests.quality_models import text_engine

USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer() -> ds4.Tokenizer:
    return text_engine().tokenizer


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return path


def logprobs_of(tokenizer: ds4.Tokenizer, ids: list[int], **extra: Any) -> list[dict[str, Any]]:
    return [
        {"token": "?", "bytes": list(tokenizer.token_bytes(id)), "logprob": -0.5 - n, **extra}
        for n, id in enumerate(ids)
    ]


def test_every_way_to_write_a_case(tokenizer: ds4.Tokenizer, tmp_path: Path) -> None:
    ids = tokenizer.encode("Hello you")
    assert len(ids) > 1
    prompt = tokenizer.encode_chat(render(USER, thinking=False))
    lines = [
        {"id": "text", "prompt": "Hi", "continuation": "Hello you"},
        {"id": 7, "messages": USER, "tokens": ids},
        {"prompt": "Hi", "thinking": True, "logprobs": logprobs_of(tokenizer, ids)},
        {"id": "whole", "rendered": "<｜begin▁of▁sentence｜>x", "continuation": "Hello you"},
        {"id": "message", "prompt": "Hi", "response": {"choices": [{"message": {"content": "Hello you"}}]}},
    ]
    cases = read_cases(write(tmp_path / "a.jsonl", *lines), tokenizer)
    assert [c.id for c in cases] == ["text", "7", "line 3", "whole", "message"]
    assert all(c.tokens == tuple(ids) for c in cases)
    assert [list(c.prompt) for c in cases] == [
        prompt,
        prompt,
        tokenizer.encode_chat(render(USER)),
        [tokenizer.bos, *tokenizer.encode("x")],
        prompt,
    ]
    assert [len(c.references) for c in cases] == [0, 0, len(ids), 0, 0]


def test_references_of_the_same_tokens(tokenizer: ds4.Tokenizer, tmp_path: Path) -> None:
    ids = tokenizer.encode("Hello you")
    top = [
        {"token": "a", "logprob": -0.1},
        {"token": "<｜end▁of▁sentence｜>", "bytes": None, "logprob": -2},
        {"token": "no token of this vocabulary at all", "logprob": -3},
        {"token": "b", "logprob": -9999.0},  # how some services write a probability of 0
    ]
    content = logprobs_of(tokenizer, ids, top_logprobs=top)
    response = {"choices": [{"message": {"content": "ignored"}, "logprobs": {"content": content}}]}
    (a,) = tokenizer.encode("a")
    wanted = Reference(-0.5, ((a, -0.1), (tokenizer.eos, -2.0)))
    cases = read_cases(
        write(
            tmp_path / "a.jsonl",
            {"id": "1", "prompt": "Hi", "response": response},
            {"id": "2", "prompt": "Hi", "logprobs": {"content": content}, "tokens": ids},
            {"id": "3", "prompt": "Hi", "logprobs": content, "tokens": ids[:1]},
            {
                "id": "4",
                "prompt": "Hi",
                "logprobs": [{"token": "\ue000 unknown", "logprob": -1}],
                "continuation": "Hello you",
            },
        ),
        tokenizer,
    )
    assert [c.tokens for c in cases] == [tuple(ids), tuple(ids), (ids[0],), tuple(ids)]
    assert cases[0].references[0] == wanted
    assert cases[0].references[1].logprob == -1.5
    assert cases[1].references == cases[0].references
    assert cases[2].references == cases[3].references == ()  # of other tokens


def test_a_published_folder(tokenizer: ds4.Tokenizer, tmp_path: Path) -> None:
    """The manifest names files as they lay where it was made."""
    ids = tokenizer.encode("Hello you")
    response = {
        "choices": [{"message": {"content": "Hello you"}, "logprobs": {"content": logprobs_of(tokenizer, ids)}}]
    }
    for folder, name, text in (
        ("prompts", "case_000.txt", "Hi"),
        ("continuations", "case_000.txt", "Hello you"),
        ("responses", "case_000.json", json.dumps(response, indent=2)),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text, encoding="utf-8")
    old = "some/where/data"
    columns = [f"{old}/prompts/case_000.txt", f"{old}/continuations/case_000.txt", f"{old}/responses/case_000.json"]
    manifest = tmp_path / "manifest.tsv"
    manifest.write_text("# id\tprompt_file\n" + "\t".join(["case_000", *columns]) + "\n", encoding="utf-8")
    expected = Case(
        "case_000",
        tuple(tokenizer.encode_chat(render(USER, thinking=False))),
        tuple(ids),
        tuple(Reference(-0.5 - n, ()) for n in range(len(ids))),
    )
    assert read_cases(tmp_path, tokenizer) == read_cases(manifest, tokenizer) == [expected]
    manifest.write_text("\t".join(["case_000", *columns[:2]]), encoding="utf-8")
    assert read_cases(tmp_path, tokenizer)[0].references == ()
    manifest.write_text("a\tb", encoding="utf-8")
    with pytest.raises(Ds4Error, match="line 1: 2 columns"):
        read_cases(tmp_path, tokenizer)
    manifest.write_text("a\tno.txt\tno.txt", encoding="utf-8")
    with pytest.raises(Ds4Error, match=r"line 1: no\.txt is not there"):
        read_cases(tmp_path, tokenizer)
    (tmp_path / "responses" / "case_000.json").write_text("\n", encoding="utf-8")
    manifest.write_text("\t".join(["case_000", *columns]), encoding="utf-8")
    with pytest.raises(Ds4Error, match="the file is empty"):
        read_cases(tmp_path, tokenizer)


GOOD = {"prompt": "Hi", "continuation": "x"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ({"prompt": "Hi"}, "one of tokens, logprobs, response and continuation"),
        ({"continuation": "x"}, "one of prompt, messages and rendered is needed, found none"),
        ({**GOOD, "rendered": "y"}, r"one of prompt.* found \['prompt', 'rendered'\]"),
        ({**GOOD, "prompt": 1}, "prompt must be a string"),
        ({**GOOD, "prompt": None, "messages": [{"role": "x"}]}, "role 'x' is not known"),
        ({**GOOD, "prompt": None, "messages": 5}, "messages must be a list"),
        ({"rendered": "", "continuation": "x"}, "rendered must be"),
        ({**GOOD, "continuation": ""}, "the continuation is empty"),
        ({**GOOD, "tokens": []}, "the continuation is empty"),
        ({**GOOD, "tokens": [99999]}, "tokens must be a list of ids from 0 to 4095"),
        ({**GOOD, "tokens": [True]}, "tokens must be a list"),
        ({**GOOD, "logprobs": 5}, "logprobs must be a list of objects"),
        ({**GOOD, "logprobs": [{"bytes": [300]}]}, "neither bytes"),
        ({**GOOD, "logprobs": [{}]}, "neither bytes"),
        ({**GOOD, "logprobs": [{"token": "x", "logprob": "y"}]}, "logprob must be a number"),
        ({**GOOD, "logprobs": [{"token": "x", "top_logprobs": [1]}]}, "top_logprobs must be a list"),
        ({**GOOD, "response": {"choices": []}}, "no answer of chat completions"),
        ({**GOOD, "thinking": 1}, "thinking must be true or false"),
        ({**GOOD, "id": ""}, "id must be a string"),
    ],
    ids=str,
)
def test_lines_that_are_no_cases_are_named(tokenizer: ds4.Tokenizer, tmp_path: Path, line: Any, says: str) -> None:
    path = write(tmp_path / "a.jsonl", GOOD, line)
    with pytest.raises(Ds4Error, match=f"a.jsonl, line 2: .*{says}"):
        read_cases(path, tokenizer)


def test_sets_that_cannot_be_used(tokenizer: ds4.Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(Ds4Error, match="there are no cases"):
        read_cases(write(tmp_path / "a.jsonl", ""), tokenizer)
    with pytest.raises(Ds4Error, match="the id 'a' is there twice"):
        read_cases(write(tmp_path / "b.jsonl", {**GOOD, "id": "a"}, {**GOOD, "id": "a"}), tokenizer)
    with pytest.raises(Ds4Error, match=r"manifest\.tsv: cannot be read"):
        read_cases(tmp_path, tokenizer)
