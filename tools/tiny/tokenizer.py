"""Trains ds4-tiny's byte-level BPE and writes tokenizer.json beside this file.

    PYTHONPATH=src python tools/tiny/tokenizer.py

4,096 tokens: the real special tokens under their real strings, the 256 bytes, and merges. Every digit is split while
training, so that no merge joins digits and the general splitter (groups of up to three digits) gives the same ids.
The text is what the generator makes from fixed seeds (the training split) and the permissive English text.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from data import arith, corpus, words
from data.chat import Chat
from data.filler import Filler
from data.recall import Recall
from data.tools import Tools
from data.words import Source
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 4096
SPACED, BARE = 300, 60  # how often each word of the lists is added to the training text
FIRST = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
LAST = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)
CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
WORDS = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
    " ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
FILE = Path(__file__).parent / "tokenizer.json"


def splitter(digits: str) -> pre_tokenizers.PreTokenizer:
    """The joyai-llm splits; `digits` is the pattern of the first one."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(digits), "isolated"),
            pre_tokenizers.Split(Regex(CJK), "isolated"),
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def training_text(documents: int) -> list[str]:
    """Rendered dialogues without their special tokens, and English text; the same list every time."""
    text = corpus.load()
    filler, chat = Filler(text), Chat(text)
    tools, recall = Tools(chat, filler), Recall(chat, filler)
    rng = Source("tokenizer", "train")
    special = re.compile("|".join(map(re.escape, (*FIRST, *LAST))))
    out: list[str] = []
    for n in range(documents):
        kind = n % 8
        dialog = (
            tools.conversation(rng, 60)
            if kind < 4
            else chat.conversation(rng)
            if kind < 6
            else recall.dense(rng)
            if kind == 6
            else arith.conversation(rng)
        )
        out += [piece for piece in special.split(dialog.text()) if piece]
    out += [filler.text(rng, 200) for _ in range(documents // 2)]
    out += text.paragraphs
    # The words that dialogues copy should be one token each, as far as possible also without a space before them.
    lists = (
        words.NAMES,
        words.VALUES,
        words.THINGS,
        words.CITIES,
        words.PATH_PARTS,
        words.NOUNS,
        words.VERBS,
        words.ADJECTIVES,
        words.COLORS,
    )
    every = sorted({word for one in lists for word in one})
    out += [f" {word}" for word in every for _ in range(SPACED)]
    out += [word for word in every for _ in range(BARE)]
    return out


def train(documents: int = 12000) -> Tokenizer:
    """The finished tokenizer, with the inference splitter."""
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = splitter(r"\p{N}")
    size = VOCAB - len(FIRST) - len(LAST)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    base.train_from_iterator(training_text(documents), trainer)
    model = json.loads(base.to_str())["model"]
    ordered = sorted(model["vocab"], key=model["vocab"].get)
    strings = [*FIRST, *ordered, *LAST]
    if len(strings) != VOCAB:
        raise SystemExit(f"{len(strings)} tokens instead of {VOCAB}: too little text")
    out = Tokenizer(models.BPE(vocab={s: n for n, s in enumerate(strings)}, merges=[tuple(m) for m in model["merges"]]))
    out.pre_tokenizer = splitter(r"\p{N}{1,3}")
    out.decoder = decoders.ByteLevel()
    out.add_tokens([AddedToken(s, normalized=False, special=True) for s in (*FIRST, *LAST)])
    return out


if __name__ == "__main__":
    made = train()
    FILE.write_text(json.dumps(json.loads(made.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")
    print(f"{FILE}: {made.get_vocab_size()} tokens, {FILE.stat().st_size} bytes")
