"""Arithmetic with worked steps: + and - to 999, * to 12. A hash of the operands keeps some problems for evaluation."""

from __future__ import annotations

from .dialog import Dialog
from .words import NAMES, Source, held_out

PLACES = ("ones", "tens", "hundreds", "thousands")
ASK = (
    "What is {}?",
    "{}",
    "{} = ?",
    "Calculate {}.",
    "How much is {}?",
    "Compute {}",
    "what's {}",
    "Can you work out {}?",
    "Please solve {}.",
    "Tell me {}.",
    "I need the result of {}.",
    "Solve: {}",
)
STORIES = {
    "+": (
        "{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?",
        "There are {a} {t} in one box and {b} {t} in another. How many {t} are there in all?",
        "{n} counted {a} {t} on Monday and {b} on Tuesday. What is the total?",
    ),
    "-": (
        "{n} has {a} {t} and gives away {b}. How many {t} are left?",
        "A shop had {a} {t} and sold {b}. How many {t} remain?",
    ),
    "*": (
        "{n} has {a} boxes with {b} {t} each. How many {t} is that?",
        "One ticket costs {b} coins. How many coins do {a} tickets cost?",
    ),
}
GOODS = (
    "apples",
    "books",
    "coins",
    "cards",
    "pencils",
    "stones",
    "eggs",
    "cups",
    "tickets",
    "stamps",
    "balls",
    "plums",
)


def pair_key(a: int, op: str, b: int) -> str:
    """The operands as the split sees them: a+b and b+a are one problem."""
    low, high = sorted((a, b)) if op in "+*" else (a, b)
    return f"{low}{op}{high}"


def problem(rng: Source) -> tuple[int, str, int]:
    """Operands and operator of the source's split."""

    def make() -> tuple[int, str, int]:
        op = rng.choice("++--*")
        if op == "*":
            return rng.randint(0 if rng.chance(0.1) else 2, 12), op, rng.randint(2, 12)
        top = rng.choice((20, 99, 99, 999, 999))
        a, b = rng.randint(0, top), rng.randint(0, top)
        if op == "-" and a < b and rng.chance(0.8):
            a, b = b, a
        return a, op, b

    return rng.of_split("pair", make, lambda p: pair_key(*p))


def solve(a: int, op: str, b: int) -> int:
    return a + b if op == "+" else a - b if op == "-" else a * b


def steps(a: int, op: str, b: int) -> str:
    """The worked steps, digit by digit for + and -, by repeated addition for *."""
    if op == "*":
        if a == 0:
            return f"0 times {b} is 0."
        return f"{a} times {b}: " + ", ".join(f"{n}: {n * b}" for n in range(1, a + 1)) + "."
    if op == "-" and a < b:
        return f"{a} is less than {b}, so I work out {b} - {a}. {steps(b, op, a)} So the result is -{b - a}."
    x, y = str(a)[::-1], str(b)[::-1]
    carry, parts, out = 0, [], ""
    for n in range(max(len(x), len(y))):
        p, q = int(x[n]) if n < len(x) else 0, int(y[n]) if n < len(y) else 0
        if op == "+":
            total = p + q + carry
            tail = f" + {carry}" if carry else ""
            carry, digit = divmod(total, 10)
            parts.append(
                f"{PLACES[n]}: {p} + {q}{tail} = {total}, write {digit}" + (f", carry {carry}" if carry else "")
            )
        else:
            tail = f" - {carry}" if carry else ""
            total = p - q - carry
            carry = 1 if total < 0 else 0
            digit = total + 10 * carry
            middle = f"{total}, borrow, {digit}" if carry else f"{digit}"
            parts.append(f"{PLACES[n]}: {p} - {q}{tail} = {middle}")
        out = str(digit) + out
    if carry:
        out = str(carry) + out
    lead = "" if out == str(int(out)) else f" {out} is {int(out)}."
    return "; ".join(parts) + "." + f" Together {out}." + lead


def exchange(dialog: Dialog, rng: Source, numbers: tuple[int, str, int] | None = None) -> None:
    """One question and its answer."""
    a, op, b = numbers or problem(rng)
    value = solve(a, op, b)
    if rng.chance(0.2) and value >= 0 and min(a, b) > 1:
        text = rng.choice(STORIES[op]).format(a=a, b=b, n=rng.choice(NAMES), t=rng.choice(GOODS))
    else:
        shown = {"+": ("+", " plus "), "-": ("-", " minus "), "*": ("*", " times ", "x")}[op]
        sign = rng.choice(shown)
        sign = f" {sign} " if len(sign) == 1 and rng.chance(0.75) else sign
        text = rng.choice(ASK).format(f"{a}{sign}{b}")
    dialog.user(text)
    answer = f"{a} {op} {b} = {value}."
    if dialog.thinking:
        dialog.say(answer, f"{a} {op} {b}. " + steps(a, op, b), task="arithmetic", number=value)
    else:
        dialog.say(steps(a, op, b) + " " + answer, task="arithmetic", number=value)


def conversation(rng: Source, system: str = "") -> Dialog:
    dialog = Dialog(thinking=rng.chance(0.6))
    dialog.system(system)
    for _ in range(rng.choice((1, 1, 1, 2) if dialog.thinking else (1, 1, 2, 3))):
        exchange(dialog, rng)
    return dialog


def all_held_out() -> int:
    """Number of held-out products, the smallest group."""
    return sum(held_out("pair", pair_key(a, "*", b)) for a in range(2, 13) for b in range(a, 13))
