"""Chains: a call whose result the next call needs, and then the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import results
from .dialog import Call, Dialog, schema
from .schemas import some_noun
from .toolbox import BY_KEY, KNOWN
from .words import VERBS, Source

if TYPE_CHECKING:
    from .tools import Tools


class Chains:
    """Makes chains with the tools and the openings of `Tools`."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    def conversation(self, rng: Source, room: int) -> Dialog:
        return rng.choice(
            (
                self.list_read,
                self.search_open,
                self.contact_mail,
                self.find_use,
                self.find_use,
                self.grep_read,
                self.read_write,
                *((self.list_read, self.list_read, self.search_open, self.search_open) if rng.trains else ()),
            )
        )(rng, room)

    def with_known(self, rng: Source, keys: tuple[str, ...], room: int) -> tuple[Dialog, int]:
        spelling = rng.randrange(6)
        extra = [k for k in rng.sample(KNOWN, rng.randint(0, 2)) if k.key not in keys]
        return self.tools.open(
            rng, [k.schema(spelling) for k in [*(BY_KEY[key] for key in keys), *extra]], room
        ), spelling

    def step(self, dialog: Dialog, call: Call, thought: str, result: str, text: str = "") -> None:
        dialog.results(dialog.call([call], thought, thought if dialog.says_first else "", task="chain"), [result])

    def plain_or_json(self, rng: Source, plain: str, pairs: results.Pairs) -> str:
        return results.as_json(rng, pairs, 4) if self.tools.varied and rng.chance(self.tools.varied) else plain

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
        self.tools.ask(
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
        if rng.trains and rng.chance(0.4):
            urls += [rng.url() for _ in range(rng.randint(1, 2))]
        number = rng.randrange(len(urls))
        order = ("first", "second", "third", "fourth", "fifth")[number]
        self.tools.ask(
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
        self.tools.ask(
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
            self.plain_or_json(rng, f'{{"name": "{name}", "email": "{mail}"}}', [("name", name), ("email", mail)]),
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
        verb, noun = "find", ""
        while verb in ("find", "get"):  # such a tool could be the first as well as the second
            verb, noun = rng.of_split(
                "tool", lambda: (rng.choice(VERBS), some_noun(rng)), lambda p: f"chain {p[0]} {p[1]}"
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
            schemas.append(self.tools.some_tools(rng, 1)[0].schema)
        dialog = self.tools.open(rng, schemas, room)
        label, number, status = rng.phrase(1, 3), rng.integer(10, 9999), rng.word()
        self.tools.ask(
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
            self.plain_or_json(
                rng,
                rng.choice((f'{{"{key}": {number}}}', f"{key}: {number}", str(number))),
                [(key, number), (find[1], label)],
            ),
        )
        self.step(
            dialog,
            (second, {key: number}),
            f"The id is {number}. I use {second}.",
            self.plain_or_json(rng, f'{{"status": "{status}"}}', [("status", status), (key, number)]),
        )
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
        self.tools.ask(
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
        self.tools.ask(
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
