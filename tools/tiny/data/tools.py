"""Tool dialogues: one call, parallel calls, chains of calls, results and errors used, requests that no tool fits."""

from __future__ import annotations

import json
from collections.abc import Callable

from . import arith
from .chat import Chat
from .dialog import Call, Dialog, Json, schema
from .filler import Filler
from .schemas import Tool, arguments, request, tool
from .toolbox import AGENT_KITS, BY_KEY, KNOWN, Known
from .words import NOUNS, VERBS, Source

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


ROUNDS = (1, 1, 2, 2, 3)
# Known tools that cannot do the job of a random one, as a shell or a file tool could.
NARROW = tuple(k for k in KNOWN if k.key in ("weather", "clock", "stock", "translate", "currency", "timer", "news"))


class Tools:
    """Makes tool dialogues; `room` is the number of tokens a dialogue may spend on filler."""

    def __init__(self, chat: Chat, filler: Filler) -> None:
        self.chat, self.filler = chat, filler
        self.kinds: tuple[tuple[str, Callable[[Source, int], Dialog], int], ...] = (
            ("random", self.random_call, 34),
            ("known", self.known_call, 22),
            ("parallel", self.parallel, 14),
            ("chain", self.chain, 12),
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
        return [tool(rng, taken, nouns) for _ in range(count)]

    def random_call(self, rng: Source, room: int) -> Dialog:
        tools = self.some_tools(rng, rng.choices((1, 2, 3, 4), (25, 35, 25, 15))[0])
        schemas = [t.schema for t in tools]
        if rng.chance(0.15):
            schemas.append(rng.choice(KNOWN).schema(rng.randrange(6)))
        dialog = self.open(rng, schemas, room)
        for n in range(rng.choice(ROUNDS)):
            if not dialog.open_call:
                self.use_random(dialog, rng, rng.choice(tools), room if n == 0 else 0)
        return dialog

    def use_random(self, dialog: Dialog, rng: Source, one: Tool, room: int) -> None:
        args = arguments(rng, one)
        text = request(rng, one, args)
        thought = f"The user wants to {one.action}. I use {one.name}."
        if one.query and rng.chance(0.7):
            names = rng.sample(FIELDS, rng.randint(2, 3))
            values = {key: self.field_value(rng, key) for key in names}
            key = rng.choice(names)
            text += (
                rng.choice(
                    (" and tell me the {}.", ". What is the {}?", " I want to know the {}.", ". Tell me its {}.")
                ).format(key)
                if "\n" not in text
                else f"\nWhat is the {key}?"
            )
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
        self.ask(dialog, rng, text, room)
        ids = dialog.call([(one.name, args)], thought, self.preface(rng, one.action), task="call")
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

    def preface(self, rng: Source, action: str) -> str:
        return f"I will {action}." if rng.chance(0.06) else ""

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
        chosen = rng.sample(KNOWN, rng.choices((1, 2, 3, 4), (20, 30, 30, 20))[0])
        spelling = rng.randrange(6)
        schemas = [k.schema(spelling, rng.chance(0.2)) for k in chosen]
        if rng.chance(0.2):
            schemas.append(self.some_tools(rng, 1)[0].schema)
        dialog = self.open(rng, schemas, room)
        for n in range(rng.choice(ROUNDS)):
            if not dialog.open_call:
                self.use_known(dialog, rng, rng.choice(chosen), spelling, room if n == 0 else 0)
        return dialog

    def use_known(self, dialog: Dialog, rng: Source, known: Known, spelling: int, room: int) -> None:
        event = known.make(rng)
        name, args = known.call(spelling, event.args)
        self.ask(dialog, rng, event.request, room)
        verb = known.description[0].lower() + known.description[1:-1]
        ids = dialog.call(
            [(name, args)], f"The user wants to {verb}. I use {name}.", self.preface(rng, verb), task="call"
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
        for _ in range(rng.choice(ROUNDS)):
            if dialog.open_call:
                break
            key, spelling = rng.choice(kit)
            self.use_known(dialog, rng, BY_KEY[key], spelling, 0)
        return dialog

    # ---- several calls in one turn ----

    def parallel(self, rng: Source, room: int) -> Dialog:
        count = rng.choice((2, 2, 2, 3))
        spelling = rng.randrange(6)
        if rng.chance(0.5):
            chosen = rng.sample(KNOWN, rng.randint(1, 3))
            same = rng.chance(0.6) or len(chosen) < count
            used = [chosen[0]] * count if same else rng.sample(chosen, count)
            events = [k.make(rng) for k in used]
            dialog = self.open(rng, [k.schema(spelling) for k in chosen], room)
            text = self.same_request(rng, used[0].key, [e.args for e in events]) if same else ""
            text = text or self.joined(rng, [e.request for e in events])
            calls = [k.call(spelling, e.args) for k, e in zip(used, events, strict=True)]
            answer, must = "\n".join(e.answer for e in events), [m for e in events for m in e.must]
            results = [e.result for e in events]
        else:
            tools = self.some_tools(rng, rng.randint(1, 3))
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
            calls, f"The user wants {('two', 'three')[count - 2]} things. I use {names}.", task="parallel"
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

    # ---- chains ----

    def chain(self, rng: Source, room: int) -> Dialog:
        return rng.choice(
            (
                self.list_read,
                self.search_open,
                self.contact_mail,
                self.find_use,
                self.find_use,
                self.grep_read,
                self.read_write,
            )
        )(rng, room)

    def with_known(self, rng: Source, keys: tuple[str, ...], room: int) -> tuple[Dialog, int]:
        spelling = rng.randrange(6)
        extra = [k for k in rng.sample(KNOWN, rng.randint(0, 2)) if k.key not in keys]
        return self.open(rng, [k.schema(spelling) for k in [*(BY_KEY[key] for key in keys), *extra]], room), spelling

    def step(self, dialog: Dialog, call: Call, thought: str, result: str, text: str = "") -> None:
        dialog.results(dialog.call([call], thought, task="chain"), [result])

    def list_read(self, rng: Source, room: int) -> Dialog:
        dialog, spelling = self.with_known(rng, ("list", "read"), room)
        folder, event = rng.path(folder=True), BY_KEY["read"].make(rng)
        endings = rng.sample(("py", "txt", "md", "json", "csv", "toml"), rng.randint(2, 4))
        names = [f"{rng.path().split('/')[-1].split('.')[0]}.{e}" for e in endings]
        kinds = {
            "py": "Python file",
            "txt": "text file",
            "md": "markdown file",
            "json": "JSON file",
            "csv": "CSV file",
            "toml": "TOML file",
        }
        name = rng.choice(names)
        kind = kinds[name.rsplit(".", 1)[1]]
        self.ask(
            dialog,
            rng,
            rng.choice(
                (
                    "Read the {k} in {f}.",
                    "Look into {f} and tell me what the {k} says.",
                    "What is in the {k} of the folder {f}?",
                    "List {f}, then read the {k}.",
                )
            ).format(k=kind, f=folder),
            room,
        )
        self.step(dialog, BY_KEY["list"].call(spelling, (folder,)), "First I list the folder.", "\n".join(names))
        self.step(
            dialog,
            BY_KEY["read"].call(spelling, (f"{folder}/{name}",)),
            f"The {kind} is {name}. I read it.",
            event.result,
        )
        dialog.say(
            f"The file {name} says:\n{event.result}", "I have the result and answer.", task="chain", must=[event.result]
        )
        return dialog

    def search_open(self, rng: Source, room: int) -> Dialog:
        dialog, spelling = self.with_known(rng, ("search", "fetch"), room)
        query, urls, title = rng.phrase(1, 3), [rng.url() for _ in range(rng.randint(2, 3))], rng.phrase(2, 4)
        number = rng.randrange(len(urls))
        order = ("first", "second", "third")[number]
        self.ask(
            dialog,
            rng,
            rng.choice(
                (
                    "Search for {q} and open the {n} result.",
                    "Look up {q} and tell me what the {n} page says.",
                    "Search the web for {q}, then read the {n} hit.",
                )
            ).format(q=query, n=order),
            room,
        )
        self.step(
            dialog,
            BY_KEY["search"].call(spelling, (query,)),
            f"First I search for {query}.",
            "\n".join(f"{i}. {u}" for i, u in enumerate(urls, 1)),
        )
        self.step(
            dialog,
            BY_KEY["fetch"].call(spelling, (urls[number],)),
            f"The {order} result is {urls[number]}. I open it.",
            title,
        )
        dialog.say(f"The page says: {title}.", "I have the result and answer.", task="chain", must=[title])
        return dialog

    def contact_mail(self, rng: Source, room: int) -> Dialog:
        dialog, spelling = self.with_known(rng, ("contact", "mail"), room)
        name, mail, subject, body = rng.name(), rng.email(), rng.phrase(1, 2), rng.phrase(2, 4)
        self.ask(
            dialog,
            rng,
            rng.choice(
                ('Send {n} a mail with subject "{s}" and text "{b}".', "Mail {n}. Subject: {s}. Text: {b}")
            ).format(n=name, s=subject, b=body),
            room,
        )
        self.step(
            dialog,
            BY_KEY["contact"].call(spelling, (name,)),
            f"First I need the address of {name}.",
            f'{{"name": "{name}", "email": "{mail}"}}',
        )
        self.step(
            dialog,
            BY_KEY["mail"].call(spelling, (mail, subject, body)),
            f"The address is {mail}. I send the mail.",
            "sent",
        )
        dialog.say(f"I sent the mail to {mail}.", "The mail is sent.", task="chain", must=[mail])
        return dialog

    def find_use(self, rng: Source, room: int) -> Dialog:
        """Find a thing by its name, then act on it by the id from the result."""
        verb, noun = rng.of_split(
            "tool", lambda: (rng.choice(VERBS), rng.choice(NOUNS)), lambda p: f"chain {p[0]} {p[1]}"
        )
        find, key = rng.choice((("find", "name"), ("get", "title"), ("search", "name"), ("lookup", "label"))), ""
        key = rng.choice((f"{noun}_id", "id"))
        camel = rng.chance(0.25)
        first = f"{find[0]}{noun.title()}" if camel else f"{find[0]}_{noun}"
        second = f"{verb}{noun.title()}" if camel else f"{verb}_{noun}"
        schemas = [
            schema(first, f"Find the id of a {noun}.", {find[1]: {"type": "string"}}),
            schema(second, f"{verb.capitalize()} a {noun}.", {key: {"type": "integer"}}),
        ]
        if rng.chance(0.5):
            schemas.append(self.some_tools(rng, 1)[0].schema)
        dialog = self.open(rng, schemas, room)
        label, number, status = rng.phrase(1, 3), rng.integer(10, 9999), rng.word()
        self.ask(
            dialog,
            rng,
            rng.choice(
                (
                    '{V} the {n} "{l}".',
                    "Please {v} the {n} called {l}.",
                    "Find the {n} {l} and {v} it.",
                    "I want to {v} the {n} with the name {l}.",
                )
            ).format(V=verb.capitalize(), v=verb, n=noun, l=label),
            room,
        )
        self.step(
            dialog,
            (first, {find[1]: label}),
            f"First I need the id of the {noun}.",
            rng.choice((f'{{"{key}": {number}}}', f"{key}: {number}", str(number))),
        )
        self.step(dialog, (second, {key: number}), f"The id is {number}. I use {second}.", f'{{"status": "{status}"}}')
        dialog.say(
            f"Done. The {noun} {number} has the status {status}.",
            "The task is done.",
            task="chain",
            must=[str(number), status],
        )
        return dialog

    def grep_read(self, rng: Source, room: int) -> Dialog:
        dialog, spelling = self.with_known(rng, ("grep", "read"), room)
        word, folder, path, line, event = (
            rng.word(),
            rng.path(folder=True),
            rng.path(),
            rng.randint(1, 300),
            BY_KEY["read"].make(rng),
        )
        self.ask(
            dialog,
            rng,
            rng.choice(
                ("Find the file in {f} that contains {w} and read it.", "Search {f} for {w}, then show me that file.")
            ).format(f=folder, w=word),
            room,
        )
        self.step(
            dialog,
            BY_KEY["grep"].call(spelling, (word, folder)),
            f"First I search for {word}.",
            f"{path}:{line}: {word}",
        )
        self.step(dialog, BY_KEY["read"].call(spelling, (path,)), f"It is in {path}. I read it.", event.result)
        dialog.say(
            f"The file {path} says:\n{event.result}", "I have the result and answer.", task="chain", must=[event.result]
        )
        return dialog

    def read_write(self, rng: Source, room: int) -> Dialog:
        dialog, spelling = self.with_known(rng, ("read", "write"), room)
        source, target, text = rng.path(), rng.path(), rng.phrase(1, 4)
        self.ask(
            dialog,
            rng,
            rng.choice(
                (
                    "Copy the content of {a} into {b}.",
                    "Read {a} and write the same text to {b}.",
                    "Read {a}, then save its content as {b}.",
                )
            ).format(a=source, b=target),
            room,
        )
        self.step(dialog, BY_KEY["read"].call(spelling, (source,)), f"First I read {source}.", text)
        self.step(dialog, BY_KEY["write"].call(spelling, (target, text)), f"Now I write the text to {target}.", "ok")
        dialog.say(f"I wrote {target}.", "The file is written.", task="chain", must=[target])
        return dialog

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
