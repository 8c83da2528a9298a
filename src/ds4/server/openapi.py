"""The description of the paths for programs: OpenAPI, of which the page at /docs is made as well."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.responses import PlainTextResponse

from ds4.server.api.base import Api

_STATUSES: Mapping[int, str] = MappingProxyType(
    {
        400: "The request is wrong, or its prompt does not fit into the context",
        401: "The API key is missing or wrong",
        403: "A web page of another site sends this, and the server does not allow that (--cors)",
        404: "There is no such model",
        409: "What the request continues is not there any more; it has to be sent whole",
        413: "The body is too large",
        429: "Too many requests wait already",
        431: "The headers are too large",
        500: "The engine failed; other requests go on",
        503: "The server is shutting down, or its engine has ended",
    }
)

# Fields of the bodies that have the same meaning on all APIs.
_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "model": "Echoed in the answer; the loaded model answers to any name.",
        "messages": "The conversation, oldest message first.",
        "input": "The conversation: a text, or items.",
        "system": "Text or text blocks ahead of the conversation.",
        "instructions": "Text ahead of the conversation, for this answer only.",
        "tools": "Functions that the model may call.",
        "tool_choice": "auto; none forbids calls; required (any) or the name of a tool forces one.",
        "parallel_tool_calls": "false ends the answer after its first call.",
        "max_tokens": "Limit of the answer in tokens.",
        "max_completion_tokens": "Limit of the answer in tokens.",
        "max_output_tokens": "Limit of the answer in tokens.",
        "temperature": "0 takes the most probable token; default 1.",
        "top_p": "Keeps the most probable tokens up to this sum; default 1.",
        "min_p": "Drops tokens less probable than this times the most probable one; default 0.05.",
        "top_k": "Keeps this many tokens; default 0, all.",
        "seed": "The same seed draws the same tokens; default random, and so are 0 and negative ones.",
        "stop": "Texts that end the answer.",
        "stop_sequences": "Texts that end the answer.",
        "stream": "Server-sent events while the answer grows.",
        "stream_options": "With include_usage the stream ends with the token counts.",
        "include_usage": "Token counts at the end of the stream.",
        "thinking": "Reasoning before the answer, on or off.",
        "think": "Reasoning before the answer, on or off.",
        "reasoning_effort": "How long to reason; none switches it off.",
        "effort": "How long to reason; none switches it off.",
        "previous_response_id": "The answer that this request continues.",
        "n": "How many answers are written from the same prompt; default 1. Responses: only 1.",
        "best_of": "Only the same as n.",
        "echo": "Only false.",
        "suffix": "Not supported.",
        "logprobs": "How probable the tokens of the text were (completions: with so many alternatives, up to 20).",
        "top_logprobs": "How many alternatives are told for each token, 0 to 20.",
        "logit_bias": "Token id to a number from -100 to 100 that is added to its logit.",
        "presence_penalty": "-2 to 2; lowers the logits of tokens that were taken before.",
        "frequency_penalty": "-2 to 2; lowers them once for each time.",
        "include": "Only message.output_text.logprobs counts.",
        "response_format": "text, json_object, or json_schema with the schema that the answer follows.",
        "format": "text, json_object, or json_schema with the schema that the answer follows.",
        "output_format": "The older name of output_config.format.",
        "functions": "Not supported; see tools.",
        "function_call": "Not supported; see tool_choice.",
        "modalities": "Only text.",
        "audio": "Not supported.",
    }
)

# Members that every whole answer of an API has.
_OPENAI = {"id": "string", "object": "string", "created": "integer", "model": "string", "choices": "array"}
_ANSWERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "/v1/chat/completions": {**_OPENAI, "usage": "object"},
        "/v1/completions": {**_OPENAI, "usage": "object"},
        "/v1/responses": {
            "id": "string",
            "object": "string",
            "created_at": "number",
            "status": "string",
            "model": "string",
            "output": "array",
            "usage": "object",
        },
        "/v1/messages": {
            "id": "string",
            "type": "string",
            "role": "string",
            "model": "string",
            "content": "array",
            "stop_reason": "string",
            "usage": "object",
        },
    }
)
# APIs whose requests may continue an earlier answer.
_CONTINUED = frozenset({"/v1/responses", "/v1/messages"})


def object_of(members: Mapping[str, str | Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of an object that has these members at least: name -> JSON type, or schema."""
    properties = {name: {"type": kind} if isinstance(kind, str) else dict(kind) for name, kind in members.items()}
    return {"type": "object", "required": list(members), "properties": properties}


def _model() -> dict[str, Any]:
    texts = dict.fromkeys(("id", "object", "owned_by", "type", "display_name", "created_at"), "string")
    return object_of({**texts, "created": "integer", "context_length": "integer"})


def health_operation() -> dict[str, Any]:
    """What `FastAPI.add_api_route` is told about /health."""
    numbers = dict.fromkeys(("context_length", "waiting", "running", "sessions"), "integer")
    answer = object_of({"status": "string", "model": "string", **numbers})
    result = operation("GET", "/health", "Whether the server lives, and what it does", answer, (431,))
    body = {"application/json": {"schema": answer}}
    result["responses"][503] = {"description": "The engine has ended; start the server again", "content": body}
    return result


def metrics_operation() -> dict[str, Any]:
    """The same for /metrics."""
    result = operation("GET", "/metrics", "The server's numbers for Prometheus", {}, (401, 431))
    result["responses"][200]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return {**result, "response_class": PlainTextResponse}


def stats_operation() -> dict[str, Any]:
    """The same for /stats."""
    summary = "The same numbers as JSON, times with estimated quantiles"
    groups = ("info", "requests", "prompt_tokens", "time_to_first_token_seconds", "time_per_token_seconds", "kv_bytes")
    numbers = ("requests_waiting", "requests_running", "sessions", "sessions_limit", "completion_tokens")
    answer = object_of({**dict.fromkeys(groups, "object"), **dict.fromkeys(numbers, "integer")})
    return operation("GET", "/stats", summary, answer, (401, 431))


def sessions_operation() -> dict[str, Any]:
    """The same for /sessions."""
    numbers = ("request", "tokens", "kv_bytes", "prompt_tokens", "cached_tokens", "completion_tokens")
    session = object_of({"state": {"enum": ["idle", "reading", "writing"]}, **dict.fromkeys(numbers, "integer")})
    answer = object_of(
        {
            "object": "string",
            "data": {"type": "array", "items": session},
            **dict.fromkeys(("waiting", "running", "limit", "context_length"), "integer"),
        }
    )
    return operation(
        "GET", "/sessions", "The live conversations: what each holds, and what it does", answer, (401, 431)
    )


def models_operation() -> dict[str, Any]:
    """The same for the list of models."""
    data = {"type": "array", "items": _model()}
    answer = object_of(
        {"object": "string", "data": data, "has_more": "boolean", "first_id": "string", "last_id": "string"}
    )
    return operation("GET", "/v1/models", "The loaded model under all its names", answer, (401, 431))


def model_operation() -> dict[str, Any]:
    """The same for one model."""
    summary = "The loaded model under one of its names"
    result = operation("GET", "/v1/models/{id}", summary, _model(), (401, 404, 431))
    id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    result["openapi_extra"]["parameters"] = [id]
    return result


def api_operation(api: Api) -> dict[str, Any]:
    """The same for the POST of an API."""
    statuses = (400, 401, 403, *((409,) if api.path in _CONTINUED else ()), 413, 429, 431, 500, 503)
    return operation(
        "POST",
        api.path,
        api.summary,
        object_of(_ANSWERS.get(api.path, {})),
        statuses,
        body=api.body,
        stream=True,
        anthropic=api.anthropic,
    )


def count_operation(api: Api) -> dict[str, Any]:
    """The same for the POST that counts the tokens of an API's requests."""
    answer = object_of({"input_tokens": "integer"})
    summary = "The number of input tokens that such a request has"
    statuses = (400, 401, 403, 409, 413, 431, 500)
    return operation("POST", f"{api.path}/count_tokens", summary, answer, statuses, body=api.body, anthropic=True)


def operation(
    method: str,
    path: str,
    summary: str,
    answer: Mapping[str, Any],
    statuses: tuple[int, ...],
    *,
    body: type[BaseModel] | None = None,
    stream: bool = False,
    anthropic: bool = False,
) -> dict[str, Any]:
    """What `FastAPI.add_api_route` is told about an operation.

    Args:
        answer: the schema of the body with status 200.
        statuses: the errors it may answer with.
        body: the type of the request's body.
        stream: whether it answers with events as well.
        anthropic: errors have Anthropic's shape, else OpenAI's.
    """
    content: dict[str, Any] = {"application/json": {"schema": dict(answer)}}
    if stream:
        content["text/event-stream"] = {}
    error = {"$ref": f"#/components/schemas/{'AnthropicError' if anthropic else 'Error'}"}
    responses: dict[int | str, Any] = {200: {"description": "The answer", "content": content}}
    for status in statuses:
        responses[status] = {"description": _STATUSES[status], "content": {"application/json": {"schema": error}}}
    extra: dict[str, Any] = {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": body_schema(body)}}}
    return {
        "methods": [method],
        "operation_id": method.lower() + path.replace("/", "_").replace("{", "").replace("}", ""),
        "summary": summary,
        "responses": responses,
        "openapi_extra": extra,
    }


def body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The schema of a body that an endpoint reads itself, without references."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})
    inlined: dict[str, Any] = _inline(schema, definitions)
    return inlined


def _inline(value: Any, definitions: Mapping[str, Any]) -> Any:
    """A schema with its references replaced, without the titles that repeat the names, and with descriptions."""
    if isinstance(value, list):
        return [_inline(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    reference = value.get("$ref")
    if isinstance(reference, str):
        return _inline(definitions[reference.rsplit("/", 1)[1]], definitions)
    result = {key: _inline(item, definitions) for key, item in value.items() if key not in ("title", "properties")}
    for name, inner in value.get("properties", {}).items():
        described = _inline(inner, definitions)
        if name in _FIELDS:
            described.setdefault("description", _FIELDS[name])
        result.setdefault("properties", {})[name] = described
    return result


def describe(app: FastAPI, keys_needed: bool) -> dict[str, Any]:
    """The whole description of an application."""
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    components = schema.setdefault("components", {})
    or_null = {"type": ["string", "null"]}
    openai = object_of({"message": "string", "type": "string", "param": or_null, "code": or_null})
    anthropic = object_of({"type": "string", "message": "string"})
    components.setdefault("schemas", {}).update(
        Error=object_of({"error": openai}),
        AnthropicError=object_of({"type": {"const": "error"}, "error": anthropic}),
    )
    if keys_needed:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        schema["security"] = [{"bearer": []}, {"header": []}]
    return schema
