"""Importance matrices on disk: what is saved is loaded, other programs' files too, and damaged ones are named."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ds4.errors import Ds4Error, FileFormatError
from ds4.quantize import imatrix
from ds4.quantize.imatrix import Imatrix, load

NAME = "blk.0.ffn_gate_exps.weight"


def entry(name: bytes, calls: int, values: list[float]) -> bytes:
    """One entry as the format says, written here without the module's help."""
    return struct.pack("<i", len(name)) + name + struct.pack(f"<ii{len(values)}f", calls, len(values), *values)


def foreign(*entries: bytes, tail: bytes = b"") -> bytes:
    return struct.pack("<i", len(entries)) + b"".join(entries) + tail


def tail(chunks: int = 7, dataset: bytes = b"text.txt") -> bytes:
    return struct.pack("<ii", chunks, len(dataset)) + dataset


squares = st.floats(0, 2.0**100, width=32)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 9))


@st.composite
def matrices(draw: st.DrawFn) -> Imatrix:
    names = draw(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4, unique=True))
    result = Imatrix(chunks=draw(st.integers(0, 2**31 - 1)), dataset=draw(st.text(max_size=20)))
    for name in names:
        shape = draw(shapes)
        result.vectors[name] = draw(arrays.arrays(np.float32, shape, elements=squares))
        if draw(st.booleans()):
            result.counts[name] = draw(arrays.arrays(np.int64, shape[0], elements=st.integers(0, 2**63 - 1)))
    return result


@given(matrices())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, saved: Imatrix) -> None:
    path = tmp_path_factory.mktemp("imatrix") / "a.dat"
    saved.save(path)
    found = load(path)
    assert list(found.vectors) == list(saved.vectors)
    for name, vector in saved.vectors.items():
        # Without counts the file does not say how the values are divided among experts.
        same = found.vectors[name] if name in saved.counts else found.vectors[name].reshape(vector.shape)
        assert same.dtype == np.float32
        assert np.array_equal(same, vector)
    assert list(found.counts) == [name for name in saved.vectors if name in saved.counts]
    assert all(np.array_equal(found.counts[name], own) for name, own in saved.counts.items())
    assert (found.chunks, found.dataset) == (saved.chunks, saved.dataset)
    first = path.read_bytes()
    found.save(path)
    assert path.read_bytes() == first


def test_a_file_of_another_program(tmp_path: Path) -> None:
    """Sums of several calls; experts packed; with and without what newer versions write at the end."""
    packed, plain = entry(NAME.encode(), 4, [4, 8, 12, 16, 20, 24]), entry(b"output.weight", 0, [1.5, 2])
    for end in (b"", tail()):
        path = tmp_path / "foreign.dat"
        path.write_bytes(foreign(packed, plain, tail=end))
        found = load(path, experts=3)
        assert found.vectors[NAME].tolist() == [[1, 2], [3, 4], [5, 6]]
        assert found.vectors["output.weight"].tolist() == [[1.5, 2]]
        assert found.counts == {}
        assert (found.chunks, found.dataset) == ((7, "text.txt") if end else (0, ""))
        assert load(path).vectors[NAME].tolist() == [[1, 2, 3, 4, 5, 6]]


def test_other_programs_read_what_is_saved(tmp_path: Path) -> None:
    """By the format's own rules, up to the dataset's name; they do not look behind it."""
    vectors = np.arange(6, dtype=np.float32).reshape(2, 3)
    Imatrix({NAME: vectors}, {NAME: np.array([5, 0])}, 3, "text.txt").save(tmp_path / "a.dat")
    data = (tmp_path / "a.dat").read_bytes()
    expected = foreign(entry(NAME.encode(), 1, vectors.flatten().tolist()), tail=tail(3))
    assert data.startswith(expected)
    assert data[len(expected) :] == b"DS4COUNT" + struct.pack("<IIQQ", 1, 2, 5, 0)


def test_experts_without_rows_are_not_measured() -> None:
    vectors = {name: np.ones((2, 3), np.float32) for name in ("all", "some", "unknown")}
    saved = Imatrix(vectors, {"all": np.array([5, 1]), "some": np.array([0, 1])})
    found = saved.measured()
    assert found["some"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert found["all"].all()
    assert found["unknown"].all()
    assert vectors["some"].all()


def test_rows_of_a_tensor() -> None:
    matrix = Imatrix({NAME: np.arange(6, dtype=np.float32).reshape(1, 6), "b": np.ones((3, 2), np.float32)})
    assert matrix.rows(NAME, 3, 2).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert matrix.rows("b", 3, 2).shape == (3, 2)
    with pytest.raises(FileFormatError, match=r"no entry 'c'.*another model"):
        matrix.rows("c", 3, 2)
    for size in ((2, 2), (2, 3)):
        with pytest.raises(FileFormatError, match=rf"'b'.*shape \[3, 2\], expected {size[0]} experts of {size[1]}"):
            matrix.rows("b", *size)


GOOD = foreign(entry(NAME.encode(), 1, [1, 2]), entry(b"b", 2, [3]), tail=tail())
COUNTED = GOOD + b"DS4COUNT" + struct.pack("<IIQQI", 2, 2, 1, 2, 0)


@pytest.mark.parametrize("whole", [GOOD, COUNTED], ids=["plain", "with counts"])
def test_every_cut_is_refused(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cut.dat"
    path.write_bytes(whole)
    load(path)
    ends = {len(GOOD) - len(tail()), len(GOOD)}  # where an older file may end
    for size in set(range(len(whole))) - ends:
        path.write_bytes(whole[:size])
        with pytest.raises(FileFormatError, match=r"cut\.dat: not a usable importance matrix: .*ends inside"):
            load(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (struct.pack("<i", 0), "0 entries"),
        (struct.pack("<i", -1), "-1 entries"),
        (b"GGUF" + bytes(20), "this is a GGUF file; the legacy format is needed"),
        (struct.pack("<i", 2**31 - 1), "2147483647 entries"),
        (struct.pack("<ii", 1, 2**31 - 1), "the name of entry 0 has 2147483647 bytes"),
        (struct.pack("<ii", 1, 0), "the name of entry 0 has 0 bytes"),
        (foreign(entry(b"\xff\xfe", 1, [1])), "entry 0 is no text"),
        (foreign(entry(b"a", 1, [1]), entry(b"a", 1, [1])), "entry 'a' twice"),
        (foreign(entry(b"a", -1, [1])), "1 values of -1 calls"),
        (foreign(struct.pack("<i1sii", 1, b"a", 1, 2**31 - 1)), "ends inside the values of 'a'"),
        (foreign(struct.pack("<i1sii", 1, b"a", 1, -5)), "-5 values"),
        (foreign(entry(b"a", 1, [float("nan")])), "'a' holds values.*NaN"),
        (foreign(entry(b"a", 1, [float("inf")])), "'a' holds values.*infinite"),
        (foreign(entry(b"a", 1, [-1])), "'a' holds values.*negative"),
        (foreign(entry(b"a", 1, [1]), tail=struct.pack("<ii", 1, -1)), "the dataset's name has -1 bytes"),
        (foreign(entry(b"a", 1, [1]), tail=struct.pack("<ii", 1, 2**30)), "ends inside the dataset's name"),
        (GOOD + b"GARBAGE!", "stands what is not known"),
        (GOOD + b"DS4COUNT" + struct.pack("<I", 1), "counts for 1 of 2 entries"),
        (GOOD + b"DS4COUNT" + struct.pack("<II", 2, 3), "2 values of 3 experts"),
        (GOOD + b"DS4COUNT" + struct.pack("<IIQQ", 2, 2, 2**63, 0), "impossible counts"),
        (COUNTED + b"x", "1 bytes stand behind its end"),
    ],
)
def test_hostile_files(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "bad.dat"
    path.write_bytes(data)
    with pytest.raises(FileFormatError, match=says):
        load(path)


@given(st.binary(max_size=200), st.integers(0, len(COUNTED) - 1))
def test_any_bytes_give_a_result_or_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int
) -> None:
    path = tmp_path_factory.mktemp("noise") / "n.dat"
    for data in (noise, COUNTED[:place] + noise[:4] + COUNTED[place + len(noise[:4]) :]):
        path.write_bytes(data)
        try:
            found = load(path)
        except FileFormatError:
            continue
        assert sum(v.size for v in found.vectors.values()) * 4 <= len(data)


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileFormatError, match=r"none\.dat: cannot be read: No such file"):
        load(tmp_path / "none.dat")
    with pytest.raises(FileFormatError, match="cannot be read: Is a directory"):
        load(tmp_path)
    with pytest.raises(FileFormatError, match="not a file"):
        load("/dev/zero")
    with pytest.raises(FileFormatError, match="not the name of a file"):
        load("a\0b")
    path = tmp_path / "a.dat"
    path.write_bytes(foreign(entry(NAME.encode(), 1, [1, 2, 3])))
    with pytest.raises(FileFormatError, match="3 values, which are not vectors of 2 experts"):
        load(path, experts=2)
    monkeypatch.setattr(imatrix, "MAX_FILE", 20)
    with pytest.raises(FileFormatError, match="too many for an importance matrix"):
        load(path)


@pytest.mark.parametrize(
    ("matrix", "says"),
    [
        (Imatrix({"a": np.array([[np.nan]], np.float32)}), "no means of squares"),
        (Imatrix({"a": np.array([[-1]], np.float32)}), "no means of squares"),
        (Imatrix({"a": np.ones(3, np.float32)}), r"shape \[3\]"),
        (Imatrix({"": np.ones((1, 1), np.float32)}), "1 to 4096 bytes"),
        (Imatrix({"a": np.ones((2, 1), np.float32)}, {"a": np.array([1])}), "one for each of 2"),
    ],
)
def test_what_is_not_saved(tmp_path: Path, matrix: Imatrix, says: str) -> None:
    path = tmp_path / "old.dat"
    path.write_bytes(b"old")
    with pytest.raises(FileFormatError, match=says):
        matrix.save(path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["old.dat"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old.dat"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(imatrix, "_write_counts", full)
    with pytest.raises(Ds4Error, match=r"old\.dat: cannot be written: No space left"):
        Imatrix({"a": np.ones((1, 1), np.float32)}).save(path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["old.dat"]
    with pytest.raises(Ds4Error, match="a directory"):
        Imatrix({"a": np.ones((1, 1), np.float32)}).save(tmp_path)
