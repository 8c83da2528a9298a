"""Why a generated turn is wrong, finer than the checker's reason: what to change in the data follows from it."""

from __future__ import annotations

import json
import re
from typing import Any

from data.cases import same
from data.dialog import Json

from ds4.chat import parse


def kind_of(value: Any) -> str:
    """What sort of value this is, in a word or two."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "number"
    if not isinstance(value, str):
        return "JSON"
    if "\n" in value:
        return "lines"
    if "@" in value or "://" in value:
        return "address"
    if "/" in value or re.fullmatch(r"[\w-]+\.\w{1,5}", value):
        return "path"
    return "words" if " " in value.strip() else "word"


def explain(want: Json, reason: str, text: str, thinking: bool, tools: list[Json], prompt: str) -> str:
    """A name for the failure: `reason` is the checker's, `prompt` what the model had read."""
    if "calls" not in want:
        if reason == "wrong value" or " lacks " in reason:
            found = re.findall(r"[\w./@:-]*\w", text.rsplit("</think>", 1)[-1])
            source = "from elsewhere" if found and found[-1] in prompt else "made up"
            return f"answer's value {source}"
        return reason
    if reason not in ("wrong tool", "wrong arguments"):
        return reason
    made = [(c.name, json.loads(c.arguments)) for c in parse(text, thinking=thinking, tools=tools or None).tool_calls]
    if len(made) != len(want["calls"]):
        return "too few calls" if len(made) < len(want["calls"]) else "too many calls"
    if reason == "wrong tool":
        offered = {t["function"]["name"] for t in tools}
        return "another tool" if all(name in offered for name, _ in made) else "misspelled tool"
    for name, args in want["calls"]:
        if any(same(m, (name, args)) for m in made):
            continue
        near = [m for m in made if m[0] == name]
        got = max(near, key=lambda m: sum(same(m[1].get(k), v) for k, v in args.items()))[1]
        if args.keys() - got.keys():
            return "argument missing"
        if got.keys() - args.keys():
            return "argument too many"
        for key, value in args.items():
            if same(got[key], value):
                continue
            if type(got[key]) is not type(value):
                return "value of another type"
            shown = got[key] if isinstance(got[key], str) else json.dumps(got[key])
            return f"{kind_of(value)} {'from elsewhere' if shown in prompt else 'made up'}"
    return reason
