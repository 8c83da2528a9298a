"""What the parsers of all APIs share: validation errors in words, thinking, sampling, unsupported fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ds4.chat.effort import resolve
from ds4.engine.sampling import Sampling, logit_bias
from ds4.errors import Ds4Error, RequestError
from ds4.server.api.chat_types import OpenAIRequest, ThinkingOption
from ds4.server.config import ServerConfig
from ds4.server.errors import ApiError
from ds4.server.request import Done

Body = TypeVar("Body", bound=BaseModel)

MAX_STOPS, MAX_STOP_LENGTH = 64, 1024
"""Most stop strings, and most characters of one: they are looked for with every token, between the steps of all."""

_SAMPLING = tuple(entry.name for entry in fields(Sampling))


def validate(kind: type[Body], value: Mapping[str, Any]) -> Body:
    """The body as its type. Raises ApiError 400 that names the first wrong field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        field, *item = problems[0]["loc"][:2]
        # A field with several types has one problem for each of them; of a list the first wrong item counts.
        where = (field, *item) if item and isinstance(item[0], int) else (field,)
        same = [problem for problem in problems if problem["loc"][: len(where)] == where]
        path = "".join(_step(part) for part in same[-1]["loc"]).lstrip(".")
        what = " or ".join(dict.fromkeys(_words(problem["msg"]) for problem in same))
        raise ApiError(400, f"invalid JSON request: {path}: expected {what}", param=str(field)) from None


def _words(message: str) -> str:
    """A problem in JSON's words."""
    for prefix in ("Input should be ", "List should have "):
        message = message.removeprefix(prefix)
    return message.split(" or instance of")[0].replace("valid dictionary", "object").replace("a object", "an object")


def _step(part: int | str) -> str:
    """One step of the way to a field; alternatives of a type add their own names, which say nothing to a client."""
    if isinstance(part, int):
        return f"[{part}]"
    is_type = part in ("bool", "str", "int", "float") or "[" in part or not part.islower()
    return "" if is_type else f".{part}"


def refuse(field: str, why: str, param: str | None = None) -> ApiError:
    """A 400 for a field that cannot be honoured. `param`: the field of the body, if it is one inside it."""
    return ApiError(400, f"{field} is not supported: {why}", param=param or field, code="unsupported_parameter")


def malformed(reply: Done) -> ApiError:
    """The failure of a stream whose calls cannot be read; what it sent of them is closed."""
    problem = "; ".join(reply.message.problems) or "the tool call could not be read"
    return ApiError(500, f"the model wrote a malformed tool call: {problem}")


def thinking_of(
    thinking: bool | str | None, think: bool | None, effort: str | None, model: str | None, default: bool
) -> bool:
    """Whether a request thinks.

    Effort `none` switches it off whatever else is said; then the explicit controls count, then an effort, then the
    names of models that always (never) think, then the default.
    """
    if effort == "none":
        return False
    if isinstance(thinking, str):
        thinking = {"enabled": True, "disabled": False}.get(thinking)
    for control in (thinking, think):
        if control is not None:
            return control
    if effort is not None:
        return True
    return {"deepseek-chat": False, "deepseek-reasoner": True}.get(model or "", default)


def openai_thinking(body: OpenAIRequest, effort: str | None, config: ServerConfig) -> bool:
    """Whether a request of OpenAI's APIs thinks; they do by default."""
    asked = body.thinking.type if isinstance(body.thinking, ThinkingOption) else body.thinking
    default = True if config.think_default is None else config.think_default
    return thinking_of(asked, body.think, effort, body.model, default)


def check_effort(effort: str | None, config: ServerConfig, field: str) -> str | None:
    """The effort if its name is known. Raises ApiError 400."""
    try:
        resolve(effort, config.effort_profile)
    except RequestError as error:
        raise ApiError(400, f"{field}: {error}", param=field) from None
    return effort


def sampling_of(body: BaseModel, vocab: int) -> Sampling:
    """Sampling from the fields that a body has of it; None means the default. Raises ApiError 400, naming the field."""
    values = {name: getattr(body, name, None) for name in _SAMPLING}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    for name, value in list(given.items()):
        try:
            if name == "logit_bias":
                value = given[name] = logit_bias(value, vocab)
            Sampling(**{name: value})
        except Ds4Error as error:
            raise ApiError(400, str(error), param=name) from None
    if given.get("seed", 0) < 0:
        given["seed"] = 0  # as 0: random
    return Sampling(**given)


def count_of(n: int | None, config: ServerConfig) -> int:
    """How many answers are wanted. Raises ApiError 400 for more than can be written at once."""
    if n is not None and not 1 <= n <= config.max_sessions:
        text = f"n is {n}; it must be from 1 to {config.max_sessions}, the conversations kept live (--max-sessions)"
        raise ApiError(400, text, param="n")
    return n or 1


def stops_of(stop: str | list[str] | None, field: str = "stop") -> tuple[str, ...]:
    """Stop strings, each once, without empty ones. Raises ApiError 400 for too many, or one that is too long."""
    stops = tuple(dict.fromkeys(text for text in ([stop] if isinstance(stop, str) else stop or ()) if text))
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"{field} has {len(stops)} strings; at most {MAX_STOPS} are looked for", param=field)
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_LENGTH:
        text = f"{field} has a string of {longest} characters; it may have {MAX_STOP_LENGTH}"
        raise ApiError(400, text, param=field)
    return stops
