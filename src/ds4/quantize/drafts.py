"""The draft blocks of a checkpoint, MTP or DSpark: their tensors and keys in a file of their own (MTP and DSpark)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from gguf import GGMLQuantizationType, GGUFValueType

from ds4.errors import Ds4Error
from ds4.gguf.keys import ARCHITECTURE, Value
from ds4.gguf.shape import Shape, TensorSpec, expected_tensors
from ds4.quantize.checkpoint import Checkpoint
from ds4.quantize.names import DRAFT_PREFIX

Kind = Literal["mtp", "dspark"]

_F32, _F16, _Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0

MARKOV_RANK = 256
_DEFAULTS = {"block_size": 5, "markov_rank": MARKOV_RANK, "noise_token_id": 128_799}


def draft_kind(names: Iterable[str]) -> Kind | None:
    """What the draft tensors among some GGUF names are; None if there are none."""
    drafts = [name for name in names if name.startswith(DRAFT_PREFIX)]
    if not drafts:
        return None
    return "dspark" if any(name.endswith(".main_proj.weight") for name in drafts) else "mtp"


def draft_path(out: Path, kind: Kind) -> Path:
    """Where the drafts of a model file go: `model.gguf` -> `model-mtp.gguf`."""
    return out.with_name(f"{out.name.removesuffix('.gguf')}-{kind}.gguf")


def draft_tensors(names: Iterable[str], shape: Shape, config: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Name -> dims and type of every tensor of the draft file, in file order.

    A stage is a block without compressor whose experts are chosen by router and bias. Router and hyper-connection
    matrices stay F32: drafts are small, and the published file has them so.
    """
    names = list(names)
    kind = draft_kind(names)
    stages = sorted({int(m[1]) for name in names if (m := re.match(r"mtp\.(\d+)\.", name))})
    if stages != list(range(len(stages))):
        raise Ds4Error(f"the checkpoint has draft stages {stages}, expected them numbered from 0")
    # The types of a strict profile are wanted whatever the model's own is; `custom` leaves them open.
    block = replace(shape, name="flash", layers=len(stages), ratios=(0,) * len(stages), hash_layers=0)
    specs: dict[str, TensorSpec] = {}
    for stage in stages:
        for name, spec in expected_tensors(block).items():
            if name.startswith(f"blk.{stage}."):
                matrix = name.endswith(("_fn.weight", "ffn_gate_inp.weight"))
                specs[DRAFT_PREFIX + name.removeprefix("blk.")] = TensorSpec(spec.dims, (_F32,)) if matrix else spec
        extra = _mtp(shape) if kind == "mtp" else _dspark(shape, stage, stages[-1], config)
        specs |= {f"{DRAFT_PREFIX}{stage}.{name}": spec for name, spec in extra.items()}
    return specs


def _head(shape: Shape) -> dict[str, TensorSpec]:
    return {
        "norm.weight": TensorSpec((shape.hidden,), (_F32,)),
        "hc_head_fn.weight": TensorSpec((shape.hidden * shape.hc_streams, shape.hc_streams), (_F32,)),
        "hc_head_scale.weight": TensorSpec((1,), (_F32,)),
        "hc_head_base.weight": TensorSpec((shape.hc_streams,), (_F32,)),
    }


def _mtp(shape: Shape) -> dict[str, TensorSpec]:
    square, vector = TensorSpec((shape.hidden, shape.hidden), (_Q8_0,)), TensorSpec((shape.hidden,), (_F32,))
    return {"e_proj.weight": square, "h_proj.weight": square, "enorm.weight": vector, "hnorm.weight": vector} | _head(
        shape
    )


def _dspark(shape: Shape, stage: int, last: int, config: Mapping[str, Any]) -> dict[str, TensorSpec]:
    specs: dict[str, TensorSpec] = {}
    taps, rank = len(_targets(shape, config)), _integer(config, "markov_rank")
    if stage == 0:
        specs["main_proj.weight"] = TensorSpec((taps * shape.hidden, shape.hidden), (_Q8_0,))
        specs["main_norm.weight"] = TensorSpec((shape.hidden,), (_F32,))
    if stage == last:
        table = TensorSpec((rank, shape.vocab), (_F16,))
        specs |= _head(shape)
        specs["markov_head.markov_w1.weight"] = specs["markov_head.markov_w2.weight"] = table
        specs["confidence_head.proj.weight"] = TensorSpec((shape.hidden + rank,), (_F32,))
    return specs


def draft_keys(kind: Kind, checkpoint: Checkpoint, shape: Shape, names: Iterable[str]) -> dict[str, Value]:
    """The keys that a draft file has beside, or instead of, those of the model; `names` are its tensors."""
    u32, config = GGUFValueType.UINT32, checkpoint.config
    stages = len({name.split(".")[1] for name in names})
    keys = {f"{ARCHITECTURE}.nextn_predict_layers": Value(stages, u32)}
    if kind == "mtp":
        return keys
    keys |= {f"{ARCHITECTURE}.dspark.{name}": Value(_integer(config, name), u32) for name in _DEFAULTS}
    keys[f"{ARCHITECTURE}.dspark.target_layer_ids"] = Value(_targets(shape, config), GGUFValueType.ARRAY, u32)
    return keys


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = config.get(f"dspark_{name}", _DEFAULTS[name])
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise Ds4Error(f"config.json: dspark_{name} is {value!r}, expected a whole number")
    return value


def _targets(shape: Shape, config: Mapping[str, Any]) -> list[int]:
    value = config.get("dspark_target_layer_ids", list(range(max(shape.layers - 3, 0), shape.layers)))
    if not isinstance(value, list) or not value or not all(isinstance(i, int) and 0 <= i < shape.layers for i in value):
        raise Ds4Error(f"config.json: dspark_target_layer_ids is {value!r}, expected numbers of layers")
    return value
