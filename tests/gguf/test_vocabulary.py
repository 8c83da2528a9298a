"""The rules that a vocabulary must keep, beyond those that files show (tests/cli/test_inspect.py)."""

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from ds4.gguf.vocabulary import BYTE_ALPHABET, PROTOCOL_TOKENS, ordinary_tokens, vocabulary_problems

TOKENS = [*BYTE_ALPHABET, "ab", "abc", *PROTOCOL_TOKENS.values()]


def keys(**changes):
    values = {"model": "gpt2", "pre": "joyai-llm", "tokens": TOKENS, "merges": ["a b", "ab c"]} | changes
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def problem(**changes):
    problems = vocabulary_problems(keys(**changes))
    assert len(problems) == 1, problems
    return problems[0]


def test_the_alphabet_is_that_of_byte_level_bpe():
    assert sorted(BYTE_ALPHABET) == sorted(ByteLevel.alphabet())
    assert [BYTE_ALPHABET[byte] for byte in (0x00, 0x20, 0x41, 0xAD, 0xFF)] == ["Ā", "Ġ", "A", "Ń", "ÿ"]


def test_what_text_can_become():
    assert ordinary_tokens(TOKENS, ["a b", "ab c"], None) == {*BYTE_ALPHABET, "ab", "abc"}
    types = [1] * 257 + [4] + [3] * 7
    assert ordinary_tokens(TOKENS, ["a b", "ab c"], types) == {*BYTE_ALPHABET, "ab"}
    assert ordinary_tokens(TOKENS[1:], [], None) == set(BYTE_ALPHABET[1:])


def test_rows_of_the_embedding_count_if_they_are_known():
    assert vocabulary_problems(keys()) == []
    assert vocabulary_problems(keys(), 265) == []
    (text,) = vocabulary_problems(keys(), 266)
    assert "'tokenizer.ggml.tokens' has 265 entries, expected 266" in text
    assert "'tokenizer.ggml.scores' has 2 entries, expected 265" in problem(scores=[0.0, 1.0])


def test_text_must_not_become_a_special_token():
    marks = {"tokens": [*TOKENS, "<t", "hink>"], "merges": ["a b", "<t hink>"]}
    assert "merges' makes the special token '<think>', expected no merge that does" in problem(**marks)


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        (["ab"], "'ab' at place 0, expected two tokens and a space between"),
        (["a b", " a", "a ", "a b c", ""], "' a' at place 1 (and 3 more such)"),
        (["a b", "é b"], "'é b' at place 1, expected tokens of the file, which has no 'éb'"),
        (["a b", "中 b"], "'中 b' at place 1, expected tokens of the file, which has no '中'"),
        (["a 中"], "which has no '中'"),
    ],
)
def test_merges(merges, message):
    assert message in problem(merges=merges)


def test_what_is_wrong_everywhere_is_told_once():
    merges = [f"{'x' * 1000}{i} y" for i in range(5000)]
    problems = vocabulary_problems(keys(tokens=["a"] * 5000, merges=merges))
    assert len(problems) == 10  # seven special tokens, the one that is there 5000 times, the bytes, the merges
    assert sum(map(len, problems)) < 3000
    assert "'a' twice, as ids 0 and 1, expected each token once" in problems[7]
    assert "place 0 (and 4999 more such)" in problems[9]
