import io
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from ds4.cli.inspect import inspect
from ds4.gguf.shape import Shape, expected_tensors
from ds4.gguf.writer import save

SHAPE = Shape(
    name="custom", layers=4, hidden=32, heads=2, head_dim=16, rope_dim=4, q_lora_rank=8, o_groups=2, o_lora_rank=6,
    window=8, ratios=(0, 4, 8, 4), index_heads=2, index_dim=8, index_top_k=2, experts=4, experts_used=2,
    expert_hidden=64, route_scale=1.5, hash_layers=1, vocab=40, context=5000,
)  # fmt: skip


@pytest.fixture
def path(tmp_path):
    tensors = {}
    for name, spec in expected_tensors(SHAPE).items():
        dtype = torch.int32 if "tid2eid" in name else torch.float32
        if name.startswith(("blk.2.", "blk.3.")) and "_exps" in name:
            dtype = torch.bfloat16
        tensors[name] = torch.zeros(spec.dims[::-1], dtype=dtype)
    tokens = [
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<think>",
        "</think>",
        "｜DSML｜",
    ]
    tokenizer = {
        "tokenizer.ggml.tokens": tokens + [f"t{i}" for i in range(33)],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "joyai-llm",
    }
    name = "a [bold]name[/] \x1b[31m"
    save(tmp_path / "a.gguf", SHAPE, tensors, tokenizer=tokenizer, metadata={"general.name": name}, qat_sim=False)
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
    assert rows["tokenizer"] == "gpt2 / joyai-llm, 40 tokens, 1 merges"
    assert rows["tensors"] == str(len(expected_tensors(SHAPE)))


def test_types_and_experts(path):
    lines = [[c.strip() for c in line.split("│")[1:-1]] for line in printed(path)[1].splitlines() if "│" in line]
    values = 4 * 32 * 64
    assert ["routed experts", "F32", "6", f"{6 * values:,}", f"{6 * values * 4:,} bytes"] in lines
    assert ["routed experts", "BF16", "6", f"{6 * values:,}", f"{6 * values * 2:,} bytes"] in lines
    assert ["others", "I32", "1", "80", "320 bytes"] in lines
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
