"""The whole command on the random model: table, files, and what is refused."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

from ds4.bench.main import app, main
from ds4.bench.results import SCHEMA
from ds4.bench.walk import Row

QUICK = ["--ctx-start", "16", "--ctx-max", "32", "-n", "2", "--repeat", "1", "--first-token", "8", "-t", "1"]


def test_table_and_files(embedded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("csv", "json", "svg", "profile")}
    flags = ["--csv", str(files["csv"]), "--json", str(files["json"]), "--plot", str(files["svg"])]
    flags += ["--profile", str(files["profile"]), "--dump-frontier-logits-dir", str(tmp_path), "--note", "a remark"]
    assert main([*QUICK, *flags]) == 0
    table = capsys.readouterr().out
    assert "copy" in table
    assert "a remark" in table
    assert "first token" in table

    found = json.loads(files["json"].read_text(encoding="utf-8"))
    assert (found["schema"], found["note"]) == (SCHEMA, "a remark")
    assert [row["ctx_tokens"] for row in found["rows"]] == [16, 32]
    assert found["model"]["file"] == embedded.name
    assert found["model"]["bytes"] == embedded.stat().st_size
    assert found["settings"]["seed"] == 1
    assert found["first_token"]["tokens"] == 8
    assert found["copy_bandwidth"] > 0
    assert found["traffic"]["experts"] > 0

    rows = list(csv.DictReader(files["csv"].open(encoding="utf-8")))
    # As the C engine's benchmark names them.
    assert list(rows[0])[:6] == [
        "ctx_tokens", "prefill_tokens", "prefill_tps", "gen_tokens", "gen_tps", "kvcache_bytes"
    ]  # fmt: skip
    assert [(row["ctx_tokens"], row["prefill_tokens"]) for row in rows] == [("16", "16"), ("32", "16")]
    assert rows[0]["device_peak_bytes"] == ""
    assert float(rows[0]["kernels"]) > 0

    assert files["svg"].read_text(encoding="utf-8").startswith("<?xml")
    profile = json.loads(files["profile"].read_text(encoding="utf-8"))
    assert [(each["kind"], each["ctx_tokens"]) for each in profile["profiles"]] == [
        ("prefill", 0), ("decode", 16), ("prefill", 16), ("decode", 32)
    ]  # fmt: skip
    assert profile["profiles"][1]["kernels"][0]["floor_share"] > 0
    assert np.load(tmp_path / "logits-32.npy").shape == (4096,)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]  # no unfinished file is left

    assert main(["--compare", str(files["json"]), str(files["json"]), "--threshold", "1"]) == 0


def test_the_layout_of_the_experts_and_float32(
    embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is asked for reaches the engine; what the engine took is told."""
    from ds4.engine import Engine, EngineConfig, loading

    asked: list[tuple[str, bool | None]] = []
    load = loading.load

    def recording(*args: Any, config: EngineConfig, **more: Any) -> Engine:
        asked.append((config.expert_layout, config.quality))
        return load(*args, config=config, **more)

    monkeypatch.setattr(loading, "load", recording)
    flags = ["--ctx-start", "16", "--ctx-max", "16", "-n", "0", "--repeat", "1", "--first-token", "0", "-t", "1"]
    files = [tmp_path / f"{name}.json" for name in ("cpu", "a")]
    assert main([*flags, "--json", str(files[0])]) == 0
    assert "layout" not in capsys.readouterr().out
    monkeypatch.setattr(Engine, "expert_layout", "a")
    assert main([*flags, "--json", str(files[1]), "--expert-layout", "auto", "--no-quality"]) == 0
    assert "experts in layout A" in capsys.readouterr().out
    assert asked == [("b", None), ("auto", False)]
    found = [json.loads(file.read_text(encoding="utf-8"))["settings"] for file in files]
    assert [settings["expert_layout"] for settings in found] == [None, "a"]
    assert [settings["quality"] for settings in found] == [True, True]  # the CPU has no other way
    assert main(["--compare", *map(str, files)]) == 0
    assert "settings, expert_layout: None / a" in capsys.readouterr().out


def test_a_filled_context(embedded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--fill-context", "2000", "-n", "2", "--repeat", "1", "--sessions", "2", "-t", "1"]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("2,000")]
    assert row[:4] == ["2,000", "0", "2", "2"]


def test_growth(embedded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--growth", "--growth-tokens", "30", "--growth-requests", "2", "--ctx-max", "40", "-t", "1"]
    assert main([*flags, "--json", str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out
    assert "30 tokens: host" in out
    assert "2 requests: host" in out
    growth = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["growth"]
    assert [(each["what"], each["count"]) for each in growth] == [("tokens", 30), ("requests", 2)]


def test_a_text_instead_of_random_tokens(embedded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("one two three four five six seven eight nine ten " * 20, encoding="utf-8")
    assert main([*QUICK, "--prompt-file", str(text)]) == 0
    assert main([*QUICK, "--chat-prompt-file", str(text), "-sys", "You count."]) == 0
    text.write_text("short", encoding="utf-8")
    assert main([*QUICK, "--prompt-file", str(text)]) == 1
    assert "tokens, but 32 are needed; give a longer one" in capsys.readouterr().err
    assert main([*QUICK, "--prompt-file", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "status", "text"),
    [
        ("--ctx-max 5000 --ctx-start 4", 1, "but the model has 4096; lower --ctx-max"),
        ("--ctx-start 9 --ctx-max 8", 1, "--ctx-start 9 is above --ctx-max 8"),
        ("--ctx-alloc 8", 1, "--ctx-alloc 8 is too small"),
        ("-m no-such-file.gguf", 1, "no-such-file.gguf"),
        ("--device tpu", 1, "device 'tpu' is not available"),
        ("--plot a.gif", 1, "must end in"),
        ("--repeat three", 2, "--repeat"),
        ("--expert-layout c", 2, "'c' is not one of 'auto', 'a', 'b'"),
        ("--no-such-flag", 2, "--no-such-flag"),
        ("--threshold 0.9", 2, "--threshold belongs to --compare"),
        ("--growth --csv a.csv", 2, "--growth measures memory alone"),
        ("--prompt-file a --chat-prompt-file b", 2, "give one"),
        ("-sys Hi", 2, "--system belongs to"),
    ],
)
def test_mistakes_are_told(
    embedded: Path, capsys: pytest.CaptureFixture[str], flags: str, status: int, text: str
) -> None:
    assert main(flags.split()) == status
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert text in error
    assert "Traceback" not in error


def test_help_names_every_flag_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys; from ds4.bench.main import main; main(['--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "--fill-context" in done.stdout


def test_the_page_and_the_flags_agree() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")
    page = re.sub(r"`(python3? )?tools/[^`]*`", "", page)  # other programs
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page))
    known = [param.opts + param.secondary_opts for param in get_command(app).params if param.name != "help"]
    assert len(known) > 25
    assert used <= {flag for flags in known for flag in flags}
    for flags in known:
        assert any(flag in page for flag in flags), flags
    for name in (entry.name for entry in fields(Row)):
        assert f"`{name}`" in page, name
