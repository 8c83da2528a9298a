"""A memory plan as the text that `ds4 --plan` prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds4.model.cuda.plan import MemoryPlan, Verdict

_GIB = 1 << 30


def plan_table(plan: MemoryPlan, cards: Iterable[tuple[float, MemoryPlan]], auto: bool) -> str:
    """Items and sums of a plan, then each card with a verdict on the plan that it would get.

    Args:
        cards: sizes in GB, and that plan: the first one, maybe with smaller chunks or, with `auto`, the other layout.
    """
    o = plan.options
    width = max(len(item.name) for item in plan.items) + 2
    sessions = f"{o.sessions} session{'s' if o.sessions > 1 else ''} of {o.context:,} tokens"
    how = ", in float32" if o.quality else ""
    lines = [f"Memory plan: {plan.shape.name}, {sessions}, prefill chunk {o.chunk:,}{how}"]
    part = ""
    for item in plan.items:
        if item.part != part:
            part = item.part
            lines += ["", f"{part}: {size(plan.bytes_of(part))}"]
        detail = f"   {item.detail}" if item.detail else ""
        lines.append(f"  {item.name:<{width}}{size(item.nbytes):>11}{detail}".rstrip())
    total = f"on the card: {size(plan.card_bytes)}"
    if plan.has_layouts:
        other = plan.other()
        total += f" with {_layout(plan)} of the experts, {size(other.card_bytes)} with {_layout(other)}"
    lines += ["", total, ""]
    for card, chosen in cards:
        lines += _on_card(chosen, card, auto, o.chunk)
    return "\n".join(lines) + "\n"


def _on_card(plan: MemoryPlan, card_gb: float, auto: bool, chunk: int) -> list[str]:
    verdict = plan.verdict(card_gb)
    line, advice = f"{card_gb:g} GB card: {_words(verdict)}", list(verdict.advice)
    if plan.has_layouts:
        other = plan.other()
        rest = other.verdict(card_gb)
        line += f" with {_layout(plan)} ({_layout(other)}: {_words(rest)})"
        if auto and plan.options.layout == "a" and rest.advice != verdict.advice:  # with more of something B is taken
            advice = [f"{text} with {_layout(plan)}" for text in verdict.advice]
            advice += [f"{text} with {_layout(other)}" for text in rest.advice]
    if plan.options.chunk != chunk:
        line += f", in prefill chunks of {plan.options.chunk:,}"
    return [line, *(f"  - {text}" for text in advice)]


def _layout(plan: MemoryPlan) -> str:
    return f"layout {plan.options.layout.upper()}"


def _words(verdict: Verdict) -> str:
    return f"fits, {size(verdict.free)} left" if verdict.fits else f"does not fit, {size(-verdict.free)} short"


def size(nbytes: int) -> str:
    """Bytes for people: GiB from a tenth of one on, else MiB, and KiB below one."""
    if nbytes >= _GIB // 10:
        return f"{nbytes / _GIB:.2f} GiB"
    return f"{nbytes / (1 << 20):.2f} MiB" if nbytes >= 1 << 20 or not nbytes else f"{nbytes / (1 << 10):.2f} KiB"
