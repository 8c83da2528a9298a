import math
import os
import resource
import struct
import tracemalloc

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds4.errors import FileFormatError
from ds4.gguf.file import collect_problems, open_model
from ds4.gguf.header import MAX_ELEMENTS, map_file, read_header, row_bytes
from ds4.gguf.shape import TINY, Shape

SMALL = Shape(
    name="custom", layers=2, hidden=4, heads=2, head_dim=8, rope_dim=4, q_lora_rank=4, o_groups=1, o_lora_rank=4,
    window=8, ratios=(4, 8), index_heads=2, index_dim=4, index_top_k=2, experts=2, experts_used=1, expert_hidden=4,
    route_scale=1.5, hash_layers=1, vocab=270,
)  # fmt: skip


def small(draft):
    """A usable custom file of a few KB, so that most of its bytes are header."""
    made = draft(SMALL, gate_up=T.F16, down=T.BF16)
    made.set("ds4.profile", "str", "custom")
    made.set("ds4.sparse_ratio", "u32", 4)
    made.set("ds4.qat_sim", "bool", False)
    for name in ("token_embd.weight", "output.weight"):
        made.tensors[name].type = T.F16
    return made


def refused(path):
    with pytest.raises(FileFormatError) as caught:
        open_model(path)
    text = str(caught.value)
    assert text.startswith(str(path)), "every message names the file"
    return text


def test_every_kind_of_value(draft, tmp_path):
    made = small(draft)
    values = {
        "t.u8": ("u8", 200), "t.u32": ("u32", 2**32 - 1), "t.i32": ("i32", -5), "t.u64": ("u64", 2**64 - 1),
        "t.i64": ("i64", -(2**63)), "t.f32": ("f32", 0.5), "t.f64": ("f64", 0.1), "t.bool": ("bool", False),
        "t.str": ("str", "é\n｜"), "t.empty": ("str", ""),
        "t.strs": ("[str]", ["", "a", "｜"]), "t.none": ("[str]", []),
        "t.bools": ("[bool]", [True, False]), "t.i32s": ("[i32]", [1, -1]), "t.f32s": ("[f32]", [0.25, -1.0]),
    }  # fmt: skip
    made.keys.update(values)
    nested = struct.pack("<IIQ", 9, 9, 2) + struct.pack("<IQB", 0, 1, 7) + struct.pack("<IQ", 8, 0)
    made.set("t.nested", "raw", nested)
    metadata = open_model(made.write(tmp_path / "a.gguf")).metadata
    assert {key: metadata[key] for key in values} == {key: value for key, (_, value) in values.items()}
    assert metadata["t.nested"] == [[7], []]
    assert type(metadata["t.bool"]) is bool
    assert type(metadata["t.i32"]) is int


def test_tensor_places_and_bytes(draft, tmp_path):
    made = small(draft)
    rng = np.random.default_rng(1)
    for name, entry in made.tensors.items():
        entry.data = bytes(entry.nbytes) if "tid2eid" in name else rng.bytes(entry.nbytes)
    model = open_model(made.write(tmp_path / "a.gguf"))
    assert list(model.tensors) == list(made.tensors)
    for name, entry in made.tensors.items():
        info = model.tensors[name]
        assert (info.type, info.dims, info.shape) == (entry.type, entry.dims, entry.dims[::-1])
        assert (info.nbytes, info.n_values, info.offset % 32) == (entry.nbytes, math.prod(entry.dims), 0)
        assert model.raw(name).tobytes() == entry.data
        assert not model.raw(name).flags.writeable
    with pytest.raises(KeyError):
        model.raw("nothing")


def test_larger_alignment(draft, tmp_path):
    made = small(draft)
    made.alignment = 256
    made.set("general.alignment", "u32", 256)
    assert all(info.offset % 256 == 0 for info in open_model(made.write(tmp_path / "a.gguf")).tensors.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (b"GGUF", "ends inside the version"),
        (b"GGUF" + struct.pack("<IQQ", 2, 0, 0), "version is 2, expected 3"),
        (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), "version is 0, expected 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
        (b"FUGG" + struct.pack(">IQQ", 3, 0, 0), "big endian"),
        (b"GGUF" + struct.pack("<IQ", 3, 0), "ends inside the key count"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), f"claims {2**62} tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), f"claims {2**62} keys"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 9) + bytes(20),
            "claims 9 keys, more than 44 bytes hold; the file is truncated",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "'general.architecture' is missing"),
    ],
)
def test_start_of_the_file(tmp_path, content, message):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    assert message in refused(path)


def test_paths_that_are_no_files(tmp_path):
    assert "cannot be opened" in refused(tmp_path / "nothing.gguf")
    assert "cannot be opened" in refused(tmp_path) or "not a regular file" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path / "pipe")


ARRAY = struct.Struct("<IIQ")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (ARRAY.pack(9, 8, 2**40), f"'k' claims {2**40} array elements"),
        (ARRAY.pack(9, 6, 2**63), f"'k' claims {2**63} array elements"),
        (ARRAY.pack(9, 9, 2**40), f"'k' claims {2**40} array elements"),
        (struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5, "nests arrays"),
        (ARRAY.pack(9, 8, 1000000), "truncated"),
        (ARRAY.pack(9, 6, 1000000), "truncated"),
        (ARRAY.pack(9, 8, 1) + struct.pack("<Q", 2**64 - 1), "element 0 of key 'k'"),
        (struct.pack("<IQ", 8, 2**64 - 1), f"claims {2**64 - 1} bytes"),
        (struct.pack("<IQ", 8, 2**25), "truncated"),
        (struct.pack("<I", 13), "type number 13"),
        (struct.pack("<IIQ", 9, 77, 1), "type number 77"),
        (struct.pack("<IB", 7, 2), "truth value"),
    ],
)
def test_values_that_cannot_be_true(tmp_path, value, message):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + value)
    tracemalloc.start()
    assert message in refused(path)
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


def test_too_many_elements_are_not_read(tmp_path):
    path = tmp_path / "a.gguf"
    count = MAX_ELEMENTS + 1
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + ARRAY.pack(9, 8, count) + bytes(8 * count))
    tracemalloc.start()
    assert f"'k' claims {count} array elements" in refused(path)
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


def test_header_beyond_any_known_size(tmp_path):
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 9))
        for name in b"abcdefghi":
            file.write(struct.pack("<QB", 1, name) + ARRAY.pack(9, 0, 220_000))
            file.seek(220_000, 1)
        file.truncate(200 << 20)
    assert "'general.architecture' is missing" in refused(path)
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 2))
        for name in b"ab":
            file.write(struct.pack("<QBIQ", 1, name, 8, 40 << 20))
            file.seek(40 << 20, 1)
        file.truncate(200 << 20)
    assert "no header is that long" in refused(path)


def spoil_tensor(name, **change):
    def apply(made):
        for key, value in change.items():
            setattr(made.tensors[name], key, value)

    return apply


OUT = "output.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m.more_keys.append(("general.name", ("str", "x"))), "'general.name' occurs twice"),
        (lambda m: m.more_tensors.append((OUT, m.tensors[OUT])), f"'{OUT}' occurs twice"),
        (lambda m: m.set("general.alignment", "u32", 33), "'general.alignment' is 33"),
        (lambda m: m.set("general.alignment", "u32", 0), "'general.alignment' is 0"),
        (lambda m: m.set("general.alignment", "str", "32"), "'general.alignment' is '32'"),
        (lambda m: m.set("x" * 2000, "u32", 1), "claims 2000 bytes"),
        (lambda m: m.set("tokenizer.ggml.tokens", "[str]", [b"\xff"]), "'tokenizer.ggml.tokens' is not valid UTF-8"),
        (spoil_tensor(OUT, offset=16), "offset 16, expected a multiple of 32"),
        (spoil_tensor(OUT, offset=1 << 40), f"'{OUT}' ends at byte"),
        (spoil_tensor(OUT, offset=2**64 - 32), f"'{OUT}' ends at byte"),
        (spoil_tensor(OUT, offset=32), "overlap at byte"),
        (spoil_tensor(OUT, dims=(8, 0), offset=0), "dims (8, 0), expected none of them to be 0"),
        (spoil_tensor(OUT, dims=(8, 2**63, 2**63), offset=0), f"'{OUT}' ends at byte"),
        (spoil_tensor(OUT, dims=(), offset=0), "has 0 dims"),
        (spoil_tensor(OUT, dims=(1,) * 5, offset=0), "has 5 dims"),
        (spoil_tensor(OUT, type=5, offset=0), "type number 5"),
        (spoil_tensor(OUT, type=250, offset=0), "type number 250"),
        (spoil_tensor(OUT, type=T.Q8_0, offset=0), "4 values are not a multiple of 32, the block of Q8_0"),
    ],
)
def test_damaged_directory(draft, tmp_path, spoil, message):
    made = small(draft)
    spoil(made)
    assert message in refused(made.write(tmp_path / "a.gguf"))


def test_broken_text_outside_the_vocabulary_is_no_reason_to_refuse(draft, tmp_path):
    made = small(draft)
    made.set("general.description", "str", b"a\xffb")
    assert open_model(made.write(tmp_path / "a.gguf")).metadata["general.description"] == "a�b"


def test_layers_may_refer_to_the_same_experts(draft, tmp_path):
    made = small(draft)
    entries = list(made.tensors)
    place, end = {}, 0
    for name in entries:
        place[name] = end
        end += made.tensors[name].nbytes + -made.tensors[name].nbytes % 32
    for kind in ("gate", "up", "down"):
        made.tensors[f"blk.1.ffn_{kind}_exps.weight"].offset = place[f"blk.0.ffn_{kind}_exps.weight"]
    model = open_model(made.write(tmp_path / "a.gguf"))
    one, two = (model.tensors[f"blk.{i}.ffn_up_exps.weight"] for i in (0, 1))
    assert one.offset == two.offset


def test_cut_off_anywhere(draft, tmp_path):
    whole = small(draft).write(tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    header = len(small(draft).header())
    for length in [*range(0, header, 41), header - 1, header, header + 1, len(whole) - 33]:
        path.write_bytes(whole[:length])
        refused(path)


def test_the_last_byte_counts(draft, tmp_path):
    """Padding after the last tensor may be missing, its last byte may not."""
    path = small(draft).write(tmp_path / "a.gguf")
    end = max(info.offset + info.nbytes for info in open_model(path).tensors.values())
    whole = path.read_bytes()
    path.write_bytes(whole[:end])
    assert open_model(path).shape.name == "custom"
    path.write_bytes(whole[: end - 1])
    assert f"ends at byte {end}, but the file has {end - 1} bytes" in refused(path)


def mutate(data: bytes, edits) -> bytes:
    """Apply bit flips, overwritten numbers, cuts, removals and insertions at relative places."""
    out = bytearray(data)
    for kind, place, value in edits:
        at = min(int(place * len(out)), max(0, len(out) - 1))
        if kind == "flip" and out:
            out[at] ^= 1 << (value % 8)
        elif kind == "u32":
            out[at : at + 4] = struct.pack("<I", value % 2**32)
        elif kind == "u64":
            out[at : at + 8] = struct.pack("<Q", value % 2**64)
        elif kind == "cut":
            del out[at:]
        elif kind == "remove":
            del out[at : at + value % 64]
        elif kind == "insert":
            out[at:at] = struct.pack("<Q", value % 2**64)
    return bytes(out)


INTERESTING = [0, 1, 2, 7, 8, 9, 12, 13, 39, 255, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 1]
EDIT = st.tuples(
    st.sampled_from(["flip", "u32", "u64", "cut", "remove", "insert"]),
    st.floats(0.0, 1.0, exclude_max=True),
    st.one_of(st.sampled_from(INTERESTING), st.integers(0, 2**64 - 1)),
)


def lengths_and_counts(header: bytes) -> list[int]:
    """Places of the numbers that decide how much is read: random places would seldom hit one."""
    return [at for at in range(8, len(header) - 8) if 0 < struct.unpack_from("<Q", header, at)[0] < 5000]


def only_our_error(path):
    tracemalloc.start()
    try:
        problems = collect_problems(path)
        if problems:
            assert problems[0] in refused(path)
        else:
            open_model(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


@settings(max_examples=400)
@given(edits=st.lists(EDIT, min_size=1, max_size=4))
@example(edits=[("u64", 8 / 10000, 2**64 - 1)])
def test_fuzzed_files_raise_only_our_error(fuzz_target, edits):
    header, data, path = fuzz_target
    path.write_bytes(mutate(header, edits) + data)
    only_our_error(path)


@settings(max_examples=400)
@given(pick=st.integers(0, 10**6), value=st.one_of(st.sampled_from(INTERESTING), st.integers(0, 300)))
def test_fuzzed_lengths_and_counts_raise_only_our_error(fuzz_target, pick, value):
    header, data, path = fuzz_target
    places = lengths_and_counts(header)
    at = places[pick % len(places)]
    path.write_bytes(header[:at] + struct.pack("<Q", value) + header[at + 8 :] + data)
    only_our_error(path)


@settings(max_examples=100)
@given(noise=st.binary(max_size=400))
def test_noise_after_the_magic_raises_only_our_error(fuzz_target, noise):
    path = fuzz_target[2]
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + noise)
    only_our_error(path)


@pytest.fixture
def fuzz_target(draft, tmp_path):
    made = small(draft)
    header = made.header()
    whole = made.write(tmp_path / "a.gguf").read_bytes()
    assert collect_problems(tmp_path / "a.gguf") == []
    return header, whole[len(header) :], tmp_path / "fuzz.gguf"


def test_descriptors_are_not_leaked(draft, tmp_path):
    path = small(draft).write(tmp_path / "a.gguf")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        for _ in range(300):
            open_model(path)
            collect_problems(bad)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_row_bytes():
    assert [row_bytes(t, 256) for t in (T.F32, T.F16, T.BF16, T.Q8_0)] == [1024, 512, 512, 272]
    assert [row_bytes(t, 256) for t in (T.Q2_K, T.Q4_K, T.IQ2_XXS, T.MXFP4)] == [84, 144, 66, 136]
    with pytest.raises(ValueError, match="not a multiple of 256"):
        row_bytes(T.Q2_K, 128)


def test_read_header_of_a_mapped_file(draft, tmp_path):
    path = draft(TINY).write(tmp_path / "a.gguf")
    header = read_header(path, map_file(path))
    assert header.size == path.stat().st_size
    assert header.metadata["general.architecture"] == "deepseek4"
