"""The committed tokenizer of ds4-tiny: special tokens, bytes, digits, and the same ids as the engine's tokenizer."""

from __future__ import annotations

import random

import pytest
from data import Generator
from hypothesis import given
from hypothesis import strategies as st
from tiny_path import TINY
from tokenizer import FIRST, LAST, VOCAB, splitter
from tokenizers import Tokenizer

SPECIAL = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
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


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_special_tokens_are_one_id_each(tokenizer: Tokenizer) -> None:
    assert (*FIRST, *LAST) == SPECIAL
    assert [ids(tokenizer, s) for s in SPECIAL[:3]] == [[0], [1], [2]]
    assert all(len(ids(tokenizer, s)) == 1 for s in SPECIAL)
    assert tokenizer.get_vocab_size() == VOCAB == 4096


def test_every_byte_has_a_token_and_text_comes_back(tokenizer: Tokenizer) -> None:
    from tokenizers import pre_tokenizers

    vocab = tokenizer.get_vocab()
    assert all(symbol in vocab for symbol in pre_tokenizers.ByteLevel.alphabet())
    text = "naïve 漢字 😀 \x00\x7f\tأهلا ²½ \u0301"
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text


def test_no_token_joins_digits(tokenizer: Tokenizer) -> None:
    assert not [s for s in tokenizer.get_vocab() if len(s) > 1 and any(c.isdigit() for c in s)]


GROUPED = Tokenizer.from_file(str(TINY / "tokenizer.json"))
SINGLE = Tokenizer.from_file(str(TINY / "tokenizer.json"))
SINGLE.pre_tokenizer = splitter(r"\p{N}")


@given(st.text(alphabet=st.sampled_from("0123456789²½٣四五 abé\n\t_-/<>\"'ひ😀,.;"), max_size=40))
def test_groups_of_three_digits_give_the_same_ids(text: str) -> None:
    assert ids(GROUPED, text) == ids(SINGLE, text)


def test_dialogues_and_numbers_do_not_depend_on_the_digit_split() -> None:
    generator = Generator(11)
    texts = [
        str(generator.dialog(kind, 700, 768).text()) for kind in ("tools", "chat", "arith", "kv") for _ in range(60)
    ]
    rng = random.Random(1)
    texts += ["".join(rng.choice("0123456789ab ,.x-²") for _ in range(30)) for _ in range(2000)]
    assert all(ids(GROUPED, t) == ids(SINGLE, t) for t in texts)


def test_engine_tokenizer_gives_the_same_ids(tokenizer: Tokenizer) -> None:
    import json

    from ds4.tokenizer import Tokenizer as EngineTokenizer

    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(m) for m in model["merges"]]
    engine = EngineTokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "joyai-llm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in tokens],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
        }
    )
    generator = Generator(12)
    for kind in ("tools", "chat", "arith", "kv", "recall"):
        for _ in range(80):
            rendered = generator.dialog(kind, 700, 768).text()
            assert engine.encode_chat(rendered) == ids(tokenizer, rendered)
    rng = random.Random(2)
    for _ in range(1500):
        text = "".join(
            rng.choice("0123456789 aBc éß漢ひ\n\r\t.,;:-_()[]{}\"'<>/\\|@#😀") for _ in range(rng.randint(1, 40))
        )
        assert engine.encode(text) == ids(tokenizer, text)
