"""The page at /docs: the description of the paths for people. Plain HTML, which needs neither scripts nor a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

HEADERS: tuple[tuple[str, str], ...] = (("content-security-policy", "default-src 'none'; style-src 'unsafe-inline'"),)
"""Headers of the page: it loads nothing, whatever a description may contain."""

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
code, h2 { font-family: ui-monospace, monospace; }
h2 { border-top: 1px solid #8888; font-size: 1.1rem; margin-top: 2.5rem; padding-top: 1rem; }
h3 { font-size: 1rem; margin-bottom: .3rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid #8883; padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top; }
:root { color-scheme: light dark; }
"""


def page(schema: Mapping[str, Any]) -> str:
    """The page of an OpenAPI description."""
    title = f"{schema['info']['title']} {schema['info']['version']}"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(text)}</p>" for text in _paragraphs(schema)),
        '<p>For programs: <a href="/openapi.json">/openapi.json</a></p>',
        "<ul>",
        *(
            f'<li><a href="#{escape(operation["operationId"])}"><code>{escape(method)} {escape(path)}</code></a>'
            f" {escape(operation['summary'])}</li>"
            for method, path, operation in _operations(schema)
        ),
        "</ul>",
        *(text for found in _operations(schema) for text in _operation(schema, *found)),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _paragraphs(schema: Mapping[str, Any]) -> Iterator[str]:
    if schema["info"].get("description"):
        yield schema["info"]["description"]
    if schema.get("security"):
        yield "This server needs an API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."


def _operations(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def _operation(schema: Mapping[str, Any], method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f'<h2 id="{escape(operation["operationId"])}">{escape(method)} {escape(path)}</h2>'
    yield f"<p>{escape(operation['summary'])}</p>"
    if operation.get("parameters"):
        rows = [(p["name"], type_of(p["schema"]), p.get("description", "")) for p in operation["parameters"]]
        yield from _table("Path", ("parameter", "type", ""), rows)
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        yield from _table("Body: a JSON object", ("field", "type", ""), _fields(body))
    rows = []
    for status, response in operation["responses"].items():
        kinds = []
        for kind, content in response.get("content", {}).items():
            members = ", ".join(_target(schema, content.get("schema", {})).get("properties", {}))
            kinds.append(f"{kind}: {members}" if members else kind)
        rows.append((str(status), "; ".join(kinds), response["description"]))
    yield from _table("Answers", ("status", "body", ""), rows)


def _target(schema: Mapping[str, Any], value: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a reference refers to; anything else is itself."""
    name = value.get("$ref")
    return schema["components"]["schemas"][name.rsplit("/", 1)[1]] if isinstance(name, str) else value


def _fields(schema: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Name, type and description of every field of an object, followed by those of the objects in it."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        kind = type_of(field) + (", required" if name in required else "")
        yield prefix + name, kind, field.get("description", "")
        for inner in [field, *field.get("anyOf", ())]:
            if inner.get("type") == "object":
                yield from _fields(inner, f"{prefix}{name}.")
            elif inner.get("type") == "array":
                yield from _fields(inner.get("items", {}), f"{prefix}{name}[].")


def type_of(schema: Mapping[str, Any]) -> str:
    """The type of a value in words: `integer`, `string or array of string`; null goes without saying."""
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        words = dict.fromkeys(type_of(inner) for inner in alternatives if inner.get("type") != "null")
        return " or ".join(words)
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return " or ".join(repr(value) for value in schema["enum"])
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(kind)
    return f"array of {type_of(schema.get('items', {}))}" if kind == "array" else str(kind)


def _table(title: str, head: tuple[str, ...], rows: Any) -> Iterator[str]:
    yield f"<h3>{escape(title)}</h3><table>"
    yield "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"
    for first, *others in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        yield f"<tr><td><code>{escape(first)}</code></td>{cells}</tr>"
    yield "</table>"
