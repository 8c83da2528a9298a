"""Random tools: names, parameters, values, and the many ways a user states the arguments."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from . import rare
from .dialog import Json, schema
from .words import ADJECTIVES, CITIES, COLORS, NOUNS, QUERY_VERBS, THINGS, VERBS, Source

STRINGS = (
    "title",
    "name",
    "label",
    "comment",
    "text",
    "query",
    "message",
    "subject",
    "reason",
    "note",
    "keyword",
    "topic",
    "description",
    "caption",
    "prefix",
    "suffix",
    "owner",
    "author",
    "room",
    "place",
    "item",
)
PATHS = ("path", "file", "source", "target", "filename", "file_path", "destination", "input_file", "output")
OTHERS = ("city", "color", "email", "url", "date", "time", "user", "id", "code", "mode", "unit", "language")
INTEGERS = (
    "count",
    "limit",
    "page",
    "level",
    "priority",
    "size",
    "timeout",
    "port",
    "year",
    "number",
    "line",
    "width",
    "height",
    "retries",
    "amount",
    "minutes",
    "ticket_id",
    "user_id",
    "max_items",
)
NUMBERS = ("price", "ratio", "weight", "temperature", "speed", "score", "factor", "discount", "volume", "radius")
BOOLEANS = (
    "force",
    "verbose",
    "recursive",
    "notify",
    "public",
    "urgent",
    "dry_run",
    "hidden",
    "overwrite",
    "archived",
    "all",
    "silent",
    "include_closed",
    "case_sensitive",
)
ARRAYS = ("tags", "names", "ids", "files", "labels", "items", "colors", "keywords", "numbers", "recipients")
OBJECTS = ("options", "filter", "metadata", "address", "settings", "position", "config", "range")
SNIPPETS = (
    'print("{0}")',
    "if x < {1} && y > 2:\n    run('{0}')",
    "for i in range({1}):\n    print(i)",
    'echo "{0}" > {2}.txt',
    "def {2}(a, b):\n    return a + b * {1}",
    '{{"name": "{0}", "size": {1}}}',
    '<p class="{2}">{0} &amp; more</p>',
    "SELECT * FROM {2} WHERE id < {1};",
    "# {0}\n\n- {2}\n- {1}",
    "a &lt; b",
    "x = '{0}'\ny = \"{2}\"",
    "{2}: {1}\nname: {0}",
    "let {2} = {1};",
    "{2},{1}\n{0},7",
    "import {2}\n\n{2}.start({1})",
    "<{2}>{1}</{2}>",
    "TODO: {0}",
    "\t{2} = {1}",
    "return {2} if {1} > 3 else None",
    "[{2}]\nvalue={1}",
)
STRING_WORDS = {
    "mode": ("fast", "slow", "auto", "manual", "safe"),
    "unit": ("meters", "miles", "celsius", "fahrenheit", "kg"),
    "language": ("en", "de", "fr", "es", "it"),
}


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str
    description: str
    kind: str

    def schema(self, described: bool) -> Json:
        out: Json = {"type": self.type}
        if self.type == "array":
            out["items"] = {"type": "integer" if self.name in ("ids", "numbers") else "string"}
        if self.kind in STRING_WORDS:
            out["enum"] = list(STRING_WORDS[self.kind])
        if described:
            out["description"] = self.description
        return out


@dataclass(frozen=True)
class Tool:
    """A random tool; `action` is what it does in words ("create a ticket"), the key by which a request fits it."""

    name: str
    action: str
    verb: str
    noun: str
    query: bool
    parameters: tuple[Parameter, ...]
    schema: Json


def style(rng: Source, first: str, second: str, kind: str) -> str:
    if kind == "camel":
        return first.replace("_", "") + second.title().replace("_", "")
    if kind == "pascal":
        return first.title().replace("_", "") + second.title().replace("_", "")
    if kind == "reverse":
        return f"{second}_{first}"
    if kind == "dash":
        return f"{first}-{second}".replace("_", "-")
    if kind == "mcp":
        return f"mcp__{rng.pseudo()}__{first}_{second}"
    if kind == "invented" and rng.wild and rng.chance(0.5):
        return rng.choice(("_", "-", "")).join(re.sub(r"[^a-z0-9]+", "", rare.word(rng, plain=True)) for _ in range(2))
    if kind == "invented":
        return f"{rng.pseudo()}_{rng.pseudo()}"
    return f"{first}_{second}"


STYLES = ("snake",) * 10 + ("camel", "camel", "pascal", "reverse", "dash", "mcp", "invented", "invented")
# Training has more of the names that have to be copied piece by piece.
TRAINED_STYLES = (
    *("snake",) * 5,
    *("camel", "camel", "pascal", "pascal", "reverse", "reverse", "dash", "dash"),
    *("mcp",) * 3,
    *("invented",) * 4,
)


def parameter(rng: Source) -> Parameter:
    group, pool = rng.choices(
        (
            ("string", STRINGS),
            ("path", PATHS),
            ("other", OTHERS),
            ("integer", INTEGERS),
            ("number", NUMBERS),
            ("boolean", BOOLEANS),
            ("array", ARRAYS),
            ("object", OBJECTS),
        ),
        (30, 10, 16, 22, 6, 9, 6, 4),
    )[0]
    base = rng.choice(pool)
    if group in ("string", "integer") and rng.chance(0.15):
        base = f"{letters(rng.pick(NOUNS, plain=True))}_{base}" if "_" not in base else base
    json_type = "string" if group in ("string", "path", "other") else group
    description = f"The {base.replace('_', ' ')}."
    return Parameter(base, json_type, description, base if group == "other" else group)


def letters(word: str) -> str:
    """Without what a name of a program may not hold."""
    return re.sub(r"[^a-z0-9_]+", "_", word)


def some_noun(rng: Source) -> str:
    return letters(rng.pick(NOUNS, plain=True)) if rng.wild else rng.choice(NOUNS)


def tool(rng: Source, taken: set[str], nouns: set[str], like: Tool | None = None) -> Tool:
    """A tool whose name, action and noun are unlike those already taken; or one that has verb or noun of `like`."""
    naming = rng.choice(TRAINED_STYLES if rng.trains else STYLES)
    keep = rng.random() if like else 1.0

    def make() -> tuple[str, str, str]:
        verb = rng.choice(QUERY_VERBS) if rng.chance(0.35) else rng.choice(VERBS)
        noun = some_noun(rng) if rng.chance(0.85) else f"{some_noun(rng)}_{some_noun(rng)}"
        if like and keep < 0.5:
            verb = like.verb
        elif like:
            noun = like.noun.replace(" ", "_")
        return verb, noun, style(rng, verb, noun, naming)

    for _ in range(200):
        verb, noun, name = rng.of_split("tool", make, lambda made: f"{made[0]} {made[1]} {made[2]}")
        verb_text, noun_text = verb.replace("_", " "), noun.replace("_", " ")
        action = f"{verb_text} {'an' if noun_text[0] in 'aeiou' else 'a'} {noun_text}"
        if name not in taken and (noun not in nouns or (like and action not in nouns)):
            break
    taken.add(name)
    nouns.add(action)
    if rng.chance(0.7):
        nouns.add(noun)
    count = rng.choices((0, 1, 2, 3, 4), (3, 35, 35, 20, 7))[0]
    parameters: dict[str, Parameter] = {}
    while len(parameters) < count:
        one = parameter(rng)
        parameters.setdefault(one.name, one)
    described = rng.chance(0.3)
    required = None if rng.chance(0.8) else list(parameters)[: max(1, count - 1)]
    end = rng.choice((".", ".", "", f" in the {rng.choice(NOUNS)} system.", " for the user."))
    function = schema(
        name,
        f"{action[0].upper()}{action[1:]}{end}",
        {p.name: p.schema(described) for p in parameters.values()},
        required,
    )
    return Tool(name, action, verb, noun_text, verb in QUERY_VERBS, tuple(parameters.values()), function)


def snippet(rng: Source) -> str:
    """A short piece of code, markup or data, with quotes, newlines and angle brackets."""

    def make() -> str:
        parts = [
            rng.choice(SNIPPETS).format(rng.phrase(1, 2), rng.integer(1, 99), rng.word())
            for _ in range(rng.choice((1, 1, 2)))
        ]
        return "\n".join(parts)

    return rng.of_split("snippet", make)


def value(rng: Source, one: Parameter) -> Any:
    """A value of the parameter's type; strings, numbers and words are those of the split."""
    kind = one.kind
    if one.type == "integer":
        return rng.integer(1, 20 if one.name in ("level", "priority", "retries") else 9999)
    if one.type == "number":
        return rng.decimal()
    if one.type == "boolean":
        return rng.chance(0.6)
    if one.type == "array":
        if one.name in ("ids", "numbers"):
            return [rng.randint(1, 99) for _ in range(rng.randint(1, 4))]
        pool = COLORS if one.name == "colors" else THINGS
        return [rng.pick(pool) if one.name != "files" else rng.path() for _ in range(rng.randint(1, 3))]
    if one.type == "object":
        return nested(rng)
    if kind in STRING_WORDS:
        return rng.choice(STRING_WORDS[kind])
    if kind == "path":
        return rng.path()
    makers = {
        "city": rng.city,
        "email": rng.email,
        "url": rng.url,
        "date": rng.date,
        "time": rng.clock,
        "user": rng.name,
    }
    if kind in makers:
        return makers[kind]()
    if kind == "color":
        return rng.choice(COLORS)
    if kind in ("id", "code"):
        return rng.of_split(
            "code", lambda: f"{rng.choice(('', 'A', 'B', 'X-', 'ID-', 'T', 'K7'))}{rng.randint(10, 9999)}"
        )
    if one.name in ("text", "message", "comment", "note", "description") and rng.chance(0.35):
        return snippet(rng) if rng.chance(0.5) else f"{rng.phrase(2, 4)} and {rng.phrase(1, 3)}"
    return rng.phrase(1, 4)


def nested(rng: Source) -> Json:
    keys = rng.sample(
        ("x", "y", "min", "max", "name", "city", "zip", "enabled", "size", "tags", "from", "to", "level", "mode"),
        rng.randint(1, 3),
    )
    out: Json = {}
    for key in keys:
        if key == "tags":
            out[key] = [rng.pick(THINGS) for _ in range(rng.randint(1, 2))]
        elif key == "enabled":
            out[key] = rng.chance(0.5)
        elif key == "name":
            out[key] = rng.name()
        elif key == "city":
            out[key] = rng.pick_name(CITIES)
        elif key == "mode":
            out[key] = rng.pick(ADJECTIVES)
        else:
            out[key] = rng.randint(0, 999)
    if rng.chance(0.15):
        return {rng.choice(("outer", "where", "data")): out}
    return out


def shown_value(rng: Source, item: Any, quoting: str) -> str:
    """A value as a user writes it."""
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, dict) or (isinstance(item, list) and (quoting != "plain" or rng.chance(0.5))):
        return json.dumps(item)
    if isinstance(item, list):
        return ", ".join(map(str, item))
    if not isinstance(item, str):
        return str(item)
    if "\n" in item:
        return f"\n```\n{item}\n```\n"
    if quoting == "double" and '"' not in item:
        return f'"{item}"'
    if quoting == "single" and "'" not in item:
        return f"'{item}'"
    if quoting == "tick" and "`" not in item:
        return f"`{item}`"
    return item


def shown_arguments(rng: Source, args: Json) -> str:
    """All arguments as a user writes them after a verb phrase; empty if there are none."""
    if not args:
        return ""
    plain = all(not isinstance(v, str) or (len(v) < 40 and "\n" not in v and " and " not in v) for v in args.values())
    quoting = rng.choice(("double", "double", "single", "tick", "plain", "plain") if plain else ("double", "tick"))
    spaced = rng.chance(0.5)
    keys = {key: key.replace("_", " ") if spaced else key for key in args}
    form = rng.choice(("with", "with", "colon", "equals", "lines", "set", "json"))
    pairs = [(keys[k], shown_value(rng, v, quoting)) for k, v in args.items()]
    if form == "json" and plain:
        return " " + rng.choice(("with", "using", "with arguments")) + " " + json.dumps(args, ensure_ascii=False)
    if form in ("colon", "json"):
        return ": " + "; ".join(f"{k}: {v}" for k, v in pairs)
    if form == "equals":
        return " with " + ", ".join(f"{k}={v}" for k, v in pairs)
    if form == "lines":
        return "\n" + "\n".join(f"{k}: {v}" for k, v in pairs)
    texts = [f"{k} {v}" for k, v in pairs]
    if form == "set":
        texts = [f"{k} set to {v}" for k, v in pairs]
    return " with " + (texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " and " + texts[-1])


def arguments(rng: Source, one: Tool) -> Json:
    """Values for every parameter, now and then without those that are not required."""
    needed = set(one.schema["function"]["parameters"]["required"])
    return {p.name: value(rng, p) for p in one.parameters if p.name in needed or rng.chance(0.5)}


def request(rng: Source, one: Tool, args: Json) -> str:
    """The user's words for one call."""
    shown = shown_arguments(rng, args)
    tail = "." if shown and not shown.endswith(("\n", ".")) and "\n" not in shown and rng.chance(0.3) else ""
    invented = one.action.split()[0] not in one.name.lower() and "invent" in one.name
    if rng.chance(0.25) or invented:
        lead = rng.choice(
            ("Use {}", "Call {}", "Please call the {} tool", "Run {}", "Use the tool {}", "I want you to use {}")
        ).format(one.name)
    else:
        verb, _, rest = one.action.partition(" ")
        lead = rng.choice(
            (
                "Please {}",
                "Can you {}",
                "{}",
                "I need to {}",
                "I want to {}",
                "Could you {}",
                "{} for me",
                "Help me to {}",
                "Now {}",
                "Go and {}",
                "I would like you to {}",
                "You should {}",
            )
        ).format(f"{verb} {rest}")
        lead = lead[0].upper() + lead[1:]
        if rng.chance(0.25):
            lead = lead.replace(f" {rest}", f" the {one.noun}", 1) if rest.endswith(one.noun) else lead
    return lead + shown + tail
