"""The contexts of a walk, what suits a model, and what is refused before anything is measured."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.bench.run import settings_for
from ds4.bench.settings import Outputs, Settings
from ds4.errors import Ds4Error
from ds4.gguf.shape import FLASH, TINY


def contexts(**values: int) -> list[int]:
    return [end for _, end in Settings(**values).contexts()]  # type: ignore[arg-type]


def test_contexts_multiply_or_add_and_end_at_the_last() -> None:
    assert contexts(start=512, end=4096, multiply=2) == [512, 1024, 2048, 4096]
    assert contexts(start=512, end=3000, multiply=2) == [512, 1024, 2048, 3000]
    assert contexts(start=100, end=350, increment=100) == [100, 200, 300, 350]
    assert contexts(start=64, end=64) == [64]
    assert Settings(start=8, end=20, increment=8).contexts() == [(0, 8), (8, 16), (16, 20)]


@given(start=st.integers(1, 5000), more=st.integers(0, 5000), multiply=st.integers(1, 5), increment=st.integers(1, 999))
def test_contexts_follow_each_other_without_a_gap(start: int, more: int, multiply: int, increment: int) -> None:
    found = Settings(start=start, end=start + more, multiply=multiply, increment=increment).contexts()
    assert found[0][0] == 0
    assert found[-1][1] == start + more
    assert all(begin < end for begin, end in found)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(found))


def test_filled_contexts_take_the_place_of_the_walk() -> None:
    settings = Settings(fill=(1000, 300, 1000), fill_prefill=100)
    assert settings.contexts() == [(200, 300), (900, 1000)]
    assert Settings(fill=(1000,), decode=10, first_token=0).longest == 1012


def test_defaults_follow_the_model_and_what_is_given() -> None:
    flash, tiny = settings_for(FLASH, {}), settings_for(TINY, {})
    assert (flash.start, flash.end, flash.multiply, flash.increment, flash.decode) == (2048, 32_768, 1, 2048, 128)
    assert [end for _, end in tiny.contexts()] == [64, 128, 256]
    short = settings_for(FLASH, {"end": 1000})
    assert (short.start, short.end, short.first_token) == (1000, 1000, 1000)
    assert [end for _, end in settings_for(TINY, {"increment": 96}).contexts()] == [64, 160, 256]
    assert [end for _, end in settings_for(TINY, {"start": 300}).contexts()] == [300]
    assert settings_for(FLASH, {"fill": (1_000_000,)}).first_token == 0


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"start": 9, "end": 8}, "--ctx-start 9 is above --ctx-max 8"),
        ({"start": 0}, "--ctx-start is 0, but must be at least 1"),
        ({"sessions": 1001}, "--sessions is 1001, but at most 1000 can decode together"),
        ({"decode": -1}, "--gen-tokens is -1"),
        ({"fill": (50,), "fill_prefill": 50}, "--fill-context 50 has to be more than the 50 tokens of --fill-prefill"),
        ({"fill_prefill": 50}, "--fill-prefill belongs to --fill-context"),
    ],
)
def test_what_cannot_be_measured(values: dict[str, int], text: str) -> None:
    with pytest.raises(Ds4Error, match=text):
        Settings(**values)  # type: ignore[arg-type]


def test_files_that_cannot_be_written_are_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Ds4Error, match=r"a\.json: cannot be written: .*nowhere: no such folder; make it first"):
        Outputs(json=tmp_path / "nowhere" / "a.json").check()
    with pytest.raises(Ds4Error, match="cannot be written: it is a directory; give the name of a file"):
        Outputs(csv=tmp_path).check()
    with pytest.raises(Ds4Error, match=r"must end in \.png, \.svg, \.pdf"):
        Outputs(plot=tmp_path / "a.gif").check()
    with pytest.raises(Ds4Error, match="name the same file; give each its own"):
        Outputs(json=tmp_path / "a.svg", plot=tmp_path / "b" / ".." / "a.svg").check()
    with pytest.raises(Ds4Error, match="this is no directory"):
        Outputs(logits=tmp_path / "none").check()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Ds4Error, match="install it with: pip install 'ds4\\[plot\\]'"):
        Outputs(plot=tmp_path / "a.png").check()
    Outputs(json=tmp_path / "a.json", logits=tmp_path).check()
