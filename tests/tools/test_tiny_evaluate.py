"""The evaluation: checkers accept the data's answers and reject changed ones; an oracle is judged as perfect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from data import Generator
from data.cases import DISTANCES, TASKS, Case, Cases, check, holds, same
from data.generator import TOKENIZER
from evaluate import Outcome, Runner, report, wilson
from tokenizers import Tokenizer as FastTokenizer

import ds4
from ds4.engine.engine import Engine
from ds4.gguf.shape import TINY
from ds4.tokenizer import Tokenizer

EOS = "<｜end▁of▁sentence｜>"


@pytest.fixture(scope="module")
def cases() -> Cases:
    return Cases(3, FastTokenizer.from_file(str(TOKENIZER)))


@pytest.fixture(scope="module")
def made(cases: Cases) -> dict[str, list[Case]]:
    return {task: cases.make(task, 24) for task in TASKS}


def gold(case: Case, turn: int) -> str:
    return case.gold(turn).removesuffix(EOS)


def test_cases_are_the_same_for_a_seed_and_differ_between_seeds(cases: Cases, made: dict[str, list[Case]]) -> None:
    again = Cases(3, cases.tokenizer)
    other = Cases(4, cases.tokenizer)
    for task in ("call", "recall_near", "arithmetic"):
        prompts = [c.prompt(c.turns[0]) for c in made[task]]
        assert [c.prompt(c.turns[0]) for c in again.make(task, 24)] == prompts
        assert [c.prompt(c.turns[0]) for c in other.make(task, 24)] != prompts


def test_unknown_task_is_named(cases: Cases) -> None:
    with pytest.raises(ValueError, match="unknown task 'dance'"):
        cases.make("dance", 1)


@pytest.mark.parametrize("task", TASKS)
def test_the_data_answers_are_right(made: dict[str, list[Case]], task: str) -> None:
    assert len(made[task]) == 24
    for case in made[task]:
        for turn in case.turns:
            assert case.gold(turn).endswith(EOS)
            assert case.check(turn, gold(case, turn)) == ""
    if not task.startswith("recall"):
        assert {case.thinking for case in made[task]} == {True, False}


@pytest.mark.parametrize("task", ["call", "parallel", "chain"])
def test_changed_calls_are_wrong(made: dict[str, list[Case]], task: str) -> None:
    changed = 0
    for case in made[task]:
        turn = case.turns[0]
        text = gold(case, turn)
        calls = case.dialog.checks[turn]["calls"]
        assert (
            case.check(turn, text.replace(f'invoke name="{calls[0][0]}"', 'invoke name="other_tool"')) == "wrong tool"
        )
        assert case.check(turn, text.split("\n\n<｜DSML｜")[0]) == "no call"
        assert case.check(turn, text.split("</｜DSML｜tool_calls>")[0].rsplit("</｜DSML｜invoke>", 1)[0]) != ""
        for key, value in calls[0][1].items():
            marked = f'parameter name="{key}" string="'
            assert case.check(turn, text.replace(marked, f'parameter name="{key}x" string="', 1)) == "wrong arguments"
            if isinstance(value, str) and value:
                assert case.check(turn, text.replace(f">{value}<", f">{value}z<")) != ""
            changed += 1
    assert changed > 20


@pytest.mark.parametrize("task", ["result", "arithmetic", "chat", "recall_near", "none"])
def test_other_answers_are_wrong(made: dict[str, list[Case]], task: str) -> None:
    for case in made[task]:
        turn = case.turns[0]
        lead = "I think.</think>" if case.thinking else ""
        assert case.check(turn, lead) == "empty answer"
        if task != "none":
            assert case.check(turn, lead + "Purple elephants sing 77777 songs.") != ""
        if case.thinking:
            assert case.check(turn, gold(case, turn).replace("</think>", "")) == "thinking not closed"
        if case.dialog.tools:
            name = case.dialog.tools[0]["function"]["name"]
            call = f'\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{name}">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
            assert case.check(turn, lead + call) == "unwanted call"


def test_order_of_parallel_calls_does_not_matter_but_their_number_does() -> None:
    tools = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("a", "b")]
    want = {"task": "parallel", "calls": [["a", {"x": 1}], ["b", {"y": "z"}]]}

    def block(*calls: tuple[str, str, str]) -> str:
        inner = "".join(
            f'<｜DSML｜invoke name="{n}">\n<｜DSML｜parameter name="{k}" string="{str(not v.isdigit()).lower()}">{v}'
            "</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
            for n, k, v in calls
        )
        return f"\n\n<｜DSML｜tool_calls>\n{inner}</｜DSML｜tool_calls>"

    a, b = ("a", "x", "1"), ("b", "y", "z")
    assert check(want, block(a, b), False, tools) == check(want, block(b, a), False, tools) == ""
    assert check(want, block(a), False, tools) == check(want, block(a, a), False, tools) == "wrong tool"
    assert check(want, block(a, b, b), False, tools) == "wrong tool"


def test_equality_is_that_of_json() -> None:
    assert same({"a": [1, "x", None], "b": 2.0}, {"b": 2, "a": [1.0, "x", None]})
    assert not same(True, 1)
    assert not same("1", 1)
    assert not same([1, 2], [2, 1])


def test_a_value_must_stand_alone() -> None:
    assert holds("It is 21 degrees.", "21")
    assert holds("It costs 21.", "21")
    assert not holds("It is 121 degrees.", "21")
    assert not holds("It is 21.5 degrees.", "21")
    assert not holds("bookcase", "book")


def test_distances_lie_in_the_range_of_the_task(cases: Cases, made: dict[str, list[Case]]) -> None:
    for task, (low, high) in DISTANCES.items():
        for case in made[task]:
            assert low <= case.distance <= high
            prompt = case.prompt(case.turns[0])
            value = case.dialog.checks[case.turns[0]]["value"]
            tail = len(cases.tokenizer.encode(str(prompt), add_special_tokens=False).ids) - case.distance
            assert value in cases.tokenizer.decode(
                cases.tokenizer.encode(str(prompt), add_special_tokens=False).ids[: tail + 2], skip_special_tokens=False
            )


def test_far_recall_needs_the_indexer() -> None:
    """From its least distance on, the indexer leaves out three of four rows or more of what lies between."""
    low, high = DISTANCES["recall_far"]
    assert (low, high) == (1500, 3000)
    assert low // TINY.sparse_ratio >= 4 * TINY.index_top_k


def test_only_questions_in_the_range_become_cases(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DISTANCES, "recall_near", (300, 400))
    assert all(300 <= case.distance <= 400 for case in cases.make("recall_near", 40))


def test_the_next_prompt_holds_what_the_model_wrote(cases: Cases) -> None:
    case = next(c for c in cases.make("chain", 20) if c.thinking)
    first, second = case.turns[:2]
    wanted = gold(case, second)
    generated = "My own words.</think>" + gold(case, first).split("</think>")[1]
    case.accept(first, generated)
    prompt = str(case.prompt(second))
    assert "<think>" + generated + EOS in prompt
    assert case.check(second, wanted) == ""
    assert case.dialog.messages[first + 1]["content"] in prompt


def test_no_evaluated_recall_pair_is_trained() -> None:
    generator = Generator(1)
    trained = {
        (c["value"], d.messages[n - 1]["content"])
        for d in (generator.recall.dense(generator.rng) for _ in range(50))
        for n, c in d.checks.items()
    }
    evaluated = {
        (c.dialog.checks[c.turns[0]]["value"], c.dialog.messages[c.turns[0] - 1]["content"])
        for c in Cases(1, generator.tokenizer).make("recall_window", 50)
    }
    assert trained
    assert not trained & evaluated


def test_wilson_interval_holds_the_share_and_shrinks() -> None:
    low, high = wilson(93, 100)
    assert low < 0.93 < high
    assert (round(low, 3), round(high, 3)) == (0.863, 0.966)
    assert wilson(930, 1000)[0] > low
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == pytest.approx(1)


def test_the_report_counts_closed_thinking() -> None:
    table = report({"call": Outcome(right=3, cases=4, thinking_turns=2, thinking_closed=1)})
    assert "| call | 3 / 4 | 75.0 % |" in table
    assert "| think closed (turns) | 1 / 2 | 50.0 % |" in table


# ---- the runner, with a model that knows the answers ----


class Tape:
    """The state of a sequence that only remembers its tokens."""

    nbytes = 0

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def can_truncate(self, length: int) -> bool:
        return True

    def truncate(self, length: int) -> None:
        del self.tokens[length:]

    def fork(self) -> Tape:
        return Tape(self.tokens)

    def checkpoint(self, logits: torch.Tensor | None = None, length: int | None = None) -> Any:
        return Saved(list(self.tokens), logits)

    def restore(self, checkpoint: Any) -> None:
        self.tokens = list(checkpoint.tokens)

    def reset(self) -> None:
        self.tokens = []

    def release(self) -> None:
        pass

    def spoil(self) -> None:
        pass

    def export(self, start: int = 0) -> Any:
        raise NotImplementedError

    def import_state(self, exported: Any) -> None:
        raise NotImplementedError


class Saved:
    nbytes = 0

    def __init__(self, tokens: list[int], logits: torch.Tensor | None) -> None:
        self.tokens, self.logits, self.length = tokens, logits, len(tokens)

    def release(self) -> None:
        pass


class Oracle:
    """Gives all probability to the next token of the conversations it was told; else to the end."""

    shape, sampler = TINY, None

    def __init__(self, texts: list[list[int]]) -> None:
        self.next = {(*ids[max(0, n - 64) : n], n): ids[n] for ids in texts for n in range(1, len(ids))}

    def new_state(self) -> Tape:
        return Tape()

    def evaluate(self, batch: Any, wanted: Any, taps: Any, edits: Any) -> list[torch.Tensor | None]:
        out: list[torch.Tensor | None] = []
        for state, ids in batch:
            state.tokens += ids
            n = len(state.tokens)
            logits = torch.full((self.shape.vocab,), -20.0)
            logits[self.next.get((*state.tokens[max(0, n - 64) :], n), 1)] = 20.0
            out.append(logits)
        return out


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    model = json.loads(TOKENIZER.read_text("utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = {0, 1, 2, *range(4084, 4096)}
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "joyai-llm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
            "tokenizer.ggml.token_type": [3 if n in special else 1 for n in range(len(tokens))],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
        }
    )


@pytest.mark.parametrize("task", ["call", "chain", "parallel", "result", "arithmetic", "recall_near"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_runner_judges_an_oracle_as_perfect(cases: Cases, tokenizer: Tokenizer, task: str, temperature: float) -> None:
    made = cases.make(task, 10)
    texts = [tokenizer.encode_chat(str(c.dialog.text(turn + 1))) for c in made for turn in c.turns]
    engine = Engine(Oracle(texts), tokenizer)
    runner = Runner(engine, ds4.Sampling(temperature=temperature, seed=5), batch=4, step_tokens=200)
    outcome = runner.run(made)
    assert (outcome.right, outcome.cases) == (10, 10), outcome.failures[:1]
    assert outcome.thinking_closed == outcome.thinking_turns
    if task == "chain":  # the first turn was replaced by what was generated
        assert all("raw_dsml" in case.dialog.messages[case.turns[0]] for case in made)


def test_runner_counts_failures_with_their_reason(cases: Cases, tokenizer: Tokenizer) -> None:
    made = cases.make("call", 6)
    outcome = Runner(Engine(Oracle([]), tokenizer), ds4.Sampling(temperature=0.0), batch=4).run(made)
    assert outcome.right == 0
    assert sum(outcome.reasons.values()) == len(outcome.failures) == 6
    assert set(outcome.reasons) <= {"thinking not closed", "no call"}
