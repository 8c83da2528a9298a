"""The checks of states on disk, over fewer cases than when they are run by hand."""

from __future__ import annotations

from types import ModuleType

import gpu_check
import kv_bench
import kv_check
import pytest
import torch


def test_states_go_on_in_a_new_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert kv_check.main(["exact", "--lengths", "1", "127", "128", "129", "511"]) == 0
    assert capsys.readouterr().out.count("the same bits") == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize(
    ("program", "command"), [(kv_check, "exact"), (kv_bench, "device"), (gpu_check, "tiny"), (gpu_check, "sessions")]
)
def test_a_device_that_is_not_there(program: ModuleType, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert program.main([command, "--device", "cuda"]) == 1
    said = "".join(capfd.readouterr())
    assert "device 'cuda' is not available" in said
    assert "Traceback" not in said


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
