"""The page about making files: its commands run, its flags exist, its sizes are those of the plans."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ds4.cli.main import main as ds4_main
from ds4.quantize.main import main
from ds4.quantize.options import build_parser
from ds4.quantize.recipe import EXPERTS, FAMILIES, TYPES

PAGE = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text(encoding="utf-8")


def test_the_commands_to_try_it_out(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder that the first one makes (which has MTP blocks here besides)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(tiny)
    block = next(b for b in re.findall(r"(?:^    .+\n|^\n)+", PAGE, re.MULTILINE) if "fake_checkpoint" in b)
    lines = [shlex.split(line.strip(), comments=True) for line in block.splitlines() if line.strip()]
    assert lines[0][:2] == ["python", "tools/fake_checkpoint.py"]
    assert len(lines) == 6
    for program, *args in lines[1:]:
        assert {"ds4-quantize": main, "ds4": ds4_main}[program](args) == 0, args


def test_every_flag_is_on_the_page_or_in_the_help() -> None:
    known = {flag for action in build_parser()._actions for flag in action.option_strings}
    for line in PAGE.splitlines():
        if "ds4-quantize" in line.split("#")[0] and line.startswith("    "):
            assert set(re.findall(r" (--[a-z][a-z-]*)", line)) <= known, line
    mentioned = set(re.findall(r"`(--[a-z][a-z-]*)", PAGE))
    assert mentioned <= known | {"--shape"}, mentioned - known
    assert {"--imatrix", "--override", "--last-layers", "--skip", "--no-drafts", "--memory-gib", "--jobs"} <= mentioned


def test_names_of_recipes_families_and_types() -> None:
    for name in (*EXPERTS, *FAMILIES):
        assert f"`{name}`" in PAGE
    for type in TYPES:
        assert type.name in PAGE
