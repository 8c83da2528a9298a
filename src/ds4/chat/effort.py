"""How hard the model is asked to think: the texts that open the prompt, and what the effort names of clients mean.

The texts are protocol data of the V4 chat format. Two generations of checkpoints use them differently: `preview`
(the first release) and `0731` (checkpoints of that date and later).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ds4.errors import RequestError

PROFILES = ("preview", "0731")

# Below this context size, in tokens, there is no room for the long deliberation that `max` asks for.
MAX_EFFORT_CONTEXT = 393_216

_THOROUGH = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause,"
    " rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered"
    " alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_EXHAUSTIVE = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the"
    " problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying"
    " cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain"
    " that no assumption remains unchecked and no error remains undiscovered.\n\n"
)

_TEXTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "preview": MappingProxyType({"high": "", "max": _THOROUGH}),
        "0731": MappingProxyType({"low": "", "high": _THOROUGH, "max": _EXHAUSTIVE}),
    }
)
_DEFAULTS = MappingProxyType({"preview": "high", "0731": "low"})
# Names that clients send. `none` switches thinking off and is handled before this table.
_NAMES = MappingProxyType(
    {
        "preview": MappingProxyType(
            {"minimal": "high", "low": "high", "medium": "high", "high": "high", "xhigh": "high", "max": "max"}
        ),
        "0731": MappingProxyType(
            {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "high", "max": "max"}
        ),
    }
)


def check_profile(profile: str) -> str:
    """Return `profile` if it is one of PROFILES; raises RequestError otherwise."""
    if profile not in _TEXTS:
        raise RequestError(f"effort profile {profile!r} is not known: use one of {', '.join(PROFILES)}")
    return profile


def resolve(effort: str | None, profile: str = "preview", context: int | None = None) -> str:
    """Return the level that a client's effort name means in this profile: `none`, `low`, `high` or `max`.

    None gives the profile's default. With a `context` (tokens) that is too small for it, `max` becomes `high`.
    Raises RequestError for a name that no client should send.
    """
    names = _NAMES[check_profile(profile)]
    if effort is None:
        return _DEFAULTS[profile]
    if effort == "none":
        return "none"
    if effort not in names:
        raise RequestError(f"reasoning effort {effort!r} is not known: use one of none, {', '.join(names)}")
    level = names[effort]
    if level == "max" and context is not None and context < MAX_EFFORT_CONTEXT:
        return "high"
    return level


def effort_text(level: str, profile: str = "preview") -> str:
    """Return the text between the first token and the system text for a level that `resolve` gave; maybe empty."""
    return _TEXTS[check_profile(profile)].get(level, "")
