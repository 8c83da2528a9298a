"""Words that no list holds: what training puts into names, values and paths, so that copying is learned, not a list.

A model that only ever sees the words of the lists completes a value from its first letters ("Dubai" becomes "Denver").
Most of these words are spelled from several tokens.
"""

from __future__ import annotations

import random
from functools import cache

from . import corpus


def _list(text: str) -> list[str]:
    return text.split()


ONSETS = _list(
    """b c d f g h j k l m n p q r s t v w x y z bl br ch cl cr dr fl fr gl gr kl kn kr ph pl pr sc sh sk sl sm sn sp st
    str sw th tr tw wh zw"""
)
VOWELS = _list("a e i o u a e i o u ai au ea ee ei ie oo ou y")
CODAS = ["", "", "", "", *_list("b ck d f g k l ll m n nd ng nk nt p r rd rk rm rn rt s sh ss st t th x z")]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"
ACCENTS = str.maketrans("aeioucnsz", "äéíöüçñšž")
FOREIGN = _list("東京 北京 서울 Москва Київ Αθήνα القاهرة ירושלים दिल्ली ไทย Łódź Århus naïve São größe çay")


@cache
def english() -> tuple[str, ...]:
    """Words of the permissive text, each once, in the file's order."""
    return tuple(dict.fromkeys(w for w, _, _ in corpus.load().definitions if 3 <= len(w) <= 11))


def invented(rng: random.Random) -> str:
    """One to three syllables."""
    count = rng.choice((1, 2, 2, 2, 3))
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(count))


def code(rng: random.Random) -> str:
    """Letters and digits without a meaning."""
    kind = rng.random()
    if kind < 0.4:
        return "".join(rng.choice(LETTERS + DIGITS) for _ in range(rng.randint(3, 8)))
    if kind < 0.7:
        return "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 7)))
    return rng.choice(LETTERS) + rng.choice(("", "-", "_")) + str(rng.randint(0, 99999))


def joined(rng: random.Random) -> str:
    """Two words as programs join them."""
    a, b = rng.choice(english()), rng.choice(english()) if rng.random() < 0.6 else invented(rng)
    glue = rng.choice(("_", "-", "", "camel"))
    return a + b.capitalize() if glue == "camel" else a + glue + b


def word(rng: random.Random, plain: bool = False) -> str:
    """A word; `plain` keeps to lower-case letters, digits, "_" and "-", as paths and addresses want it."""
    kind = rng.random()
    if kind < 0.45:
        text = rng.choice(english())
    elif kind < 0.75:
        text = invented(rng)
    elif kind < 0.86:
        text = code(rng)
    elif kind < 0.94 or plain:
        text = joined(rng)
    elif kind < 0.98:
        text = rng.choice((rng.choice(english()), invented(rng))).translate(ACCENTS)
    else:
        text = rng.choice(FOREIGN)
    if plain:
        return text.lower()
    case = rng.random()
    return text.capitalize() if case < 0.2 else text.upper() if case < 0.25 else text


def name(rng: random.Random) -> str:
    """A name as of a person or a place."""
    kind = rng.random()
    text = invented(rng) if kind < 0.6 else rng.choice(english()) if kind < 0.9 else rng.choice(FOREIGN)
    if kind > 0.55 and rng.random() < 0.2:
        text = text.translate(ACCENTS)
    return text[:1].upper() + text[1:]
