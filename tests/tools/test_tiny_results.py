"""Saved measurements: continued where they stopped, refused for another model, printed as a table; reasons."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import evaluate
import pytest
from data.cases import TASKS
from evaluate import PART, ROWS, Outcome, Part, Results, report, table
from explain import explain, kind_of

SETTINGS = {"model": "abc", "cases": 80, "seed": 1, "sampling": "greedy"}
FIRST, SECOND = Part("call", "topk", 0, 40), Part("call", "topk", 40, 80)


def outcome(right: int, cases: int = 40, **more: int) -> Outcome:
    failures = [{"reason": "no call", "kind": "no call", "text": str(n)} for n in range(cases - right)]
    kinds = Counter({"no call": cases - right}) if right < cases else Counter()
    return Outcome(right=right, cases=cases, reasons=Counter(kinds), kinds=kinds, failures=failures, **more)


def test_every_task_has_a_row() -> None:
    rows = {name for name, _, _ in ROWS}
    assert set(TASKS) <= rows
    assert {f"recall_far ({s})" for s in ("random", "all")} <= rows


def test_results_are_written_with_every_part_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "greedy.json"
    results = Results(SETTINGS, path)
    results.add(SECOND, outcome(30, thinking_turns=5, thinking_closed=4))
    assert json.loads(path.read_text())["tasks"]["call"]["right"] == 30
    again = Results(SETTINGS, path)
    assert again.has(SECOND)
    assert not again.has(FIRST)
    assert not again.has(Part("call", "random", 40, 80))
    again.add(FIRST, outcome(40, thinking_turns=3, thinking_closed=3))
    whole = Results(SETTINGS, path).outcomes()["call"]
    assert (whole.right, whole.cases, whole.kinds) == (70, 80, Counter({"no call": 10}))
    assert (whole.thinking_turns, whole.thinking_closed) == (8, 7)
    assert len(whole.failures) == evaluate.SHOWN
    assert not list(tmp_path.glob("*.new"))


def test_results_of_another_model_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "greedy.json"
    Results(SETTINGS, path).add(FIRST, outcome(1))
    with pytest.raises(SystemExit, match="another model"):
        Results({**SETTINGS, "model": "def"}, path)
    with pytest.raises(SystemExit, match="another sampling"):
        Results({**SETTINGS, "sampling": "default"}, path)


def test_the_table_has_a_column_for_each_file(tmp_path: Path) -> None:
    for sampling, right in (("greedy", 38), ("default", 36)):
        results = Results({**SETTINGS, "sampling": sampling}, tmp_path / f"{sampling}.json")
        results.add(FIRST, outcome(right, thinking_turns=10, thinking_closed=10))
        if sampling == "greedy":
            results.add(Part("recall_far", "all", 0, 40), outcome(20))
    text = table([tmp_path / "greedy.json", tmp_path / "default.json"])
    lines = text.splitlines()
    assert lines[0] == "| task | wanted | greedy, seed 1 | default, seed 1 |"
    assert "| 93 % | 38 / 40 = 95.0 % (83.5 to 98.6) | 36 / 40 = 90.0 % (76.9 to 96.0) |" in lines[2]
    assert "10 / 10 = 100.0 %" in lines[3]
    assert lines[4] == "| ... indexer replaced by all rows |  | 20 / 40 = 50.0 % (35.2 to 64.8) |  |"
    assert len(lines) == 5


def test_a_measurement_is_continued_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Part] = []

    def measure(plan: evaluate.Plan, todo: list[Part], processes: int, results: Results) -> None:
        for part in todo[: 2 - len(ran)]:
            ran.append(part)
            results.add(part, outcome(part.end - part.start, part.end - part.start))

    monkeypatch.setattr(evaluate, "measure", measure)
    options = ["--cases", str(PART + 5), "--tasks", "chat,recall_far", "--index-selection", "topk,all"]
    options += ["--json", str(tmp_path / "r.json"), "--done", str(tmp_path / "done")]
    assert evaluate.main(options) == 2
    assert "4 of 6 parts are missing" in capsys.readouterr().err
    assert not (tmp_path / "done").exists()
    assert [(p.name, p.start, p.end) for p in ran] == [("chat", 0, PART), ("chat", PART, PART + 5)]
    ran.clear()
    assert evaluate.main(options) == 2
    ran.clear()
    assert evaluate.main(options) == 0
    assert [p.name for p in ran] == ["recall_far (all)"] * 2
    assert (tmp_path / "done").exists()
    assert f"| recall_far (all) | {PART + 5} / {PART + 5} |" in capsys.readouterr().out


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evaluate.main(["--model", "/nowhere/model.gguf"])
    assert "/nowhere/model.gguf" in capsys.readouterr().err


def test_parts_of_a_task_run_in_processes_and_keep_to_the_time(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ["--cases", "4", "--seed", "11", "--tasks", "arithmetic", "--processes", "1", "--json", str(path)]
    assert evaluate.main([*options, "--within", "0"]) == 2
    assert not path.exists()
    assert evaluate.main(options) == 0
    assert json.loads(path.read_text())["tasks"]["arithmetic"]["cases"] == 4


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, "true or false"),
        (3.5, "number"),
        ([1], "JSON"),
        ("a\nb", "lines"),
        ("ann@example.com", "address"),
        ("https://example.com/a", "address"),
        ("src/main.py", "path"),
        ("main.py", "path"),
        ("red lamp", "words"),
        ("Oslo", "word"),
    ],
)
def test_values_have_a_kind(value: object, kind: str) -> None:
    assert kind_of(value) == kind


def block(*calls: tuple[str, dict[str, object]]) -> str:
    inner = "".join(
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">'
            f"{v if isinstance(v, str) else json.dumps(v)}</｜DSML｜parameter>\n"
            for k, v in args.items()
        )
        + "</｜DSML｜invoke>\n"
        for name, args in calls
    )
    return f"\n\n<｜DSML｜tool_calls>\n{inner}</｜DSML｜tool_calls>"


TOOLS = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("get", "put")]


@pytest.mark.parametrize(
    ("reason", "calls", "kind"),
    [
        ("wrong tool", [("put", {"city": "Oslo"})], "another tool"),
        ("wrong tool", [("gets", {"city": "Oslo"})], "misspelled tool"),
        ("wrong tool", [("get", {"city": "Oslo"}), ("put", {})], "too many calls"),
        ("wrong arguments", [("get", {})], "argument missing"),
        ("wrong arguments", [("get", {"city": "Oslo", "n": 1})], "argument too many"),
        ("wrong arguments", [("get", {"city": 7})], "value of another type"),
        ("wrong arguments", [("get", {"city": "Rome"})], "word from elsewhere"),
        ("wrong arguments", [("get", {"city": "Osaka"})], "word made up"),
        ("no call", [], "no call"),
    ],
)
def test_wrong_calls_are_explained(reason: str, calls: list[tuple[str, dict[str, object]]], kind: str) -> None:
    want = {"task": "call", "calls": [["get", {"city": "Oslo"}]]}
    text = block(*calls) if calls else "Hello."
    assert explain(want, reason, text, False, TOOLS, "Oslo, not Rome") == kind


def test_wrong_answers_are_explained() -> None:
    want = {"task": "recall", "value": "tiger"}
    assert explain(want, "wrong value", "The word is lion.", False, [], "lion and tiger") == (
        "answer's value from elsewhere"
    )
    assert explain(want, "wrong value", "root", False, [], "lion and tiger") == "answer's value made up"
    assert explain(want, "empty answer", "", False, [], "") == "empty answer"


def test_the_report_names_the_kinds() -> None:
    assert "no call 2" in report({"call": outcome(38)})
