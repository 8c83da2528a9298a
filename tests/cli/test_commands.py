"""What all console commands have in common."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

import ds4

_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
COMMANDS: dict[str, str] = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["scripts"]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_prints_its_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, function = COMMANDS[name].split(":")
    main = getattr(importlib.import_module(module), function)
    try:
        status = main(["--version"])
    except SystemExit as end:
        status = end.code
    assert not status
    assert capsys.readouterr().out == f"{name} {ds4.__version__}\n"
