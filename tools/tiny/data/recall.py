"""Recall: facts planted, something else in between, questions later. Also dense key-value rows for the first stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import arith
from .chat import Chat
from .dialog import Dialog
from .filler import Filler
from .schemas import letters
from .toolbox import KNOWN
from .words import CITIES, NAMES, NOUNS, PATH_PARTS, THINGS, VALUES, Source


@dataclass(frozen=True)
class Relation:
    """One kind of fact; `{k}` is its key and `{v}` its value."""

    fact: tuple[str, ...]
    question: tuple[str, ...]
    answer: str
    keys: tuple[str, ...]
    values: tuple[str, ...] = VALUES


RELATIONS = (
    Relation(
        ("The code word for {k} is {v}.", "Code word for {k}: {v}.", "Note: the code word for {k} is {v}."),
        ("What is the code word for {k}?", "Tell me the code word for {k}.", "code word for {k}?"),
        "The code word for {k} is {v}.",
        NAMES,
    ),
    Relation(
        ("{k} likes the {v} best.", "The favourite thing of {k} is the {v}."),
        ("What does {k} like best?", "What is the favourite thing of {k}?"),
        "{k} likes the {v} best.",
        NAMES,
    ),
    Relation(
        ("{k} = {v}", "{k}: {v}", "set {k} {v}"),
        ("What is the value of {k}?", "value of {k}?", "What is {k} set to?"),
        "{k} is set to {v}.",
        PATH_PARTS,
    ),
    Relation(
        ("{k} lives in {v}.", "The home of {k} is {v}."),
        ("Where does {k} live?", "In which city does {k} live?"),
        "{k} lives in {v}.",
        NAMES,
        CITIES,
    ),
    Relation(
        ("The {k} is next to the {v}.", "You find the {k} near the {v}."),
        ("Where is the {k}?", "What is the {k} next to?"),
        "The {k} is next to the {v}.",
        THINGS,
    ),
    Relation(
        ("The password of {k} is {v}.", "{k} uses the password {v}."),
        ("What is the password of {k}?", "Tell me the password of {k}."),
        "The password of {k} is {v}.",
        CITIES,
    ),
)
ORDER = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
FIELD_NAMES = (*NOUNS, "temperature", "city", "status", "id", "size", "count", "color", "title", "state", "unit", "sky")
BRIEF = (" Answer with one word.", " One word only.", " Just the word.", " Only the value, please.")


@dataclass(frozen=True)
class Fact:
    relation: Relation
    key: str
    value: str

    def text(self, rng: Source) -> str:
        return rng.choice(self.relation.fact).format(k=self.key, v=self.value)

    def question(self, rng: Source) -> str:
        return rng.choice(self.relation.question).format(k=self.key)

    def answer(self) -> str:
        return self.relation.answer.format(k=self.key, v=self.value)


def pick(rng: Source, items: Sequence[str]) -> str:
    """One of the words; a rare one in its place is a name where the words are names."""
    return rng.pick_name(items) if items[0][0].isupper() else rng.pick(items)


def facts(rng: Source, count: int, relations: Sequence[Relation]) -> list[Fact]:
    """Distinct keys per relation; the (key, value) pair is of the split."""
    found: dict[tuple[str, str], Fact] = {}
    for n in range(count * 20):
        relation = relations[n % len(relations)]
        key, value = rng.of_split(
            "fact", lambda r=relation: (pick(rng, r.keys), pick(rng, r.values)), lambda p: f"{p[0]} {p[1]}"
        )
        found.setdefault((relation.answer, key), Fact(relation, key, value))
        if len(found) == count:
            break
    return list(found.values())


def interview(rng: Source, text: str, asks: list[tuple[str, str]], questions: int) -> Dialog:
    """A text and some of the questions about it, each with its answer."""
    dialog = Dialog(thinking=False)
    rng.shuffle(asks)
    for n, (question, answer) in enumerate(asks[:questions]):
        dialog.user(f"{text}\n\n{question}" if n == 0 else question)
        dialog.say(answer)
    return dialog


class Recall:
    def __init__(self, chat: Chat, filler: Filler) -> None:
        self.chat, self.filler = chat, filler

    def dense(self, rng: Source, pairs: tuple[int, int] = (8, 16), questions: int | None = None) -> Dialog:
        """Key-value pairs in one message, then every key asked in random order; answers are the value alone."""
        count = rng.randint(*pairs)
        dialog = Dialog(thinking=False)
        form = rng.random()
        if form < 0.5:
            line, ask = rng.choice(("{k} {v}", "{k} = {v}", "{k}: {v}", "{k} is {v}")), rng.choice(("{k}?", "{k}"))
            keys = rng.sample(rng.choice((NAMES, PATH_PARTS[:70], THINGS, CITIES)), count)
            keys = [pick(rng, (key,)) for key in keys]
            table = [
                (k, rng.of_split("fact", lambda k=k: pick(rng, VALUES), lambda v, k=k: f"{k} {v}"))
                for k in dict.fromkeys(keys)
            ]
            glue = rng.choice(("\n", ", ", "; ", ". "))
            dialog.user(glue.join(line.format(k=k, v=v) for k, v in table))
            asked = [(ask.format(k=k), v) for k, v in table]
        else:
            chosen = facts(rng, count, [rng.choice(RELATIONS)] if rng.chance(0.6) else RELATIONS)
            dialog.user(rng.choice((" ", "\n")).join(f.text(rng) for f in chosen))
            asked = [(f.question(rng), f.value) for f in chosen]
        rng.shuffle(asked)
        for n, (question, value) in enumerate(asked[:questions]):
            if n == 0:
                dialog.messages[-1]["content"] += "\n" + question
            else:
                dialog.user(question)
            dialog.say(value, task="recall", value=value, longest=len(value) + 16)
        return dialog

    def items(self, rng: Source, count: int) -> list[str]:
        """Distinct short texts of one kind."""

        def numbered() -> str:
            return f"{rng.word()} {rng.integer()}"

        make: Callable[[], str] = rng.choice(
            (rng.word, rng.phrase, rng.path, rng.url, rng.name, rng.email, numbered),
        )
        found: dict[str, None] = {}
        while len(found) < count:
            found[make()] = None
        return list(found)

    def lists(self, rng: Source, count: tuple[int, int] = (3, 8), questions: int = 14) -> Dialog:
        """A list and questions about places in it: the second, the last, what stands behind another."""
        items = self.items(rng, rng.randint(*count))
        form = rng.choice(("{}", "{}", "- {}", "number", "comma", "json"))
        if form == "number":
            text = "\n".join(f"{n}. {item}" for n, item in enumerate(items, 1))
        elif form == "comma":
            text = ", ".join(items)
        elif form == "json":
            text = json.dumps(items, ensure_ascii=False)
        else:
            text = "\n".join(form.format(item) for item in items)
        asks: list[tuple[str, str]] = []
        for n, item in enumerate(items):
            place = rng.choice(("Which is the {}?", "The {} one?", "What is the {} entry?")).format(ORDER[n])
            asks += [(place, item), (f"Number {n + 1}?", item)]
            if n:
                after = rng.choice(("What comes after {}?", "Which follows {}?")).format(items[n - 1])
                asks += [(after, item), (f"What comes before {item}?", items[n - 1])]
            asks.append((rng.choice(("Repeat: {}", "Say {}")).format(item), item))
        asks += [("Which is the last one?", items[-1]), ("How many are there?", str(len(items)))]
        head = rng.choice(("Here is a list:\n", "", "Files:\n" if "/" in items[0] else "Look at this.\n"))
        return interview(rng, head + text, asks, questions)

    def fields(self, rng: Source, questions: int = 14) -> Dialog:
        """JSON objects and questions about their values."""
        keys = list(dict.fromkeys(letters(rng.pick(FIELD_NAMES, plain=True)) for _ in range(rng.randint(3, 9))))
        rows = [{key: self.scalar(rng) for key in keys} for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        one = rng.choice((rows[0], {"result": rows[0]}, {"ok": True, **rows[0]}))
        text = json.dumps(rows if len(rows) > 1 else one, ensure_ascii=False, indent=2 if rng.chance(0.2) else None)
        asks: list[tuple[str, str]] = []
        for n, row in enumerate(rows):
            where = f" of the {ORDER[n]} one" if len(rows) > 1 else ""
            for key, value in row.items():
                shown, name = value if isinstance(value, str) else json.dumps(value), key.replace("_", " ")
                asks += [(f"What is the {name}{where}?", f"The {name} is {shown}."), (f"{key}{where}?", shown)]
        return interview(rng, text, asks, questions)

    def scalar(self, rng: Source) -> object:
        kind = rng.random()
        if kind < 0.55:
            return rng.choice((rng.word, rng.phrase, rng.name, rng.city, rng.date, rng.path))()
        return rng.integer(1, 9999) if kind < 0.8 else rng.decimal() if kind < 0.93 else rng.chance(0.5)

    def plant(self, dialog: Dialog, rng: Source, distance: int, pairs: tuple[int, int]) -> list[tuple[Fact, str]]:
        """Write facts and about `distance` tokens of something else; returns each fact with its line."""
        chosen = facts(
            rng, rng.randint(*pairs), [rng.choice(RELATIONS)] if rng.chance(0.5) else rng.sample(RELATIONS, 2)
        )
        place = rng.random()
        lines = [f.text(rng) for f in chosen]
        if place < 0.2:
            head = rng.choice(("You are a helpful assistant.", "Use these notes.", "Notes:"))
            dialog.system(head + "\n" + "\n".join(lines) + "\n\n" + self.filler.text(rng, distance))
        elif place < 0.7:
            head = rng.choice(("Here is a text.\n\n", "Read this:\n", "", "Some notes:\n"))
            spread = rng.chance(0.5) and distance > 200
            gap = max(6, distance // (4 * len(lines)))
            early = [line + " " + self.filler.text(rng, rng.randint(5, gap)) if spread else line for line in lines]
            dialog.user(
                head + "\n".join(early) + "\n\n" + self.filler.text(rng, int(distance * (0.8 if spread else 1.0)))
            )
        else:
            start = rng.choice(("Remember this. ", "Please remember: ", "Note this:\n"))
            glue = rng.choice((" ", "\n")) if all(line.endswith(".") for line in lines) else "\n"
            dialog.user(start + glue.join(lines))
            dialog.say("I will remember that.", "The user gives me facts to remember.")
            self.chatter(dialog, rng, distance)
        return list(zip(chosen, lines, strict=True))

    def chatter(self, dialog: Dialog, rng: Source, tokens: int) -> None:
        """About `tokens` tokens of turns about other things."""
        spent = 0
        while spent < tokens:
            before = len(dialog.messages)
            kind = rng.random()
            if kind < 0.4:
                text = self.filler.text(rng, min(tokens - spent + 20, rng.randint(40, 400)))
                dialog.user(rng.choice(("Repeat nothing, just read: ", "Read this: ", "A note: ")) + text)
                dialog.say("I have read it.", "The user gives me a text.")
            elif kind < 0.6:
                arith.exchange(dialog, rng)
            else:
                self.chat.exchange(dialog, rng)
            spent += sum(8 + len(m["content"]) * 10 // 36 for m in dialog.messages[before:])

    def ask(self, dialog: Dialog, rng: Source, fact: Fact) -> None:
        """One question and its answer; it joins an open user turn."""
        brief = rng.chance(0.5)
        question = fact.question(rng) + (rng.choice(BRIEF) if brief else "")
        if dialog.messages[-1]["role"] == "user":
            dialog.messages[-1]["content"] += "\n\n" + question
        else:
            dialog.user(question)
        answer = fact.value if brief else fact.answer()
        dialog.say(answer, f"I look for {fact.key} above.", task="recall", value=fact.value, longest=len(answer) + 16)

    def distant(
        self, rng: Source, distance: int, pairs: tuple[int, int] = (4, 12), questions: int = 10, thinking: float = 0.15
    ) -> Dialog:
        """Facts, about `distance` tokens of something else, then the questions."""
        dialog = Dialog(thinking=rng.chance(thinking))
        if dialog.thinking and rng.chance(0.6):
            # With a tool every turn keeps its reasoning, so every question has loss.
            dialog.tools = [rng.choice(KNOWN).schema(rng.randrange(6))]
        planted = self.plant(dialog, rng, distance, pairs)
        rng.shuffle(planted)
        for fact, _ in planted[:questions]:
            self.ask(dialog, rng, fact)
        return dialog


def token_pairs(rng: Source, pool: Sequence[int], length: int, pairs: tuple[int, int]) -> tuple[list[int], list[float]]:
    """A raw row: random token pairs, then the keys again in random order; loss on the repeated values only."""
    count = min(rng.randint(*pairs), length // 4)
    tokens = rng.sample(pool, count)
    table = [(key, rng.choice(pool)) for key in tokens]
    ids = [t for pair in table for t in pair]
    weights = [0.0] * len(ids)
    while len(ids) + 2 <= length:
        for key, value in rng.sample(table, len(table)):
            if len(ids) + 2 > length:
                break
            ids += [key, value]
            weights += [0.0, 1.0]
    return ids, weights
