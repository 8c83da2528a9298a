"""Tool results as services give them: JSON with more keys than the answer needs, in any order, bare or wrapped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .toolbox import Event
from .words import COUNTRIES, Source

Pairs = list[tuple[str, Any]]
Parts = tuple[Pairs, str, tuple[str, ...]]  # pairs of the result, the answer, what the answer must hold

EXTRAS: dict[str, Callable[[Source], Any]] = {
    "country": lambda r: r.choice(COUNTRIES)[0],
    "region": lambda r: r.word(),
    "source": lambda r: r.word(),
    "provider": lambda r: r.name(),
    "updated": lambda r: r.date(),
    "timestamp": lambda r: f"{r.date()}T{r.clock()}",
    "version": lambda r: f"{r.randint(0, 9)}.{r.randint(0, 20)}",
    "cached": lambda r: r.chance(0.5),
    "ok": lambda r: True,
    "request_id": lambda r: f"{r.pseudo()}-{r.randint(100, 9999)}",
    "unit": lambda r: r.choice(("metric", "imperial", "celsius", "C")),
    "language": lambda r: r.choice(("en", "de", "fr")),
    "latitude": lambda r: r.decimal(),
    "longitude": lambda r: r.decimal(),
    "elapsed_ms": lambda r: r.integer(1, 9999),
    "page": lambda r: r.randint(1, 9),
    "total": lambda r: r.integer(1, 999),
    "error": lambda r: None,
    "category": lambda r: r.word(),
    "tags": lambda r: [r.word() for _ in range(r.randint(0, 2))],
    "humidity": lambda r: r.randint(5, 100),
    "wind": lambda r: r.randint(0, 90),
    "feels_like": lambda r: r.randint(-9, 39),
}


def as_json(rng: Source, pairs: Pairs, most: int = 5) -> str:
    """The pairs among up to `most` others, as JSON text."""
    taken = {key for key, _ in pairs}
    names = [name for name in rng.sample(tuple(EXTRAS), rng.randint(0, most)) if name not in taken]
    items = [*pairs, *((name, EXTRAS[name](rng)) for name in names)]
    rng.shuffle(items)
    body: Any = dict(items)
    wrapped = rng.random()
    if wrapped < 0.1:
        body = {rng.choice(("result", "data", "response")): body}
    elif wrapped < 0.18:
        body = {"status": "ok", "data": body}
    elif wrapped < 0.22:
        body = [body]
    form = rng.random()
    if form < 0.15:
        return json.dumps(body, ensure_ascii=False, indent=2)
    return json.dumps(body, ensure_ascii=False, separators=(",", ":") if form < 0.35 else None)


def weather(rng: Source, event: Event) -> Parts:
    city, sky = str(event.args[0]), event.must[0]
    degrees = rng.randint(-9, 39) if rng.chance(0.75) else rng.randint(-90, 390) / 10
    pairs: Pairs = [(rng.choice(("temperature", "temp", "degrees", "temperature_c", "celsius")), degrees)]
    if rng.chance(0.75):
        pairs.append((rng.choice(("city", "location", "place", "name")), city))
    if rng.chance(0.35):
        return pairs, f"It is {degrees} degrees in {city}.", (str(degrees),)
    pairs.append((rng.choice(("sky", "condition", "conditions", "weather", "summary", "description")), sky))
    return pairs, f"The weather in {city} is {sky} with {degrees} degrees.", (sky, str(degrees))


def clock(rng: Source, event: Event) -> Parts:
    pairs: Pairs = [(rng.choice(("time", "local_time", "clock", "now")), event.must[0])]
    if rng.chance(0.6):
        pairs.append((rng.choice(("city", "place", "timezone", "zone")), event.args[0]))
    return pairs, event.answer, event.must


def stock(rng: Source, event: Event) -> Parts:
    pairs: Pairs = [(rng.choice(("price", "last", "quote", "value")), float(event.must[0]))]
    if rng.chance(0.7):
        pairs.append((rng.choice(("symbol", "ticker", "name")), event.args[0]))
    if rng.chance(0.5):
        pairs += [("currency", "USD"), ("change", rng.decimal())]
    return pairs, event.answer, event.must


def currency(rng: Source, event: Event) -> Parts:
    amount, a, b = event.args
    pairs: Pairs = [(rng.choice(("result", "converted", "value", "total")), float(event.must[0]))]
    if rng.chance(0.7):
        pairs += [("amount", amount), ("from", a), ("to", b)]
    if rng.chance(0.5):
        pairs.append(("rate", rng.decimal()))
    return pairs, event.answer, event.must


def contact(rng: Source, event: Event) -> Parts:
    known = json.loads(event.result)
    pairs: Pairs = [
        (rng.choice(("name", "full_name", "contact")), known["name"]),
        (rng.choice(("email", "mail", "email_address")), known["email"]),
        (rng.choice(("phone", "telephone", "phone_number", "mobile")), known["phone"]),
    ]
    return pairs, event.answer, event.must


def calendar(rng: Source, event: Event) -> Parts:
    pairs: Pairs = [(rng.choice(("event_id", "id")), int(event.must[0]))]
    if rng.chance(0.6):
        pairs += [("title", event.args[0]), ("date", event.args[1])]
    return pairs, event.answer, event.must


def todo(rng: Source, event: Event) -> Parts:
    pairs: Pairs = [(rng.choice(("count", "items", "length")), int(event.must[0])), ("added", event.args[0])]
    return pairs, event.answer, event.must


def fetch(rng: Source, event: Event) -> Parts:
    pairs: Pairs = [("title", event.must[0])]
    if rng.chance(0.7):
        pairs += [("url", event.args[0]), ("status", 200)]
    return pairs, event.answer, event.must


def search(rng: Source, event: Event) -> Parts:
    titles = [event.must[0], *(rng.phrase(2, 3) for _ in range(rng.randint(1, 3)))]
    hits: list[dict[str, str]] = [{"title": title, "url": rng.url()} for title in titles]
    if rng.chance(0.5):
        hits = [{"url": hit["url"], "title": hit["title"]} for hit in hits]
    return [(rng.choice(("results", "hits", "items")), hits)], event.answer, event.must


def news(rng: Source, event: Event) -> Parts:
    title, month = event.must
    when = month if rng.chance(0.5) else f"{rng.randint(1, 28)} {month}"
    pairs: Pairs = [(rng.choice(("title", "headline")), title), (rng.choice(("month", "date")), when)]
    return pairs, event.answer, event.must


def translate(rng: Source, event: Event) -> Parts:
    pairs: Pairs = [(rng.choice(("translation", "translated", "result", "output")), event.must[0])]
    if rng.chance(0.6):
        pairs += [("text", event.args[0]), ("target", event.args[1])]
    return pairs, event.answer, event.must


def shell(rng: Source, event: Event) -> Parts:
    if not event.result:
        return [("stdout", ""), ("exit_code", 0)], event.answer, event.must
    pairs: Pairs = [(rng.choice(("stdout", "output")), event.result), ("exit_code", 0)]
    if rng.chance(0.5):
        pairs.append(("stderr", ""))
    return pairs, event.answer, event.must


def listing(rng: Source, event: Event) -> Parts:
    pairs: Pairs = [(rng.choice(("files", "entries", "names", "matches")), list(event.must))]
    if rng.chance(0.5):
        pairs.append((rng.choice(("path", "folder", "pattern")), event.args[0]))
    return pairs, event.answer, event.must


def grep(rng: Source, event: Event) -> Parts:
    path, line = event.must
    pairs: Pairs = [(rng.choice(("file", "path")), path), (rng.choice(("line", "line_number")), int(line))]
    if rng.chance(0.6):
        pairs.append((rng.choice(("text", "match")), event.args[0]))
    return pairs, event.answer, event.must


MAKERS: dict[str, Callable[[Source, Event], Parts]] = {
    "weather": weather,
    "clock": clock,
    "stock": stock,
    "currency": currency,
    "contact": contact,
    "calendar": calendar,
    "todo": todo,
    "fetch": fetch,
    "search": search,
    "news": news,
    "translate": translate,
    "shell": shell,
    "shell_array": shell,
    "list": listing,
    "glob": listing,
    "grep": grep,
}


def varied(rng: Source, key: str, event: Event) -> Event:
    """The event with a result in such JSON; itself where a tool's result is no data."""
    if key not in MAKERS or (key.startswith("shell") and "\n" in event.result):
        return event
    pairs, answer, must = MAKERS[key](rng, event)
    return Event(event.request, event.args, as_json(rng, pairs), answer, must)
