"""The bytes of the container: what was written is read, and anything else is refused with a reason."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.engine.packing import SectionKey
from ds4.errors import FileFormatError
from ds4.kvstore.container import (
    HEADER_BYTES,
    MAX_TOKENS,
    Flags,
    Header,
    Reason,
    StoredCall,
    ToolTurn,
    file_name,
    is_file_name,
    pack_tool_map,
    unpack_tool_map,
)
from ds4.kvstore.payload import PayloadHead, Section, count_sections, unpack_head

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
HEADERS = st.builds(
    Header,
    quant_bits=st.integers(0, 255),
    reason=st.sampled_from(Reason),
    flags=st.sampled_from([Flags.NONE, Flags.TOOL_MAP]),
    model=st.integers(0, 255),
    tokens=st.integers(1, MAX_TOKENS),
    hits=U32,
    context=U32,
    created=U64,
    used=U64,
    payload_bytes=U64,
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
TURNS = st.lists(
    st.builds(
        ToolTurn,
        block=TEXT,
        calls=st.lists(st.builds(StoredCall, id=TEXT, name=TEXT, arguments=TEXT), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=4,
)


def test_the_header_has_the_documented_offsets() -> None:
    data = Header(2, Reason.EVICT, Flags.TOOL_MAP, 1, 0x01020304, 5, 6, 7, 8, 9).pack()
    assert data[:8] == b"KVC\x44\x02\x03\x01\x01"
    assert data[8:12] == b"\x04\x03\x02\x01"
    assert [int.from_bytes(data[at : at + 4], "little") for at in (12, 16)] == [5, 6]
    assert data[20] == 1
    assert [int.from_bytes(data[at : at + 8], "little") for at in (24, 32, 40)] == [7, 8, 9]
    assert len(data) == HEADER_BYTES == 48


@given(HEADERS)
def test_headers_come_back(header: Header) -> None:
    assert Header.unpack(header.pack()) == header
    assert Header.unpack(header.hit(2**63).pack()) == header.hit(2**63)


@given(HEADERS, st.integers(0, 47), st.integers(1, 255))
def test_a_changed_byte_of_a_header_is_noticed(header: Header, at: int, change: int) -> None:
    data = bytearray(header.pack())
    data[at] ^= change
    with pytest.raises(FileFormatError):
        Header.unpack(bytes(data))


@given(st.binary(max_size=60))
def test_other_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(FileFormatError):
        Header.unpack(data)


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"tokens": 2**29}])
def test_a_header_that_says_nonsense_is_refused(wrong: dict[str, int]) -> None:
    header = replace(Header(2, Reason.COLD, Flags.NONE, 0, 1, 0, 1, 1, 1, 1), **wrong)  # type: ignore[arg-type]
    with pytest.raises(FileFormatError, match="tokens"):
        Header.unpack(header.pack())


@given(TURNS)
def test_tool_maps_come_back(turns: list[ToolTurn]) -> None:
    assert unpack_tool_map(pack_tool_map(turns)) == turns


@given(TURNS, st.data())
def test_a_damaged_tool_map_is_refused(turns: list[ToolTurn], data: st.DataObject) -> None:
    good = pack_tool_map(turns)
    at = data.draw(st.integers(0, len(good) - 1))
    changed = bytearray(good)
    changed[at] ^= data.draw(st.integers(1, 255))
    for bad in (good[:at], bytes(changed), good + b"x"):
        with pytest.raises(FileFormatError):
            unpack_tool_map(bad)


SECTIONS = st.lists(
    st.builds(
        Section,
        key=st.builds(SectionKey, st.integers(3, 255), st.integers(0, 65535), st.integers(0, 255)),
        size=U64,
        crc=U32,
    ),
    max_size=5,
    unique_by=lambda section: section.key,
)


@st.composite
def heads(draw: st.DrawFn) -> PayloadHead:
    """A payload's head that makes sense."""
    start = draw(st.integers(0, 1000))
    tokens = start + draw(st.integers(0, 1000))
    digest = st.binary(min_size=16, max_size=16)
    front = (Section(SectionKey(1), draw(U64), draw(U32)), Section(SectionKey(2), 4 * (tokens - start), draw(U32)))
    parent = (hashlib.md5(b"p").digest(), hashlib.sha1(b"p").digest()) if start else (bytes(16), bytes(20))
    return PayloadHead(draw(digest), *parent, start, tokens, draw(digest), (*front, *draw(SECTIONS)))


@given(heads())
def test_payload_heads_come_back(head: PayloadHead) -> None:
    data = head.pack()
    assert len(data) == head.size
    assert count_sections(data) == len(head.sections)
    assert unpack_head(data) == head
    assert unpack_head(data).id == head.id


@given(heads(), st.data())
def test_a_damaged_payload_head_is_refused(head: PayloadHead, data: st.DataObject) -> None:
    good = head.pack()
    at = data.draw(st.integers(0, len(good) - 1))
    changed = bytearray(good)
    changed[at] ^= data.draw(st.integers(1, 255))
    for bad in (good[:at], bytes(changed), good + b"x"):
        with pytest.raises(FileFormatError):
            unpack_head(bad)


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": 5},
        {"parent_key": bytes([1] * 20)},
        {"sections": (Section(SectionKey(2), 40, 0), Section(SectionKey(1), 0, 0))},
        {"sections": (Section(SectionKey(1), 0, 0), Section(SectionKey(2), 44, 0))},
        {"sections": (Section(SectionKey(1), 0, 0), Section(SectionKey(2), 40, 0), Section(SectionKey(2), 40, 0))},
    ],
)
def test_a_payload_head_that_contradicts_itself_is_refused(wrong: dict[str, object]) -> None:
    sections = (Section(SectionKey(1), 0, 0), Section(SectionKey(2), 40, 0))
    head = PayloadHead(bytes(16), bytes(16), bytes(20), 0, 10, bytes(16), sections)
    assert unpack_head(head.pack()) == head
    with pytest.raises(FileFormatError):
        unpack_head(replace(head, **wrong).pack())  # type: ignore[arg-type]


def test_names() -> None:
    assert file_name(b"abc") == "a9993e364706816aba3e25717850c26c9cd0d89d.kv"
    assert is_file_name(file_name(b""))
    assert not any(
        map(is_file_name, ["x.kv", "a" * 40, "A" * 40 + ".kv", "a" * 40 + ".kv\n", "../" + "a" * 37 + ".kv"])
    )
