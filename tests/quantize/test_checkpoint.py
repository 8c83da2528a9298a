"""Folders that are whole, and all the ways in which one is not."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from ds4.errors import Ds4Error
from ds4.quantize.checkpoint import INDEX, open_checkpoint, read
from ds4.quantize.decode import DTYPES
from tests.quantize.conftest import Make, copy_of, spoil_index


def test_every_tensor_of_every_shard(toy: Make) -> None:
    folder = toy()
    checkpoint = open_checkpoint(folder)
    stored = {name: tensor for shard in checkpoint.shards for name, tensor in load_file(shard).items()}
    assert len(checkpoint.shards) == 3
    assert set(checkpoint.tensors) == set(stored)
    for name, tensor in stored.items():
        found = checkpoint.tensors[name]
        assert (DTYPES[found.dtype], found.shape) == (tensor.dtype, tuple(tensor.shape))


def test_slices_are_the_stored_values(toy: Make) -> None:
    checkpoint = open_checkpoint(toy())
    stored = checkpoint.tensors["layers.1.ffn.experts.2.w1.weight"]
    whole = load_file(stored.file)[stored.name]
    assert torch.equal(read(stored), whole)
    assert torch.equal(read(stored, slice(3, 9)), whole[3:9])
    assert torch.equal(read(stored, slice(5, 6), slice(7, 20)), whole[5:6, 7:20])
    assert read(stored, slice(4, 4)).shape == (0, whole.shape[1])
    with pytest.raises(ValueError, match="lie in several places"):
        read(stored, slice(3, 9), slice(0, 1))
    scale = checkpoint.tensors["layers.1.attn.wq_b.scale"]
    expected = load_file(scale.file)[scale.name][1:2]
    assert torch.equal(read(scale, slice(1, 2)).view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_type_and_rank_is_read_as_it_is_stored(tmp_path: Path, dtype: str) -> None:
    bits = torch.randint(0, 256, (3 * 5 * 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    items = bits.view(DTYPES[dtype])
    tensors = {"a.x": items[:3], "b.x": items.view(3, -1, 1), "c.x": items[0].clone(), "d.x": items[:0]}
    save_file({name: value.clone() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    stored = open_checkpoint(tmp_path).tensors
    for name, value in tensors.items():
        found = read(stored[name])
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert found.flatten().view(torch.uint8).tolist() == value.flatten().view(torch.uint8).tolist()


def test_folders_without_an_index(toy: Make, tmp_path: Path) -> None:
    folder = copy_of(toy(), tmp_path / "c")
    before = open_checkpoint(folder).tensors
    (folder / INDEX).unlink()
    assert open_checkpoint(folder).tensors == before
    save_file({"embed.weight": torch.zeros(1)}, folder / "other.safetensors")
    with pytest.raises(Ds4Error, match=r"'embed.weight' is in .* and in other.safetensors"):
        open_checkpoint(folder)


def test_files_beside_the_index_are_not_read(toy: Make, tmp_path: Path) -> None:
    folder = copy_of(toy(), tmp_path / "c")
    (folder / "consolidated.safetensors").write_bytes(b"junk")
    assert len(open_checkpoint(folder).shards) == 3


def test_what_is_wrong_with_a_folder(toy: Make, tmp_path: Path) -> None:
    with pytest.raises(Ds4Error, match="not a folder"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(Ds4Error, match=r"config.json: cannot be read: No such file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Ds4Error, match=r"no \*.safetensors files"):
        open_checkpoint(tmp_path)
    for text, message in (("{", "not valid JSON"), ("[1]", "expected a JSON object"), ("\udcff", "not valid JSON")):
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(Ds4Error, match=message):
            open_checkpoint(tmp_path)


def test_a_missing_shard(toy: Make, tmp_path: Path) -> None:
    folder = copy_of(toy(), tmp_path / "c")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(Ds4Error, match=r"model-00002-of-00003.safetensors: missing, .* says it holds \d+ tensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, -1, -1000])
def test_a_shard_that_was_cut_off(toy: Make, tmp_path: Path, keep: int) -> None:
    folder = copy_of(toy(), tmp_path / "c")
    shard = folder / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(Ds4Error, match=r"model-00003-of-00003.safetensors: not a whole safetensors file"):
        open_checkpoint(folder)


def test_an_index_that_is_wrong(toy: Make, tmp_path: Path) -> None:
    folder = copy_of(toy(), tmp_path / "c")
    spoil_index(folder, {"layers.9.x": "model-00001-of-00003.safetensors"})
    with pytest.raises(Ds4Error, match=r"has no tensor 'layers.9.x', which .* says it holds"):
        open_checkpoint(folder)
    spoil_index(folder, {"layers.9.x": "../other/model.safetensors"})
    with pytest.raises(Ds4Error, match="expected one of this folder"):
        open_checkpoint(folder)
    (folder / INDEX).write_text('{"weight_map": ["a"]}')
    with pytest.raises(Ds4Error, match="no 'weight_map'"):
        open_checkpoint(folder)


def test_a_shard_larger_than_memory(builder: ModuleType, tmp_path: Path) -> None:
    """64 GiB in one file, while the process may take 256 MiB more; 4 MiB are read of the end and the middle."""
    rows, cols = 1 << 20, 1 << 16
    builder.write_sparse(tmp_path / "model.safetensors", {"head.weight": (torch.int8, (rows, cols))})
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x07")
    (tmp_path / "config.json").write_text("{}")
    used = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((int(used.split()[1]) << 10) + (256 << 20), before[1]))
    try:
        stored = open_checkpoint(tmp_path).tensors["head.weight"]
        found = read(stored, slice(rows - 64, rows))
        assert read(stored, slice(rows // 2, rows // 2 + 64)).count_nonzero() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert int(found[-1, -1]) == 7
    assert found.count_nonzero() == 1


def test_a_shard_that_fails_on_the_way(toy: Make, tmp_path: Path) -> None:
    """Where a mapping would end the process, there is an error that names the file."""
    folder = copy_of(toy(), tmp_path / "c")
    stored = open_checkpoint(folder).tensors["norm.weight"]
    os.truncate(stored.file, stored.offset + 1)
    with pytest.raises(Ds4Error, match=r"tensor 'norm.weight': cannot be read, the file has become shorter"):
        read(stored)
    stored.file.unlink()
    with pytest.raises(OSError, match="No such file") as caught:
        read(stored)
    assert caught.value.filename == str(stored.file)
