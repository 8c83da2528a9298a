"""Packs seeded conversations into rows of token ids with loss weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from . import arith, corpus
from .chat import Chat
from .dialog import Dialog
from .filler import Filler
from .phrases import SYSTEMS
from .recall import Recall, token_pairs
from .tools import Tools
from .words import Source

TOKENIZER = Path(__file__).parents[1] / "tokenizer.json"
MIX = {"tools": 50.0, "chat": 16.0, "arith": 11.0, "copy": 8.0, "kv": 8.0, "recall": 8.0, "text": 7.0}
FACT_TOKENS, QUESTION_TOKENS = 12, 22  # of recall documents, about
KINDS = ("mixed", *MIX, "long", "tokens")


class Generator:
    """An endless seeded stream of rows.

    `mix` gives the weights of the document kinds in "mixed" rows. Knobs of the recall kinds: `distance` (tokens between
    fact and question, low and high), `pairs` and `questions` per document, `kv_pairs` per dense document, `token_pairs`
    per raw row. `room` is the most filler, in tokens, that a tool dialogue may hold, `long_tools` the share of "long"
    documents that are tool dialogues with filler up to the row's length; `text_weight` is the loss weight of plain
    text, `value_weight` that of recalled answers in the kinds kv, recall and long. `wild`: how often a rare word stands
    in place of one of the lists, a choice of values from which each document draws one; `varied` the share of tool
    results in JSON with more keys than needed. Both are for training alone.
    """

    def __init__(
        self,
        seed: int,
        tokenizer: Tokenizer | str | Path | None = None,
        mix: Mapping[str, float] | None = None,
        split: str = "train",
        *,
        distance: tuple[int, int] = (20, 400),
        pairs: tuple[int, int] = (4, 12),
        questions: int = 12,
        kv_pairs: tuple[int, int] = (8, 16),
        token_pairs: tuple[int, int] = (16, 128),
        room: int = 300,
        long_tools: float = 0.25,
        text_weight: float = 0.3,
        value_weight: float = 1.0,
        wild: tuple[float, ...] = (0.0, 0.0, 0.2, 0.6),
        varied: float = 0.35,
    ) -> None:
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer.from_file(str(tokenizer or TOKENIZER))
        self.tokenizer = tokenizer
        self.rng = Source(seed, split)
        self.mix = dict(mix or MIX)
        self.distance, self.pairs, self.questions, self.kv_pairs, self.token_pairs = (
            distance,
            pairs,
            questions,
            kv_pairs,
            token_pairs,
        )
        self.room, self.long_tools = room, long_tools
        self.text_weight, self.value_weight, self.wild = text_weight, value_weight, wild
        text = corpus.load()
        self.filler = Filler(text)
        self.chat = Chat(text)
        self.tools = Tools(self.chat, self.filler, varied if self.rng.trains else 0.0)
        self.recall = Recall(self.chat, self.filler)
        ids = tokenizer.get_vocab()
        self.bos, self.eos, self.pad = (
            ids[s] for s in ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
        )
        self.assistant, self.think, self.end_think = ids["<｜Assistant｜>"], ids["<think>"], ids["</think>"]
        self.words = sorted(i for s, i in ids.items() if s[0] == "Ġ" and s[1:].isalpha() and len(s) > 3)
        self.carry: dict[str, list[tuple[list[int], list[float], str]]] = {}

    def row(self, length: int, kind: str = "mixed") -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """(ids int32 [length], weights float32 [length], meta): weights[i] is the loss weight of predicting ids[i].

        meta: documents as (start, end, kind), and the number of padding tokens at the end.
        """
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind!r}; the kinds are {', '.join(KINDS)}")
        ids: list[int] = []
        weights: list[float] = []
        documents: list[tuple[int, int, str]] = []

        def add(document: tuple[list[int], list[float], str]) -> None:
            documents.append((len(ids), len(ids) + len(document[0]), document[2]))
            ids.extend(document[0])
            weights.extend(document[1])

        waiting = self.carry.setdefault(f"{kind}/{length}", [])
        misses = 0
        while length - len(ids) > 40 and misses < 3:
            left = length - len(ids)
            # A row begins with a document made for the whole row: what waits is short, and no long one would ever come.
            at = next((n for n, d in enumerate(waiting) if len(d[0]) <= left), None) if ids else None
            document = waiting.pop(at) if at is not None else self.document(kind, left, length)
            if len(document[0]) <= left:
                add(document)
            else:
                misses += 1
                if len(document[0]) <= length and len(waiting) < 8:
                    waiting.append(document)
        misses = 0
        while length - len(ids) > 40 and misses < 4 and kind != "tokens":
            self.rng.wild = self.wildness()
            small = self.encode(self.short(), "short")
            if len(small[0]) <= length - len(ids):
                add(small)
            else:
                misses += 1
        if length - len(ids) > 12 and kind != "tokens":
            add(self.text(length - len(ids), length - len(ids)))
        padding = length - len(ids)
        ids += [self.pad] * padding
        weights += [0.0] * padding
        return (
            np.array(ids, np.int32),
            np.array(weights, np.float32),
            {"documents": documents, "padding": padding, "kind": kind},
        )

    def wildness(self) -> float:
        return self.rng.choice(self.wild) if self.rng.trains else 0.0

    def short(self) -> Dialog:
        return arith.conversation(self.rng) if self.rng.chance(0.5) else self.chat.conversation(self.rng)

    def document(self, kind: str, left: int, length: int) -> tuple[list[int], list[float], str]:
        """One document of a kind as ids and weights; it may be longer than `left`."""
        rng = self.rng
        rng.wild = self.wildness()
        if kind == "mixed":
            kind = rng.choices(tuple(self.mix), tuple(self.mix.values()))[0]
        if kind == "tokens":
            ids, weights = token_pairs(rng, self.words, min(left, length) - 1, self.token_pairs)
            return [self.bos, *ids], [0.0, *weights], kind
        if kind == "text":
            return self.text(rng.randint(80, 400), left)
        if kind == "long" and left > 1000 and rng.chance(self.long_tools):
            return self.encode(self.tools.conversation(rng, rng.randint(200, left - 800)), "tools")
        return self.encode(self.dialog(kind, left, length), kind)

    def dialog(self, kind: str, left: int, length: int) -> Dialog:
        rng = self.rng
        if kind == "tools":
            return self.tools.conversation(rng, rng.randint(60, self.room) if self.room > 60 and rng.chance(0.4) else 0)
        if kind == "chat":
            return self.chat.conversation(rng)
        if kind == "arith":
            return arith.conversation(rng, rng.choice(SYSTEMS) if rng.chance(0.15) else "")
        if kind == "kv":
            return self.recall.dense(rng, self.kv_pairs)
        if kind == "copy":
            return self.recall.lists(rng) if rng.chance(0.6) else self.recall.fields(rng)
        low, high = self.distance
        room = left - FACT_TOKENS * self.pairs[1] - QUESTION_TOKENS * self.questions - 60
        if room < low:  # the rest of a row takes facts that are not so far
            low = 20
        high = max(low, min(high, room))
        return self.recall.distant(rng, rng.randint(low, high), self.pairs, self.questions)

    def text(self, tokens: int, most: int) -> tuple[list[int], list[float], str]:
        ids = [self.bos, *self.tokenizer.encode(self.filler.text(self.rng, tokens + 20), add_special_tokens=False).ids][
            : min(tokens, most)
        ]
        return ids, [0.0] + [self.text_weight] * (len(ids) - 1), "text"

    def encode(self, dialog: Dialog, kind: str) -> tuple[list[int], list[float], str]:
        """Ids of a dialogue and weights on what the model itself would generate, the end token included."""
        ids = self.tokenizer.encode(dialog.text(), add_special_tokens=False).ids
        weight = self.value_weight if kind in ("kv", "recall", "long") else 1.0
        return ids, self.weights_of(ids, dialog.thinking, weight), kind

    def weights_of(self, ids: list[int], thinking: bool, weight: float = 1.0) -> list[float]:
        """`weight` behind each `<｜Assistant｜><think>` (or `</think>` without thinking) up to and with the end token.

        A turn whose reasoning the template dropped is never generated in that form, so it has no loss.
        """
        weights = [0.0] * len(ids)
        opener = self.think if thinking else self.end_think
        inside = False
        for n in range(1, len(ids)):
            if inside:
                weights[n] = weight
                inside = ids[n] != self.eos
            elif ids[n] == opener and ids[n - 1] == self.assistant:
                inside = True
        return weights
