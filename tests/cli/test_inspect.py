import io
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers.pre_tokenizers import ByteLevel

import ds4
from ds4.cli.inspect import inspect
from ds4.gguf.file import embedded_model_path, inspect_file
from ds4.gguf.shape import Shape, expected_tensors
from ds4.gguf.vocabulary import PROTOCOL_TOKENS
from ds4.gguf.writer import save

SHAPE = Shape(
    name="custom", layers=4, hidden=32, heads=2, head_dim=16, rope_dim=4, q_lora_rank=8, o_groups=2, o_lora_rank=6,
    window=8, ratios=(0, 4, 8, 4), index_heads=2, index_dim=8, index_top_k=2, experts=4, experts_used=2,
    expert_hidden=64, route_scale=1.5, hash_layers=1, vocab=300, context=5000,
)  # fmt: skip
WITH_ROUND_TRIPS = replace(SHAPE, head_dim=68, index_dim=32)

SPECIAL = list(PROTOCOL_TOKENS.values())
BYTES = sorted(ByteLevel.alphabet())
WORDS = ["ab", "abc", *(f"t{i}" for i in range(35))]
TOKENS = [*SPECIAL, *BYTES, *WORDS]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "joyai-llm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (300 - len(SPECIAL)),
}


@pytest.fixture
def path(tmp_path):
    tensors = {}
    for name, spec in expected_tensors(SHAPE).items():
        dtype = torch.int32 if "tid2eid" in name else torch.float32
        if name.startswith(("blk.2.", "blk.3.")) and "_exps" in name:
            dtype = torch.bfloat16
        tensors[name] = torch.zeros(spec.dims[::-1], dtype=dtype)
    name = "a [bold]name[/] \x1b[31m"
    save(tmp_path / "a.gguf", SHAPE, tensors, tokenizer=TOKENIZER, metadata={"general.name": name}, qat_sim=False)
    return tmp_path / "a.gguf"


def printed(path):
    console = Console(width=160, record=True, file=io.StringIO())
    code = inspect(path, console)
    return code, console.export_text()


def test_usable_file(path):
    code, text = printed(path)
    assert code == 0
    assert "usable: every check passed" in text
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip() for line in text.splitlines() if line.count("│") == 3
    }
    assert rows["profile"] == "custom"
    assert rows["context"] == "5000 tokens"
    assert rows["compression"] == "ratio 0 (window only): 1 layers, ratio 4 (indexer): 2 layers, ratio 8: 1 layers"
    assert rows["experts"] == "4, 2 active, 1 shared"
    assert rows["quantisation round trips"] == "off"
    assert rows["tokenizer"] == "gpt2 / joyai-llm, 300 tokens, 2 merges"
    assert rows["tensors"] == str(len(expected_tensors(SHAPE)))


def test_types_and_experts(path):
    lines = [[c.strip() for c in line.split("│")[1:-1]] for line in printed(path)[1].splitlines() if "│" in line]
    values = 4 * 32 * 64
    assert ["routed experts", "F32", "6", f"{6 * values:,}", f"{6 * values * 4:,} bytes"] in lines
    assert ["routed experts", "BF16", "6", f"{6 * values:,}", f"{6 * values * 2:,} bytes"] in lines
    assert ["others", "I32", "1", "600", "2,400 bytes"] in lines
    assert ["0-1", "F32", "F32", "F32"] in lines
    assert ["2-3", "BF16", "BF16", "BF16"] in lines


def test_text_from_the_file_is_only_text(path):
    text = printed(path)[1]
    assert "a [bold]name[/] \\x1b[31m" in text
    assert "\x1b" not in text


def test_refused_file_lists_every_reason(path):
    data = path.read_bytes()
    for old, new in (
        (b"joyai-llm", b"other-pre"),
        (b"output_norm.weight", b"output_nrom.weight"),
        (b"t32", b"t\xc3\xa9"),
    ):
        assert data.count(old) == 1
        data = data.replace(old, new)
    path.write_bytes(data)
    code, text = printed(path)
    assert code == 1
    assert "refused for 2 reason(s):" in text
    assert "- key 'tokenizer.ggml.pre' is 'other-pre', expected 'joyai-llm'" in text
    assert "missing output_norm.weight" in text
    assert "usable" not in text


def test_many_reasons_are_cut(path):
    path.write_bytes(path.read_bytes().replace(b".attn_", b".attm_").replace(b".ffn_", b".ffm_"))
    code, text = printed(path)
    assert code == 1
    assert text.count("- tensor") == 20
    assert "more" in text.splitlines()[-1]


@pytest.mark.parametrize("content", [b"", b"[red]x", b"GGUF\x03\x00\x00\x00"])
def test_unreadable_file(tmp_path, content):
    bad = tmp_path / "b[x].gguf"
    bad.write_bytes(content)
    code, text = printed(bad)
    assert code == 1
    assert text.startswith(f"refused: {bad}: ")


def test_missing_file(tmp_path):
    code, text = printed(tmp_path / "none.gguf")
    assert code == 1
    assert "cannot be opened: No such file or directory" in text


def test_torch_is_not_loaded(path):
    code = "import sys; from ds4.cli.inspect import inspect; sys.exit(inspect(sys.argv[1]) or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usable" in done.stdout


# -- what `ds4.load` refuses -------------------------------------------------------------------------------------------


def swapped(values, old, *new):
    """The list with other entries in the place of one."""
    at = values.index(old)
    return [*values[:at], *new, *values[at + 1 :]]


def written(path, shape=SHAPE, qat_sim=False, **tokenizer):
    """A file as it is given, usable or not; keys of the tokenizer by their last name, None for one to leave out."""
    keys = TOKENIZER | {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    tensors = {
        name: torch.zeros(spec.dims[::-1], dtype=torch.int32 if "tid2eid" in name else torch.float32)
        for name, spec in expected_tensors(shape).items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ds4.gguf.writer.collect_problems", lambda path: [])
        keys = {key: value for key, value in keys.items() if value is not None}
        save(path, shape, tensors, tokenizer=keys, qat_sim=qat_sim)
    return path


def agreed(path, **options):
    """The reasons for which the file is refused, where inspection and loading have the same ones."""
    problems = inspect_file(path).problems
    code, text = printed(path)
    try:
        ds4.load(path, **options)
    except ds4.FileFormatError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is None:
        assert (code, problems) == (0, [])
        return []
    assert code == 1
    assert refusal.split(" (and")[0] == f"{path}: {problems[0]}".split(" (and")[0]
    assert f"- {problems[0]}\n" in text
    return problems


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        ({}, []),
        ({"token_type": None}, []),
        ({"model": None}, ["model' is missing, expected 'gpt2'"]),
        ({"pre": None}, ["pre' is missing, expected 'joyai-llm'"]),
        ({"pre": "llama-bpe"}, ["pre' is 'llama-bpe', expected 'joyai-llm'"]),
        ({"tokens": None}, ["tokens' is missing, expected a list of strings"]),
        ({"tokens": [1, 2]}, ["tokens' is [1, 2], expected a list of strings"]),
        ({"tokens": TOKENS[:-1]}, ["tokens' has 299 entries, expected 300"]),
        ({"tokens": swapped(TOKENS, "t7", "t8")}, ["'t8' twice, as ids 272 and 273, expected each token once"]),
        ({"tokens": swapped(TOKENS, "a", "A")}, ["'A' twice", "lacks the token of 1 of the 256", "has no 'a'"]),
        ({"tokens": swapped(TOKENS, "x", "xx")}, ["1 of the 256 bytes, first of byte 0x78, expected all"]),
        ({"tokens": swapped(TOKENS, "<think>", "xx")}, ["'<think>' 0 times, expected once"]),
        ({"tokens": swapped(TOKENS, "t7", "<think>")}, ["'<think>' 2 times, expected once"]),
        ({"tokens": swapped(TOKENS, "ab", "xx")}, ["'a b' at place 0 (and 1 more such), expected tokens of the file"]),
        ({"merges": None}, ["merges' is missing, expected a list of strings"]),
        ({"merges": ["a b", "abc"]}, ["'abc' at place 1, expected two tokens and a space between"]),
        ({"merges": ["a b", "ab  c"]}, ["'ab  c' at place 1, expected two tokens and a space between"]),
        ({"merges": ["a b", "ab z"]}, ["'ab z' at place 1, expected tokens of the file, which has no 'abz'"]),
        ({"token_type": [1] * 299}, ["token_type' has 299 entries, expected 300"]),
        ({"token_type": "none"}, ["token_type' is 'none', expected a list of whole numbers"]),
        (
            {"token_type": [3] * 10 + [1] * 290},
            ["token_type' takes as literal text the token of 3 of the 256"],
        ),
        ({"bos_token_id": 1}, ["bos_token_id' is 1, expected 0"]),
        ({"shape": WITH_ROUND_TRIPS, "qat_sim": True}, []),
        (
            {"qat_sim": True},
            [
                "key 'deepseek4.attention.key_length': head_dim is 16, which leaves 12 channels beside rope_dim 4, "
                "expected a multiple of 64",
                "key 'deepseek4.attention.indexer.key_length': index_dim is 8, expected a power of two of at least 32",
            ],
        ),
        ({"shape": replace(WITH_ROUND_TRIPS, index_dim=48), "qat_sim": True}, ["index_dim is 48, expected a power"]),
    ],
)
def test_a_file_is_refused_where_it_is_inspected_so(tmp_path, damage, messages):
    problems = agreed(written(tmp_path / "a.gguf", **damage))
    assert len(problems) == len(messages)
    for problem, message in zip(problems, messages, strict=True):
        assert message in problem


def test_round_trips_that_a_file_records_can_be_left_out(tmp_path):
    path = written(tmp_path / "a.gguf", qat_sim=True)
    assert agreed(path)[0].endswith("; load it with qat_sim=False, or write it again with 'ds4.qat_sim' false")
    assert ds4.load(path, qat_sim=False).shape == SHAPE
    path = written(tmp_path / "b.gguf", qat_sim=False)
    assert agreed(path) == []
    with pytest.raises(ds4.FileFormatError, match=r"b\.gguf: key .* head_dim is 16, .*; load it with qat_sim=False \("):
        ds4.load(path, qat_sim=True)


def test_the_model_of_the_package_without_its_kind_of_splitting(tmp_path):
    data = embedded_model_path().read_bytes()
    assert data.count(b"tokenizer.ggml.pre") == 1
    path = tmp_path / "a.gguf"
    path.write_bytes(data.replace(b"tokenizer.ggml.pre", b"tokenizer.ggml.prx"))
    assert ["tokenizer.ggml.pre" in problem for problem in agreed(path)] == [True]


WORD = st.sampled_from([*SPECIAL, *BYTES[:40], *WORDS[:4], "zz", "", " "])
MERGE = st.tuples(WORD, st.sampled_from([" ", " ", " ", "", "  "]), WORD).map("".join)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.dictionaries(st.integers(0, 299), WORD, max_size=2),
    merges=st.lists(MERGE, max_size=2),
    types=st.dictionaries(st.integers(0, 299), st.integers(-1, 7), max_size=2),
)
def test_any_vocabulary_is_refused_where_it_is_inspected_so(tmp_path_factory, tokens, merges, types):
    damaged, kinds = list(TOKENS), list(TOKENIZER["tokenizer.ggml.token_type"])
    for place, token in tokens.items():
        damaged[place] = token
    for place, kind in types.items():
        kinds[place] = kind
    path = tmp_path_factory.mktemp("any") / "a.gguf"
    agreed(written(path, tokens=damaged, merges=[*TOKENIZER["tokenizer.ggml.merges"], *merges], token_type=kinds))
