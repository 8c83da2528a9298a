"""Tokens, logits, log probabilities, and decode against prefill."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ds4
from ds4.cli import diagnostics
from ds4.engine import Engine
from tests.cli.scripted import ScriptedRunner

PROMPT = [0, 300, 301, 302, 303, 304]


@pytest.fixture(scope="module")
def logits(engine: Engine) -> torch.Tensor:
    """The logits after the prompt."""
    session = engine.session()
    session.sync(PROMPT)
    return session.logits


def test_tokens_are_listed_with_position_id_and_text(tokenizer: ds4.Tokenizer) -> None:
    out = io.StringIO()
    ids = [tokenizer.bos, *tokenizer.encode("a\n€")]
    diagnostics.write_tokens(tokenizer, ids, out)
    lines = [line.split(maxsplit=2) for line in out.getvalue().splitlines()]
    assert [int(position) for position, _, _ in lines] == list(range(len(ids)))
    assert [int(id) for _, id, _ in lines] == ids
    assert json.loads(lines[0][2]) == "<｜begin▁of▁sentence｜>"
    assert json.loads(lines[1][2]) == "a"


@pytest.mark.parametrize("name", ["x.npz", "x.npy", "x.bin"])
def test_logits_are_written_in_the_format_of_the_name(
    name: str, engine: Engine, logits: torch.Tensor, tmp_path: Path
) -> None:
    path = tmp_path / name
    diagnostics.write_logits(engine, PROMPT, str(path))
    if name.endswith(".npz"):
        with np.load(path) as stored:
            assert stored["tokens"].tolist() == PROMPT
            read = stored["logits"]
    elif name.endswith(".npy"):
        read = np.load(path)
    else:
        read = np.frombuffer(path.read_bytes(), dtype="<f4")
    assert read.dtype == np.float32
    assert np.array_equal(read, logits.numpy())


def test_a_file_that_cannot_be_written_is_named(engine: Engine, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "x.npz"):
        with pytest.raises(ds4.Ds4Error, match="cannot be written") as error:
            diagnostics.write_logits(engine, PROMPT, str(path))
        assert str(path) in str(error.value)
    with pytest.raises(ds4.Ds4Error, match="cannot be written"):
        diagnostics.write_logprobs(engine, PROMPT, str(tmp_path), 1, 1)


def _logprobs(engine: Engine, path: Path, steps: int, top_k: int) -> dict[str, Any]:
    diagnostics.write_logprobs(engine, PROMPT, str(path), steps, top_k)
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_no_more_logprobs_than_tokens_are_promised(engine: Engine, tmp_path: Path) -> None:
    result = _logprobs(engine, tmp_path / "out.json", 1, 10**9)
    assert result["top_k"] == len(result["steps"][0]["top_logprobs"]) == engine.shape.vocab


def test_logprobs_hold_a_greedy_continuation(engine: Engine, logits: torch.Tensor, tmp_path: Path) -> None:
    result = _logprobs(engine, tmp_path / "out.json", 3, 5)
    assert {k: v for k, v in result.items() if k != "steps"} == {
        "source": "ds4", "prompt_tokens": len(PROMPT), "ctx": engine.context, "top_k": 5,
    }  # fmt: skip
    assert [step["step"] for step in result["steps"]] == [0, 1, 2]
    first = result["steps"][0]
    expected = torch.log_softmax(logits.double(), 0)
    best = torch.topk(logits, 5).indices.tolist()
    assert [top["token"]["id"] for top in first["top_logprobs"]] == best
    for top in first["top_logprobs"]:
        id = top["token"]["id"]
        assert top["logit"] == float(logits[id])
        assert top["logprob"] == pytest.approx(float(expected[id]), abs=1e-9)
        assert bytes(top["token"]["bytes"]) == engine.tokenizer.token_bytes(id)
    assert first["selected"]["id"] == best[0]

    session = engine.session()
    session.sync([*PROMPT, *(step["selected"]["id"] for step in result["steps"][:2])])
    assert result["steps"][2]["selected"]["id"] == int(session.logits.argmax())


def test_logprobs_end_with_the_end_of_the_sentence(engine: Engine, tokenizer: ds4.Tokenizer, tmp_path: Path) -> None:
    scripted = Engine(ScriptedRunner(engine.shape, tokenizer, []), tokenizer)
    result = _logprobs(scripted, tmp_path / "out.json", 10, 2)
    assert [step["selected"]["id"] for step in result["steps"]] == [tokenizer.eos]


def test_decoding_equals_prefilling(engine: Engine) -> None:
    # Enough steps for the window, both compressors and the selection of rows to be in use.
    assert diagnostics.decode_consistency(engine, PROMPT, 60) == (61, 0.0)


def test_a_prefill_that_differs_is_reported(engine: Engine, tokenizer: ds4.Tokenizer) -> None:
    class Drifting(ScriptedRunner):
        def evaluate(self, batch: Any, wanted: Any, taps: Any, edits: Any) -> list[torch.Tensor | None]:
            results = super().evaluate(batch, wanted, taps, edits)
            return [r if r is None or len(ids) == 1 else r + 0.25 for r, (_, ids) in zip(results, batch, strict=True)]

    drifting = Engine(Drifting(engine.shape, tokenizer, []), tokenizer)
    assert diagnostics.decode_consistency(drifting, PROMPT, 4) == (5, 0.25)


def test_decode_consistency_must_fit_the_context(engine: Engine) -> None:
    with pytest.raises(ds4.ContextOverflowError):
        diagnostics.decode_consistency(engine, PROMPT, engine.context)
