"""What makes a file unusable: every rule that a model file must keep, each with its own sentence.

The rules are those of the start-up rejections (GGUF container), and every one is reported with the key or tensor, what
was found and what was expected. A file is refused for the first; `ds4 --inspect` lists them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from ds4.errors import Ds4Error
from ds4.gguf.header import Header, TensorInfo, shown
from ds4.gguf.keys import (
    ARCHITECTURE,
    CLAMP_KEY,
    DAMAGED,
    NUMBER_KEYS,
    PROFILE_KEY,
    QAT_SIM_KEY,
    RATIOS_KEY,
    SHARED_CLAMP_KEY,
    SPARSE_RATIO_KEY,
    TOKENIZER_PREFIX,
    NumberKey,
    numbers_of,
    same,
    wrong_kind,
)
from ds4.gguf.shape import CUSTOM, EXPERT_TYPES, OUTPUT_TENSORS, PROFILES, Shape, TensorSpec, expected_tensors
from ds4.gguf.vocabulary import vocabulary_problems

_DRAFT_PREFIXES = ("mtp.", "dspark.")
_LAYER = re.compile(r"blk\.(\d{1,6})\.")
_REWRITE = "(profile custom); write the file again"


def check(header: Header, qat_sim: bool | None = None) -> tuple[Shape | None, list[str]]:
    """The shape of the file, and everything that makes it unusable (empty: usable).

    The shape is None where the numbers cannot be read at all. Contents of tensors are not looked at.

    Args:
        qat_sim: whether the model is to run with the quantisation round trips; None: as the file records.
    """
    refusal = _other_kind_of_file(header)
    if refusal:
        return None, [refusal]
    shape, problems = _choose_shape(header.metadata)
    if shape is None:
        return None, problems
    problems += _list_problems(header.metadata, shape)
    problems += _round_trip_problems(header.metadata, shape, qat_sim)
    problems += _tokenizer_problems(header.metadata, shape)
    problems += _tensor_problems(header.tensors, shape)
    return shape, problems


# --------------------------------------------------------------------------------------------------------------------
# Not a model file of this family


def _other_kind_of_file(header: Header) -> str | None:
    metadata, tensors = header.metadata, header.tensors
    if tensors and all(name.startswith(_DRAFT_PREFIXES) for name in tensors):
        dspark = any("main_proj" in name or name.startswith("dspark.") for name in tensors)
        kind = "DSpark" if dspark else "MTP"
        return (
            f"the file holds only the {kind} draft blocks (tensors {min(tensors)!r} ...), not a model; "
            "give the main model file here, drafts only go with one"
        )
    architecture = metadata.get("general.architecture")
    if architecture is None:
        return f"key 'general.architecture' is missing, expected {ARCHITECTURE!r}; give a DeepSeek V4 file"
    if architecture == "deepseek41":
        return (
            "key 'general.architecture' is 'deepseek41': this is DeepSeek V4.1, whose network differs from V4 (other "
            "attention, no hash layers, n-gram tables); this program runs V4 Flash and V4 Pro, give a 'deepseek4' file"
        )
    if architecture != ARCHITECTURE:
        return (
            f"key 'general.architecture' is {shown(architecture)}, expected {ARCHITECTURE!r}; "
            "this program runs DeepSeek V4 only, give a DeepSeek V4 file"
        )
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        return f"key 'split.count' is {parts}: the file is one of {parts} parts; join them into one file first"
    return None


# --------------------------------------------------------------------------------------------------------------------
# Numbers


def _choose_shape(metadata: Mapping[str, Any]) -> tuple[Shape | None, list[str]]:
    """The profile that agrees with most of the numbers, and every number that does not agree."""
    profile = metadata.get(PROFILE_KEY)
    if profile == CUSTOM:
        return _custom_shape(metadata)
    candidates = [shape for shape in PROFILES if profile in (None, shape.name)]
    if not candidates:
        names = ", ".join(repr(shape.name) for shape in PROFILES)
        return None, [f"key {PROFILE_KEY!r} is {shown(profile)}, expected {names} or {CUSTOM!r}; {DAMAGED}"]
    found = numbers_of(metadata)
    if not found:
        missing = next(entry.key for entry in NUMBER_KEYS)
        return None, [f"key {missing!r} is missing, as are all other sizes of the model; {DAMAGED}"]
    shape = max(candidates, key=lambda s: sum(same(value, getattr(s, field)) for field, value in found.items()))
    problems = [p for entry in NUMBER_KEYS for p in _number_problems(metadata, entry, shape)]
    return shape, problems


def _number_problems(metadata: Mapping[str, Any], entry: NumberKey, shape: Shape) -> Iterator[str]:
    expected = entry.of(shape)
    if entry.key not in metadata:
        if not entry.optional:
            yield f"key {entry.key!r} is missing, expected {expected!r} (profile {shape.name}); {DAMAGED}"
        return
    value = metadata[entry.key]
    kind = wrong_kind(entry, value)
    if kind:
        yield f"key {entry.key!r} is {shown(value)}, expected {kind}, {expected!r} (profile {shape.name}); {DAMAGED}"
    elif not same(value, expected):
        yield f"key {entry.key!r} is {shown(value)}, expected {expected!r} (profile {shape.name}); {DAMAGED}"


def _custom_shape(metadata: Mapping[str, Any]) -> tuple[Shape | None, list[str]]:
    """The shape that the keys of a custom file give."""
    problems: list[str] = []
    numbers: dict[str, Any] = {"name": CUSTOM}
    for entry in NUMBER_KEYS:
        value = metadata.get(entry.key)
        if value is None:
            if not entry.optional:
                problems.append(f"key {entry.key!r} is missing {_REWRITE}")
            continue
        kind = wrong_kind(entry, value)
        if kind:
            problems.append(f"key {entry.key!r} is {shown(value)}, expected {kind} {_REWRITE}")
        elif entry.field is not None and entry.field not in numbers:
            numbers[entry.field] = value
        else:
            expected = entry.fixed if entry.field is None else numbers[entry.field]
            if not same(value, expected):
                problems.append(f"key {entry.key!r} is {shown(value)}, expected {expected!r} {_REWRITE}")
    sparse_ratio = metadata.get(SPARSE_RATIO_KEY)
    if sparse_ratio is None:
        problems.append(f"key {SPARSE_RATIO_KEY!r} is missing {_REWRITE}")
    layers = numbers.get("layers")
    if not problems and layers is not None:
        ratios, clamps = metadata.get(RATIOS_KEY), metadata.get(CLAMP_KEY)
        problems += _length_problem(RATIOS_KEY, ratios, layers) + _length_problem(CLAMP_KEY, clamps, layers)
        if not problems and ratios is not None and clamps is not None:
            numbers.update(
                ratios=tuple(ratios[:layers]), swiglu_clamp=clamps[0] if clamps else None, sparse_ratio=sparse_ratio
            )
    if problems:
        return None, problems
    try:
        return Shape(**numbers), []
    except Ds4Error as error:
        return None, [f"{_with_keys(str(error))} {_REWRITE}"]


def _with_keys(text: str) -> str:
    """The sentence of `Shape` with the key beside the field it names."""
    keys = {entry.field: entry.key for entry in reversed(NUMBER_KEYS)}  # of two keys for one field, the first
    keys |= {"ratios": RATIOS_KEY, "swiglu_clamp": CLAMP_KEY, "sparse_ratio": SPARSE_RATIO_KEY}
    for field in fields(Shape):
        if text.startswith(f"shape: {field.name} ") and field.name in keys:
            return f"key {keys[field.name]!r}: {text.removeprefix('shape: ')}"
    return text


def _length_problem(key: str, values: Any, layers: int) -> list[str]:
    if values is None:
        return [f"key {key!r} is missing, expected a list with one entry for each of {layers} layers; {DAMAGED}"]
    if not isinstance(values, list):
        return [
            f"key {key!r} is {shown(values)}, expected a list with one entry for each of {layers} layers; {DAMAGED}"
        ]
    if len(values) < layers:
        return [f"key {key!r} has {len(values)} entries, expected at least {layers}, one for each layer; {DAMAGED}"]
    return []


def _list_problems(metadata: Mapping[str, Any], shape: Shape) -> list[str]:
    """Per-layer lists and the few keys beside the numbers. Entries beyond the layers belong to draft blocks."""
    problems: list[str] = []
    ratios = metadata.get(RATIOS_KEY)
    short = _length_problem(RATIOS_KEY, ratios, shape.layers)
    problems += short
    if not short and ratios is not None:
        for layer, (found, expected) in enumerate(zip(ratios, shape.ratios, strict=False)):
            if isinstance(found, bool) or not isinstance(found, int) or found != expected:
                problems.append(
                    f"key {RATIOS_KEY!r} has ratio {shown(found)} for layer {layer}, expected {expected} "
                    f"(profile {shape.name}); {DAMAGED}"
                )
                break
    clamps = metadata.get(CLAMP_KEY)
    short = _length_problem(CLAMP_KEY, clamps, shape.layers)
    problems += short
    if not short:
        problems += _clamp_problems(CLAMP_KEY, clamps, shape)
    problems += _clamp_problems(SHARED_CLAMP_KEY, metadata.get(SHARED_CLAMP_KEY), shape)
    if not isinstance(metadata.get(QAT_SIM_KEY, True), bool):
        problems.append(f"key {QAT_SIM_KEY!r} is {shown(metadata[QAT_SIM_KEY])}, expected true or false; {DAMAGED}")
    return problems


def _round_trip_problems(metadata: Mapping[str, Any], shape: Shape, qat_sim: bool | None) -> list[str]:
    """Sizes that the quantisation round trips do not have; whoever loads the file may do without these."""
    if not (metadata.get(QAT_SIM_KEY, True) if qat_sim is None else qat_sim):
        return []
    advice = "load it with qat_sim=False"
    if qat_sim is None:
        advice += f", or write it again with {QAT_SIM_KEY!r} false"
    return [f"{_with_keys(problem)}; {advice}" for problem in shape.round_trip_problems()]


def _clamp_problems(key: str, value: Any, shape: Shape) -> list[str]:
    """The first entry that is not the clamp of the shape; a single number counts for every layer."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    for layer, found in enumerate(values[: shape.layers]):
        if not same(found, shape.swiglu_clamp):
            return [
                f"key {key!r} has {shown(found)} for layer {layer}, expected {shape.swiglu_clamp!r}, "
                f"the same in every layer; {DAMAGED}"
            ]
    return []


# --------------------------------------------------------------------------------------------------------------------
# Tokenizer


def _tokenizer_problems(metadata: Mapping[str, Any], shape: Shape) -> list[str]:
    if shape.name == CUSTOM and not any(key.startswith(TOKENIZER_PREFIX) for key in metadata):
        return []  # a custom file without a tokenizer is a model that is driven by ids
    return vocabulary_problems(metadata, shape.vocab)


# --------------------------------------------------------------------------------------------------------------------
# Tensors


def _tensor_problems(tensors: Mapping[str, TensorInfo], shape: Shape) -> list[str]:
    specs = expected_tensors(shape)
    missing = [name for name in specs if name not in tensors]
    partial = _partial_model(tensors, missing, shape)
    if partial:
        problems = [partial]
    else:
        problems = _missing_output_head(missing)
        problems += [
            f"tensor {name!r} is missing, expected dims {specs[name].dims}; the file is incomplete, "
            "download or convert it again"
            for name in missing
            if not (problems and name in OUTPUT_TENSORS)
        ]
    for name, spec in specs.items():
        if name in tensors:
            problems += _tensor_problem(tensors[name], spec)
    for layer in range(shape.layers):
        gate = tensors.get(f"blk.{layer}.ffn_gate_exps.weight")
        up = tensors.get(f"blk.{layer}.ffn_up_exps.weight")
        if gate is not None and up is not None and gate.type != up.type:
            problems.append(
                f"tensor {gate.name!r} has type {gate.type.name} and {up.name!r} has type {up.type.name}, "
                "expected one type for both; quantise the layer again"
            )
    return problems


def _tensor_problem(info: TensorInfo, spec: TensorSpec) -> list[str]:
    if info.dims != spec.dims:
        return [f"tensor {info.name!r} has dims {info.dims}, expected {spec.dims}; {DAMAGED}"]
    if info.type not in spec.types:
        names = " or ".join(t.name for t in spec.types)
        what = "routed experts of this type cannot be run" if spec.types == EXPERT_TYPES else "it cannot be run"
        return [
            f"tensor {info.name!r} has type {info.type.name}, expected {names}; {what}, get or make a file with "
            "the expected type"
        ]
    return []


def _missing_output_head(missing: list[str]) -> list[str]:
    lost = [name for name in OUTPUT_TENSORS if name in missing]
    if not lost or len(lost) == len(OUTPUT_TENSORS):
        return []
    kept = [name for name in OUTPUT_TENSORS if name not in missing]
    return [
        f"the output head is partial: found {', '.join(kept)}; missing {', '.join(lost)}; the file is incomplete, "
        "download or convert it again"
    ]


def _partial_model(tensors: Mapping[str, TensorInfo], missing: list[str], shape: Shape) -> str | None:
    """The sentence for a file that holds a run of whole layers (the large Pro files come as two such halves)."""
    layers = sorted({int(m[1]) for name in tensors if (m := _LAYER.match(name)) and int(m[1]) < shape.layers})
    if not layers or len(layers) == shape.layers or layers != list(range(layers[0], layers[-1] + 1)):
        return None
    present = set(layers)
    if any((m := _LAYER.match(name)) and int(m[1]) in present for name in missing):
        return None
    first, last = layers[0], layers[-1]
    if first:
        other = f"layers 0 to {first - 1}" + (" and the embedding" if "token_embd.weight" in missing else "")
    else:
        other = f"layers {last + 1} to {shape.layers - 1} and the output head"
    return (
        f"the file holds only layers {first} to {last} of {shape.layers} (profile {shape.name}), expected all; it is "
        f"one half of a model in two files, the other half has {other}; two-file models are not supported yet, "
        "give a file with the whole model"
    )
