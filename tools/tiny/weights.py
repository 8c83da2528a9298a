"""Trained weights on disk: shards below 16 MiB, and the decoded tensors of a GGUF file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from light import light_package

SHARD = 15 * 2**20


def save(model: Any, directory: Path, info: dict[str, Any]) -> None:
    """Every parameter and buffer as bfloat16 (vectors float32, integers as they are) in shards, and `info`.

    A process that is stopped meanwhile leaves the older state or the newer one: files are renamed, info last.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shard: dict[str, torch.Tensor] = {}
    size, paths = 0, []

    def write() -> None:
        path = directory / f"weights-{len(paths)}.pt"
        torch.save(shard, path.with_suffix(".new"))
        paths.append(path)

    for key, value in model.state_dict().items():
        if "rotary" in key:
            continue
        value = value.detach().bfloat16() if value.is_floating_point() and value.dim() > 1 else value.detach()
        value = value.to(torch.uint8) if key.endswith("tid2eid") else value
        bytes_ = value.numel() * value.element_size()
        if shard and size + bytes_ > SHARD:
            write()
            shard, size = {}, 0
        shard[key] = value.cpu().contiguous().clone()
        size += bytes_
    write()
    new = directory / "info.new"
    new.write_text(json.dumps(info, indent=1))
    for path in paths:
        os.replace(path.with_suffix(".new"), path)
    os.replace(new, directory / "info.json")


def read_info(directory: Path) -> dict[str, Any] | None:
    """What `save` recorded, or None if there is nothing."""
    path = directory / "info.json"
    return json.loads(path.read_text()) if path.is_file() else None


def load(model: Any, source: Path) -> None:
    """Fills the module from a folder that `save` wrote, or from a GGUF file of the same shape."""
    if source.is_file():
        load_gguf(model, source)
        return
    state: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("weights-*.pt")):
        state.update(torch.load(path, map_location="cpu"))
    if not state:
        raise SystemExit(f"{source}: neither a GGUF file nor a folder that holds weights-0.pt")
    missing, unexpected = model.load_state_dict(
        {k: v.float() if v.is_floating_point() else v.long() for k, v in state.items()}, strict=False
    )
    if unexpected or [k for k in missing if "rotary" not in k]:
        raise SystemExit(
            f"{source}: the weights do not fit this shape: missing {missing[:3]}, unexpected {unexpected[:3]}"
        )


def load_gguf(model: Any, path: Path) -> None:
    """Fills the module from a GGUF file: experts as rounding left them, the rest as exact as its 8 or 16 bits.

    Training can go on from there, since it rounds the experts anyway.
    """
    light_package()
    from ds4.engine.loading import tensors_from_transformers
    from ds4.gguf.blocks import dequantize
    from ds4.gguf.file import open_model

    file = open_model(path)
    for name, place in tensors_from_transformers(model, file.shape).items():
        dims = file.tensors[name].dims[::-1] if name in file.tensors else None
        if dims != tuple(place.shape):
            raise SystemExit(f"{path}: {name} has shape {dims}, this model {tuple(place.shape)}")
        info, raw = file.tensors[name], file.raw(name)
        if info.type.name == "I32":
            value = torch.from_numpy(raw.view("<i4").copy())
        else:
            value = dequantize(raw, info.type, place.numel())
        value = value.view(place.shape)
        # What the table of names holds is the module's own memory, but for three tensors that it makes anew.
        if name.endswith("tid2eid.weight"):
            layer(model, name).mlp.gate.tid2eid.copy_(value)
        elif name.endswith(("ffn_gate_exps.weight", "ffn_up_exps.weight")):
            both = layer(model, name).mlp.experts.gate_up_proj.detach().chunk(2, dim=1)
            both["up_exps" in name].copy_(value)
        else:
            place.copy_(value)


def layer(model: Any, name: str) -> Any:
    """The layer that a tensor `blk.N.*` belongs to."""
    return model.model.layers[int(name.split(".")[1])]
