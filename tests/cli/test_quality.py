"""`ds4 --imatrix-out`, `ds4 --perplexity-file`, `ds4-imatrix-text` and `ds4-score` on a small random model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ds4.cli import imatrix_text, quality, score
from ds4.cli.main import main
from ds4.cli.options import Options, parse
from ds4.engine import Engine
from ds4.errors import Ds4Error
from ds4.evals.perplexity import perplexity
from ds4.quantize import collect as collecting
from ds4.quantize.imatrix import load

CONVERSATION = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
CASES = [{"id": "a", "prompt": "Hi", "continuation": "Hello!"}, {"id": "b", "prompt": "2 + 2?", "continuation": "4"}]


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(json.dumps({**CONVERSATION, "thinking": t}) for t in (True, False)), encoding="utf-8")
    return path


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(map(json.dumps, CASES)), encoding="utf-8")
    return path


def test_flags() -> None:
    argv = "--imatrix-dataset a --imatrix-out b --imatrix-max-prompts 3 --imatrix-max-tokens 4 -c 9"
    assert parse(argv.split()) == Options(
        imatrix_dataset="a", imatrix_out="b", imatrix_max_prompts=3, imatrix_max_tokens=4, context=9
    )
    assert parse(["--perplexity-file", "a", "--raw-prompt"]) == Options(perplexity_file="a", raw_prompt=True)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--imatrix-out a", "--imatrix-out needs the text"),
        ("--imatrix-dataset a", "--imatrix-dataset belongs to --imatrix-out"),
        ("--imatrix-max-tokens 5", "--imatrix-max-tokens belongs to --imatrix-out"),
        ("--imatrix-out - --imatrix-dataset a", "binary numbers"),
        ("--imatrix-out b --imatrix-dataset a --perplexity-file c", "cannot run together"),
        ("--imatrix-out b --imatrix-dataset a -p Hi", "--imatrix-out takes its text from a file"),
        ("--perplexity-file a --prompt-file b", "--perplexity-file takes its text from a file"),
        ("--perplexity-file a -c 2", "--ctx 2 is too small"),
        ("--imatrix-out b --imatrix-dataset a --imatrix-max-prompts 0", "'0' is not a whole number from 1 on"),
    ],
)
def test_flags_that_do_not_fit(argv: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv.split()) == 2
    assert says in capsys.readouterr().err


def test_importance_of_a_file(
    embedded: Path, engine: Engine, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "a.dat", tmp_path / "a.txt"
    assert main(["--imatrix-dataset", str(conversations), "--imatrix-out", str(out)]) == 0
    printed = capsys.readouterr().out
    found = load(out)
    s = engine.shape
    tokens = int(found.counts["blk.0.ffn_up_exps.weight"].sum()) // s.experts_used
    assert printed.startswith(f"{out}: 2 prompts, {tokens} tokens, ")
    assert len(found.vectors) == 3 * s.layers
    assert found.vectors["blk.3.ffn_down_exps.weight"].shape == (s.experts, s.expert_hidden)
    assert found.dataset == "talk.jsonl"

    # The same prompts as rendered text give the same bytes but for the dataset's name.
    assert imatrix_text.main([str(conversations), "-o", str(text)]) == 0
    assert main(["--imatrix-dataset", str(text), "--imatrix-out", str(tmp_path / "b.dat")]) == 0
    again = load(tmp_path / "b.dat")
    assert all((again.vectors[name] == vector).all() for name, vector in found.vectors.items())
    capsys.readouterr()

    argv = ["--imatrix-dataset", str(text), "--imatrix-out", str(tmp_path / "c.dat"), "-c", "8"]
    assert main([*argv, "--imatrix-max-tokens", "11"]) == 0
    captured = capsys.readouterr()
    assert "2 prompts, 11 tokens" in captured.out
    assert "cut off at 8 tokens" in captured.err


def test_a_stopped_collection_goes_on(
    embedded: Path,
    conversations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ["--imatrix-dataset", str(conversations), "--imatrix-out", str(tmp_path / "a.dat")]
    evaluate = collecting.Collector.evaluate
    stop = [False]

    def then_stop(self: collecting.Collector, *args: object) -> None:
        evaluate(self, *args)  # type: ignore[arg-type]
        stop[0] = True

    with monkeypatch.context() as patched:
        patched.setattr(collecting.Collector, "evaluate", then_stop)
        patched.setattr(quality, "interrupts", lambda: _Interrupts(stop))
        assert main(argv) == 130
    assert "stopped after 1 prompts; the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "a.dat").exists()
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "went on behind the 1 prompts" in captured.err
    assert "2 prompts" in captured.out
    assert not (tmp_path / "a.dat.progress").exists()


class _Interrupts:
    """Stands for `interrupts`: a signal that came when the list says so."""

    def __init__(self, stop: list[bool]) -> None:
        self.stop = stop

    def __enter__(self) -> object:
        return lambda: self.stop[0]

    def __exit__(self, *_: object) -> None:
        pass


def test_another_model_does_not_go_on(
    embedded: Path,
    conversations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    argv = ["--imatrix-dataset", str(conversations), "--imatrix-out", str(tmp_path / "a.dat")]
    monkeypatch.setattr(quality, "interrupts", lambda: _Interrupts([True]))
    assert main(argv) == 130
    other = tmp_path / "other.gguf"
    data = bytearray(embedded.read_bytes())
    data[-100] ^= 1
    other.write_bytes(data)
    capsys.readouterr()
    assert main([*argv, "-m", str(other)]) == 1
    assert "the progress of a run with another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dataset", "out", "says"),
    [
        ("none.jsonl", "a.dat", "none.jsonl: cannot be read"),
        ("bad.jsonl", "a.dat", "bad.jsonl, line 1: it has neither messages"),
        ("talk.jsonl", "no/a.dat", "no such folder; make it first"),
        ("bad.jsonl", "bad.jsonl", "which would be replaced"),
        ("talk.jsonl", ".", "a directory"),
    ],
)
def test_mistakes_of_imatrix(
    dataset: str,
    out: str,
    says: str,
    embedded: Path,
    conversations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n", encoding="utf-8")
    assert main(["--imatrix-dataset", str(tmp_path / dataset), "--imatrix-out", str(tmp_path / out)]) == 1
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


def test_perplexity_of_a_file(
    embedded: Path, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, text = tmp_path / "a.txt", "The king <think> had three sons. " * 5
    path.write_text(text, encoding="utf-8")
    for flags, ids in (([], engine.tokenizer.encode(text)), (["--raw-prompt"], engine.tokenizer.encode_chat(text))):
        assert main(["--perplexity-file", str(path), "-c", "32", *flags]) == 0
        found = re.fullmatch(
            r"(\d+) tokens in (\d+) windows of 32: NLL ([\d.]+) \+- [\d.]+ nats a token, perplexity ([\d.]+)\n",
            capsys.readouterr().out,
        )
        assert found
        expected = perplexity(engine, ids, 32)
        assert (int(found[1]), int(found[2])) == (len(ids), expected.windows)
        assert float(found[3]) == pytest.approx(expected.nll, abs=1e-4)
        assert float(found[4]) == pytest.approx(expected.value, rel=1e-3)
    path.write_text("", encoding="utf-8")
    assert main(["--perplexity-file", str(path)]) == 1
    assert "there is no text to score" in capsys.readouterr().err
    assert main(["--perplexity-file", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_building_text(conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o.txt"
    assert imatrix_text.main([str(conversations), "--mode", "both", "-o", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{out}: 2 prompts, ")
    assert captured.err == "ds4-imatrix-text: 2 left out: the same as another\n"
    assert imatrix_text.main([str(tmp_path / "none.jsonl"), "-o", str(out)]) == 1
    assert capsys.readouterr().err.startswith("ds4-imatrix-text: ")
    for argv in ([], [str(conversations)], [str(conversations), "-o", "x", "--mode", "y"]):
        assert imatrix_text.main(argv) == 2


def test_scoring_and_comparing(
    model_file: Path, cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.json", "b.json"):
        assert score.main([str(cases), "-m", str(model_file), "-o", str(tmp_path / name)]) == 0
        assert "2 cases, " in capsys.readouterr().out
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    value = json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert (value["model"], value["source"]) == ("random.gguf", "cases.jsonl")
    assert [case["id"] for case in value["cases"]] == ["a", "b"]
    assert score.main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert "B wins 0, loses 0, ties 2\n" in capsys.readouterr().out
    argv = [str(cases), "-m", str(model_file), "-o", str(tmp_path / "c.json"), "--max-cases", "1"]
    assert score.main(argv) == 0
    capsys.readouterr()
    assert score.main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "c.json")]) == 0
    assert "not compared: 1 cases that only A has, 0 that only B has" in capsys.readouterr().out


def test_flags_of_score_reach_the_model(cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(options: Options, **_: object) -> None:
        assert options == Options(model="m.gguf", context=9, prefill_chunk=4, quality=True, expert_layout="b")
        raise Ds4Error("seen")

    monkeypatch.setattr(score, "load_engine", load)
    flags = "-m m.gguf -c 9 --prefill-chunk 4 --quality --expert-layout b"
    assert score.main([str(cases), "-o", str(tmp_path / "r.json"), *flags.split()]) == 1


def test_a_better_model_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ds4.evals.score import Results, Score

    for name, nll in (("a.json", 2.0), ("b.json", 1.0)):
        Results("m", "c", [Score("x", 2, nll, [nll / 2] * 2, False, 0)]).save(tmp_path / name)
    assert score.main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    printed = capsys.readouterr().out
    assert "NLL a token: A 1.00000, B 0.50000" in printed
    assert "B wins 1, loses 0, ties 0" in printed
    assert "B is best in: x (-0.5000)" in printed


def test_mistakes_of_score(model_file: Path, cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "r.json")
    for argv in (
        [],
        [str(cases)],
        ["--compare", "a"],
        ["--compare", "a", "b", "-o", out],
        [str(cases), "-o", out, "-c", "1"],
        [str(cases), "-o", out, "--expert-layout", "c"],
    ):
        assert score.main(argv) == 2
        assert capsys.readouterr().err.startswith("ds4-score: ")
    for argv, says in (
        ([str(tmp_path / "none.jsonl"), "-m", str(model_file), "-o", out], "cannot be read"),
        ([str(cases), "-m", str(tmp_path / "none.gguf"), "-o", out], "none.gguf"),
        ([str(cases), "-m", str(model_file), "-o", out, "-c", "4"], "raise --ctx"),
        ([str(cases), "-m", str(model_file), "-o", str(cases)], "which would be replaced"),
        ([str(cases), "-m", str(model_file), "-o", str(model_file)], "which would be replaced"),
        ([str(cases), "-m", str(model_file), "-o", str(tmp_path / "no" / "r.json")], "no such folder; make it first"),
        (["--compare", str(cases), str(cases)], "not a result file"),
    ):
        assert score.main(argv) == 1
        err = capsys.readouterr().err
        assert says in err
        assert "Traceback" not in err
    assert not (tmp_path / "r.json").exists()


def test_all_of_it_on_the_model_that_comes_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the model itself says is probable."""
    assert main(["--nothink", "--temp", "0", "-p", "What is 2 + 2?", "-n", "12"]) == 0
    answer = capsys.readouterr().out.strip()
    cases, talks = tmp_path / "cases.jsonl", tmp_path / "talks.jsonl"
    cases.write_text(json.dumps({"id": "sum", "prompt": "What is 2 + 2?", "continuation": answer}), encoding="utf-8")
    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": answer}]
    talks.write_text(json.dumps({"messages": messages, "thinking": False}), encoding="utf-8")
    assert score.main([str(cases), "-o", str(tmp_path / "r.json")]) == 0
    (case,) = json.loads((tmp_path / "r.json").read_text("utf-8"))["cases"]
    assert case["greedy_prefix"] == case["tokens"]
    assert case["nll"] / case["tokens"] < 0.5

    assert imatrix_text.main([str(talks), "-o", str(tmp_path / "talks.txt")]) == 0
    assert main(["--imatrix-dataset", str(tmp_path / "talks.txt"), "--imatrix-out", str(tmp_path / "a.dat")]) == 0
    found = load(tmp_path / "a.dat")
    assert {vector.shape for vector in found.vectors.values()} == {(8, 256)}
    assert len(found.vectors) == 18

    (tmp_path / "t.txt").write_text((tmp_path / "talks.txt").read_text("utf-8").split("\n", 3)[3], encoding="utf-8")
    capsys.readouterr()
    assert main(["--perplexity-file", str(tmp_path / "t.txt"), "--raw-prompt"]) == 0
    assert float(capsys.readouterr().out.rsplit(" ", 1)[1]) < 4096 / 4  # of a question, which no training asked for
