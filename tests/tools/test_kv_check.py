"""The checks of states on disk, over fewer cases than when they are run by hand."""

from __future__ import annotations

import kv_check
import pytest


def test_states_go_on_in_a_new_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert kv_check.main(["exact", "--lengths", "1", "127", "128", "129", "511"]) == 0
    assert capsys.readouterr().out.count("the same bits") == 5


def test_kills(capsys: pytest.CaptureFixture[str]) -> None:
    assert kv_check.main(["kills", "--count", "8"]) == 0
    assert "8 kills" in capsys.readouterr().out


def test_damage(capsys: pytest.CaptureFixture[str]) -> None:
    assert kv_check.main(["damage", "--count", "40"]) == 0
    assert ", 0 WRONG" in capsys.readouterr().out


def test_share(capfd: pytest.CaptureFixture[str]) -> None:
    assert kv_check.main(["share", "--processes", "3", "--seconds", "2"]) == 0
    said = capfd.readouterr().out
    assert said.count(" 0 damaged") == 3
    assert "; 0 wrong" in said
