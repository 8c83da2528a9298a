"""Folders that are whole, and all the ways in which one is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ds4.errors import Ds4Error
from ds4.quantize import checkpoint as module
from ds4.quantize.checkpoint import INDEX, Reader, open_checkpoint
from ds4.quantize.decode import DTYPES
from tests.quantize.conftest import Make, copy_of


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
    with Reader() as reader:
        assert torch.equal(reader.read(stored), whole)
        assert torch.equal(reader.read(stored, slice(3, 9)), whole[3:9])
        scale = checkpoint.tensors["layers.1.attn.wq_b.scale"]
        expected = load_file(scale.file)[scale.name][1:2]
        assert torch.equal(reader.read(scale, slice(1, 2)).view(torch.uint8), expected.view(torch.uint8))


def test_mappings_end_with_the_reader(toy: Make) -> None:
    """Else the resident set would grow with every shard that was touched."""
    stored = open_checkpoint(toy()).tensors["embed.weight"]

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(stored.file))

    with Reader() as reader:
        part = reader.read(stored, slice(0, 2))
        assert mapped() > 0
    del part
    assert mapped() == 0


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


def spoil_index(folder: Path, change: dict[str, str | None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    places = {**index["weight_map"], **change}
    index["weight_map"] = {name: file for name, file in places.items() if file is not None}
    (folder / INDEX).write_text(json.dumps(index))


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


def test_a_shard_larger_than_memory(toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its header is read all the same; what PyTorch says when it cannot map it becomes an error with the name."""
    folder = copy_of(toy(), tmp_path / "c")
    original = module.safe_open

    def refusing(file: str, framework: str) -> object:
        if framework == "pt":
            raise RuntimeError(f"unable to mmap 53588282336 bytes from file <{file}>: Cannot allocate memory (12)")
        return original(file, framework=framework)

    monkeypatch.setattr(module, "safe_open", refusing)
    checkpoint = open_checkpoint(folder)
    stored = checkpoint.tensors["norm.weight"]
    with Reader() as reader, pytest.raises(OSError, match="no memory to map this shard") as caught:
        reader.read(stored)
    assert caught.value.filename == str(stored.file)
