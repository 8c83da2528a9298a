"""Two files of results side by side."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.bench.compare import compare
from ds4.bench.main import main
from ds4.errors import Ds4Error


def row(context: int, prefill: float | None, decode: float, sessions: int = 1) -> dict[str, Any]:
    return {
        "ctx_tokens": context, "prefill_tokens": 64, "sessions": sessions, "prefill_tps": prefill, "gen_tps": decode
    }  # fmt: skip


def write(path: Path, *rows: dict[str, Any], **more: Any) -> Path:
    found = {
        "schema": "ds4-bench/1", "model": {"file": "a.gguf"}, "machine": {"gpu": "card"}, "settings": {"seed": 1},
        "copy_bandwidth": 4e12, "first_token": None, "rows": rows,
    } | more  # fmt: skip
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


def test_ratios_of_what_both_have(tmp_path: Path) -> None:
    first = {"tokens": 64, "tps": 100.0}
    old = write(tmp_path / "old", row(64, 100, 10), row(128, 100, 9), row(64, None, 50, 16), first_token=first)
    new = write(
        tmp_path / "new", row(64, 150, 11), row(256, 1, 1), row(64, None, 40, 16), first_token=first | {"tps": 90.0}
    )
    found = compare(old, new)
    assert [(r.ctx_tokens, r.sessions, r.ratio) for r in found.ratios] == [
        (64, 1, 1.5), (64, 1, 1.1), (64, 16, 0.8), (64, 1, 0.9)
    ]  # fmt: skip
    assert found.worst() == 0.8
    assert len(found.only) == 4
    assert found.differences == ()


def test_differences_are_told(tmp_path: Path) -> None:
    old = write(tmp_path / "old", row(64, 1, 1))
    new = write(tmp_path / "new", row(64, 1, 1), machine={"gpu": "other"}, copy_bandwidth=3e12)
    assert compare(old, new).differences == ("machine, gpu: card / other", "copy bandwidth: 4,000.0 / 3,000.0 GB/s")


def test_the_status_says_whether_it_became_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = write(tmp_path / "old", row(64, 100, 10)), write(tmp_path / "new", row(64, 100, 9.4))
    assert main(["--compare", str(old), str(new)]) == 0
    assert main(["--compare", str(old), str(new), "--threshold", "0.94"]) == 0
    assert main(["--compare", str(old), str(new), "--threshold", "0.95"]) == 3
    assert "the lowest ratio is 0.940, below 0.95" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is no JSON"),
        ("[]", "its schema is None, expected 'ds4-bench/1'"),
        ('{"schema": "ds4-bench/9"}', "its schema is 'ds4-bench/9'"),
        ('{"schema": "ds4-bench/1"}', "'rows' is missing"),
        ('{"schema": "ds4-bench/1", "rows": [3], "first_token": null}', "something is wrong in it"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad").write_text(text, encoding="utf-8")
    with pytest.raises(Ds4Error, match=message):
        compare(tmp_path / "bad", write(tmp_path / "good", row(64, 1, 1)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_a_file_holds(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("files")
    good = json.loads(write(folder / "good", row(64, 1, 1)).read_text(encoding="utf-8"))
    key = data.draw(st.sampled_from([*good, *good["rows"][0]]))
    (good if key in good else good["rows"][0])[key] = data.draw(json_values)
    (folder / "bad").write_text(json.dumps(good), encoding="utf-8")
    with contextlib.suppress(Ds4Error):
        assert compare(folder / "bad", folder / "good").table()


def test_nothing_in_common(tmp_path: Path) -> None:
    with pytest.raises(Ds4Error, match="have no row in common"):
        compare(write(tmp_path / "old", row(64, 1, 1)), write(tmp_path / "new", row(65, 1, 1)))
    with pytest.raises(Ds4Error, match="cannot be read: No such file"):
        compare(tmp_path / "none", tmp_path / "none")
