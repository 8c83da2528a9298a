"""Tool dialogues: one call, parallel calls, chains of calls, results and errors used, requests that no tool fits."""

from __future__ import annotations

import json
from collections.abc import Callable

from . import arith, results
from .chains import Chains
from .chat import Chat
from .dialog import SAY_FIRST, Dialog, Json
from .filler import Filler
from .schemas import Tool, arguments, request, tool
from .toolbox import AGENT_KITS, BY_KEY, KNOWN, Known
from .words import Source

ERRORS = (
    "not found",
    "permission denied",
    "timeout",
    "invalid value",
    "access denied",
    "no such file",
    "server error",
    "too large",
    "already exists",
    "not allowed",
)
FIELDS = (
    "status",
    "owner",
    "title",
    "count",
    "date",
    "price",
    "city",
    "size",
    "level",
    "color",
    "state",
    "name",
    "email",
    "score",
)
TOOL_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant with tools.",
    "Use the tools when they help.",
    "Be brief.",
    "You are an assistant that can call tools.",
    "You are a coding agent.",
    "Answer shortly.",
    "Use tools only if needed.",
)


# Parameters that a real tool also has and a request may leave out.
OPTIONAL: dict[str, Json] = {
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    "units": {"type": "string", "enum": ["metric", "imperial"], "description": "Optional."},
    "lang": {"type": "string"},
    "limit": {"type": "integer", "description": "At most this many."},
    "timeout": {"type": "integer"},
    "verbose": {"type": "boolean"},
    "description": {"type": "string", "description": "Why this is done."},
    "offset": {"type": "number"},
    "dry_run": {"type": "boolean"},
}
ROUNDS = (1, 1, 2, 2, 3)
TRAINED_ROUNDS = (1, 2, 2, 3, 3, 4)  # more calls for one list of tools: more to learn from the same number of tokens
# Known tools that cannot do the job of a random one, as a shell or a file tool could.
NARROW = tuple(k for k in KNOWN if k.key in ("weather", "clock", "stock", "translate", "currency", "timer", "news"))


def apart(chosen: list[Known]) -> list[Known]:
    """Without the second of two tools that fit the same requests."""
    keys = {known.key for known in chosen}
    return [known for known in chosen if known.key != "shell_array" or "shell" not in keys]


def with_options(rng: Source, tools: list[Json]) -> list[Json]:
    """In training, some of the tools with parameters more that are not required and not asked for."""
    for one in tools if rng.trains else ():
        properties = one["function"]["parameters"]["properties"]
        if rng.chance(0.2):
            for name in rng.sample(tuple(OPTIONAL), rng.randint(1, 2)):
                properties.setdefault(name, OPTIONAL[name])
    return tools


class Tools:
    """Makes tool dialogues; `room` is the number of tokens a dialogue may spend on filler.

    `varied` is the share of results that are JSON with more keys than the answer needs (results.py).
    """

    def __init__(self, chat: Chat, filler: Filler, varied: float = 0.0) -> None:
        self.chat, self.filler, self.varied = chat, filler, varied
        self.kinds: tuple[tuple[str, Callable[[Source, int], Dialog], int], ...] = (
            ("random", self.random_call, 34),
            ("known", self.known_call, 22),
            ("parallel", self.parallel, 14),
            ("chain", Chains(self).conversation, 12),
            ("none", self.no_call, 10),
            ("agent", self.agent, 8),
        )

    def conversation(self, rng: Source, room: int = 0, kind: str | None = None) -> Dialog:
        make = None
        if kind is None:
            _, make, _ = rng.choices(self.kinds, [w for _, _, w in self.kinds])[0]
        else:
            make = next(m for n, m, _ in self.kinds if n == kind)
        dialog = make(rng, room)
        if not dialog.open_call:
            if rng.chance(0.15):
                self.chat.close(dialog, rng)
            elif rng.chance(0.08):
                self.chat.exchange(dialog, rng)
        return dialog

    def open(self, rng: Source, tools: list[Json], room: int, system: str | None = None) -> Dialog:
        """A dialogue with its system text and, if there is room, filler before the request."""
        dialog = Dialog(thinking=rng.chance(0.5), tools=tools)
        rng.shuffle(dialog.tools)
        if system is None and rng.chance(0.5):
            system = rng.choice(TOOL_SYSTEMS)
        place = rng.random()
        if room > 60 and place < 0.35:
            system = (system or TOOL_SYSTEMS[0]) + "\n\n" + self.filler.agent_text(rng, rng.randint(40, room))
            room = 0
        if rng.trains and rng.chance(0.06):
            system = f"{system}\n{SAY_FIRST}" if system else SAY_FIRST
        dialog.system(system or "")
        if room > 60 and place < 0.7:
            spent = 0
            while spent < room - 60 and rng.chance(0.8):
                before = len(dialog.messages)
                self.chat.exchange(dialog, rng)
                spent += 12 + sum(len(m["content"]) // 4 for m in dialog.messages[before:])
        return dialog

    def ask(self, dialog: Dialog, rng: Source, text: str, room: int) -> None:
        """The request, now and then with text before or behind it."""
        if room > 60 and rng.chance(0.15):
            filler = self.filler.text(rng, rng.randint(20, room // 2))
            text = f"{filler}\n\n{text}" if rng.chance(0.6) else f"{text}\n\n{filler}" if "\n" not in text else text
        elif rng.chance(0.1):
            text = rng.choice(("Hi! ", "Hello. ", "Please help me. ", "I have a task for you. ", "Ok, next: ")) + text
        dialog.user(text)

    # ---- random tools ----

    def some_tools(self, rng: Source, count: int) -> list[Tool]:
        taken: set[str] = set()
        nouns: set[str] = set()
        made: list[Tool] = []
        for _ in range(count):
            like = rng.choice(made) if made and rng.trains and rng.chance(0.3) else None
            made.append(tool(rng, taken, nouns, like))
        return made

    def rounds(self, rng: Source) -> int:
        return rng.choice(TRAINED_ROUNDS if rng.trains else ROUNDS)

    def random_call(self, rng: Source, room: int) -> Dialog:
        if rng.trains:
            tools = self.some_tools(rng, rng.choices((1, 2, 3, 4, 5, 6), (15, 28, 24, 18, 9, 6))[0])
        else:
            tools = self.some_tools(rng, rng.choices((1, 2, 3, 4), (25, 35, 25, 15))[0])
        schemas = [t.schema for t in tools]
        if rng.chance(0.15):
            schemas.append(rng.choice(KNOWN).schema(rng.randrange(6)))
        dialog = self.open(rng, schemas, room)
        for n in range(self.rounds(rng)):
            if not dialog.open_call:
                self.use_random(dialog, rng, rng.choice(tools), room if n == 0 else 0)
        return dialog

    def use_random(self, dialog: Dialog, rng: Source, one: Tool, room: int) -> None:
        args = arguments(rng, one)
        text = request(rng, one, args)
        thought = f"The user wants to {one.action}. I use {one.name}."
        if one.query and rng.chance(0.7):
            other = bool(self.varied) and rng.chance(self.varied)
            names = rng.sample(FIELDS, rng.randint(2, 7 if other else 3))
            values = {key: self.field_value(rng, key) for key in names}
            key = rng.choice(names)
            text += (
                rng.choice(
                    (" and tell me the {}.", ". What is the {}?", " I want to know the {}.", ". Tell me its {}.")
                ).format(key)
                if "\n" not in text
                else f"\nWhat is the {key}?"
            )
            if other:
                result = results.as_json(rng, list(values.items()), 3)
            else:
                result = json.dumps(values) if rng.chance(0.6) else "\n".join(f"{k}: {v}" for k, v in values.items())
            answer, must = f"The {key} is {values[key]}.", [str(values[key])]
        else:
            number = rng.integer(10, 9999)
            result, answer, must = rng.choice(
                (
                    (f'{{"id": {number}, "status": "ok"}}', f"Done. The id is {number}.", [str(number)]),
                    ("ok", "Done.", ["Done"]),
                    (f"id {number}", f"Done. The id is {number}.", [str(number)]),
                    (f'{{"ok": true, "id": {number}}}', f"Done. The id is {number}.", [str(number)]),
                    ("done", "Done.", ["Done"]),
                )
            )
            if self.varied and rng.chance(self.varied):
                result = results.as_json(rng, [("id", number), ("title", rng.phrase()), ("owner", rng.name())])
                answer, must = f"Done. The id is {number}.", [str(number)]
        self.ask(dialog, rng, text, room)
        ids = dialog.call([(one.name, args)], thought, self.preface(dialog, rng, one.action), task="call")
        self.finish(dialog, rng, ids, [result], answer, must)

    def field_value(self, rng: Source, key: str) -> object:
        if key in ("count", "size", "level", "score"):
            return rng.integer(1, 999)
        if key == "price":
            return rng.decimal()
        makers: dict[str, Callable[[], str]] = {
            "owner": rng.name,
            "name": rng.name,
            "city": rng.city,
            "date": rng.date,
            "email": rng.email,
            "title": rng.phrase,
        }
        return makers.get(key, rng.word)()

    def preface(self, dialog: Dialog, rng: Source, action: str) -> str:
        """Words before a call: in training only where the system text asks for them."""
        said = dialog.says_first if rng.trains else rng.chance(0.06)
        return f"I will {action}." if said else ""

    def finish(
        self,
        dialog: Dialog,
        rng: Source,
        ids: list[str],
        results: list[str],
        answer: str,
        must: list[str],
        task: str = "result",
    ) -> None:
        """Results, or now and then an error, and the answer; some dialogues end with the call itself."""
        if rng.chance(0.07):
            return
        if len(ids) == 1 and rng.chance(0.08):
            error = rng.choice(ERRORS) + (f": {rng.word()}" if rng.chance(0.5) else "")
            dialog.results(ids, [rng.choice((f"Error: {error}", f'{{"error": "{error}"}}', f"failed: {error}"))])
            dialog.say(f"That did not work: {error}.", "The call failed. I tell the user.", task=task, must=[error])
            return
        dialog.results(ids, results)
        dialog.say(
            answer,
            "I have the result and answer." if len(ids) == 1 else "I have all results and answer.",
            task=task,
            must=must,
        )

    # ---- known tools ----

    def known_call(self, rng: Source, room: int) -> Dialog:
        chosen = apart(rng.sample(KNOWN, rng.choices((1, 2, 3, 4), (20, 30, 30, 20))[0]))
        spelling = rng.randrange(6)
        schemas = with_options(rng, [k.schema(spelling, rng.chance(0.2)) for k in chosen])
        if rng.chance(0.2):
            schemas.append(self.some_tools(rng, 1)[0].schema)
        dialog = self.open(rng, schemas, room)
        for n in range(self.rounds(rng)):
            if not dialog.open_call:
                self.use_known(dialog, rng, rng.choice(chosen), spelling, room if n == 0 else 0)
        return dialog

    def use_known(self, dialog: Dialog, rng: Source, known: Known, spelling: int, room: int) -> None:
        event = known.make(rng)
        if self.varied and rng.chance(self.varied):
            event = results.varied(rng, known.key, event)
        name, args = known.call(spelling, event.args)
        self.ask(dialog, rng, event.request, room)
        verb = known.description[0].lower() + known.description[1:-1]
        ids = dialog.call(
            [(name, args)], f"The user wants to {verb}. I use {name}.", self.preface(dialog, rng, verb), task="call"
        )
        self.finish(dialog, rng, ids, [event.result], event.answer, list(event.must))

    def agent(self, rng: Source, room: int) -> Dialog:
        """A kit of file and shell tools as coding agents offer them, with a longer system prompt."""
        kit = list(rng.choice(AGENT_KITS))
        if room < 400:
            kit = rng.sample(kit, min(len(kit), 3))
        share = room // 2 // len(kit)
        wordy = share > 20 and rng.chance(0.5)
        schemas = [
            BY_KEY[key].schema(
                spelling, rng.chance(0.5), self.filler.text(rng, rng.randint(10, share)) if wordy else ""
            )
            for key, spelling in kit
        ]
        if rng.chance(0.3):
            for one in schemas:
                one["function"]["parameters"]["additionalProperties"] = False
        text = self.filler.agent_text(rng, rng.randint(20, max(30, room // 2 if wordy else room)))
        dialog = self.open(rng, schemas, 0, text)
        if rng.chance(0.15):
            dialog.user(rng.choice(("hi", "Hello", "hello!", "hey")))
            dialog.say(
                "Hello! How can I help you?",
                "The user greets me. I greet back.",
                task="chat",
                equals=["Hello! How can I help you?"],
            )
        for _ in range(self.rounds(rng)):
            if dialog.open_call:
                break
            key, spelling = rng.choice(kit)
            self.use_known(dialog, rng, BY_KEY[key], spelling, 0)
        return dialog

    # ---- several calls in one turn ----

    def parallel(self, rng: Source, room: int) -> Dialog:
        count = rng.choice((2, 2, 2, 3, 3, 4) if rng.trains else (2, 2, 2, 3))
        spelling = rng.randrange(6)
        if rng.chance(0.5):
            chosen = apart(rng.sample(KNOWN, rng.randint(1, 3)))
            same = rng.chance(0.6) or len(chosen) < count
            used = [chosen[0]] * count if same else rng.sample(chosen, count)
            events = [k.make(rng) for k in used]
            dialog = self.open(rng, with_options(rng, [k.schema(spelling) for k in chosen]), room)
            text = self.same_request(rng, used[0].key, [e.args for e in events]) if same else ""
            text = text or self.joined(rng, [e.request for e in events])
            calls = [k.call(spelling, e.args) for k, e in zip(used, events, strict=True)]
            answer, must = "\n".join(e.answer for e in events), [m for e in events for m in e.must]
            results = [e.result for e in events]
        else:
            tools = self.some_tools(rng, rng.randint(1, 4 if rng.trains else 3))
            used_tools = [rng.choice(tools) for _ in range(count)]
            args = [arguments(rng, t) for t in used_tools]
            dialog = self.open(rng, [t.schema for t in tools], room)
            text = self.joined(rng, [request(rng, t, a) for t, a in zip(used_tools, args, strict=True)])
            calls = [(t.name, a) for t, a in zip(used_tools, args, strict=True)]
            numbers = [rng.integer(10, 9999) for _ in range(count)]
            results = [f'{{"id": {n}}}' for n in numbers]
            answer, must = (
                f"Done. The ids are {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}.",
                [str(n) for n in numbers],
            )
        self.ask(dialog, rng, text, room)
        names = ", ".join(name for name, _ in calls)
        ids = dialog.call(
            calls,
            f"The user wants {('two', 'three', 'four')[count - 2]} things. I use {names}.",
            f"I use {names}." if dialog.says_first else "",
            task="parallel",
        )
        self.finish(dialog, rng, ids, results, answer, must)
        return dialog

    def joined(self, rng: Source, texts: list[str]) -> str:
        if rng.chance(0.3):
            return "\n".join(f"{n}. {t}" for n, t in enumerate(texts, 1))
        if any("\n" in t for t in texts):
            return "\n\n".join(texts)
        glue = rng.choice((" Also: ", " And then ", " Then: ", "\n", " and "))
        return glue.join(t if n == 0 else t[0].lower() + t[1:] if glue == " and " else t for n, t in enumerate(texts))

    def same_request(self, rng: Source, key: str, args: list[tuple[object, ...]]) -> str:
        if any(len(a) != 1 for a in args):
            return ""
        values = [str(a[0]) for a in args]
        if any(" " in v for v in values) and key != "shell":
            values = [f'"{v}"' for v in values]
        items = ", ".join(values[:-1]) + rng.choice((" and ", ", and ")) + values[-1]
        asks = {
            "weather": ("What is the weather in {}?", "Compare the weather in {}.", "weather in {}"),
            "read": ("Read {}.", "Show me {}"),
            "list": ("List {}.", "What is in {}?"),
            "clock": ("What time is it in {}?", "Tell me the time in {}."),
            "stock": ("What are the prices of {}?", "stock prices: {}"),
            "fetch": ("Open {}.", "Fetch {}"),
            "search": ("Search for {}.", "Search the web for {}"),
            "contact": ("Find the contacts of {}.",),
            "news": ("Any news about {}?",),
            "todo": ("Add {} to my todo list.",),
            "glob": ("Find files that match {}.",),
        }
        return rng.choice(asks[key]).format(items) if key in asks and key != "contact" else ""

    # ---- no call ----

    def no_call(self, rng: Source, room: int) -> Dialog:
        """Tools are there, but the request needs none of them, or one that is missing."""
        tools = self.some_tools(rng, rng.randint(2, 4))
        missing, offered = tools[0], tools[1:]
        schemas = [t.schema for t in offered]
        if rng.chance(0.3):
            schemas = [k.schema(rng.randrange(6)) for k in rng.sample(NARROW, rng.randint(1, 3))]
        dialog = self.open(rng, schemas, room)
        kind = rng.random()
        start = len(dialog.messages)
        if kind < 0.45:
            args = arguments(rng, missing) if rng.chance(0.4) else {}
            text = request(rng, missing, args)
            if missing.name in text:
                text = f"Please {missing.action}."
            self.ask(dialog, rng, text, room)
            dialog.say(
                f"I cannot do that: I have no tool to {missing.action}.",
                f"The user wants to {missing.action}. No tool fits.",
                task="none",
                must=["cannot"],
            )
        elif kind < 0.65:
            arith.exchange(dialog, rng)
        else:
            self.chat.exchange(dialog, rng)
        for n in range(start, len(dialog.messages)):
            if n in dialog.checks:
                dialog.checks[n] = {**dialog.checks[n], "task": "none"}
        return dialog
