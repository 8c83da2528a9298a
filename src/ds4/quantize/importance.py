"""The importance of columns as the conversion uses it: one vector per routed expert, or per matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds4.errors import Ds4Error
from ds4.quantize.encoder import WEIGHTED
from ds4.quantize.imatrix import packed
from ds4.quantize.plan import FilePlan, Unit

Vectors = npt.NDArray[np.float32]
Importance = Mapping[str, Vectors]
"""GGUF name -> float32 [parts, cols], a part being a routed expert or the whole matrix."""


def fit(plans: Iterable[FilePlan], vectors: Importance, place: Path) -> dict[str, Vectors]:
    """The vectors of the tensors that the plans have; `place` is the file that they are from.

    Args:
        vectors: GGUF name -> float32 [experts, cols], [cols], or all experts in one row.

    Raises:
        Ds4Error: there is none for any tensor of the model, or one has another size or values that cannot be.
    """
    fitting: dict[str, Vectors] = {}
    for output in (output for plan in plans for output in plan.outputs):
        found = vectors.get(output.name)
        if found is None:
            continue
        shape = (len(output.source.parts), output.dims[0])
        if found.size == shape[1] and shape[0] > 1:  # one vector for all experts
            found = np.broadcast_to(found.reshape(1, -1), shape)
        if found.size != shape[0] * shape[1] or (found.ndim == 2 and found.shape[0] > 1 and found.shape != shape):
            raise Ds4Error(
                f"{place}: the vectors of {output.name!r} are {list(found.shape)}, expected {list(shape)}; "
                "they were collected with another model"
            )
        if not bool(np.isfinite(found).all()) or bool((found < 0).any()):
            raise Ds4Error(
                f"{place}: the vectors of {output.name!r} hold negative or infinite values; collect them again"
            )
        fitting[output.name] = found.reshape(shape)
    if not fitting:
        raise Ds4Error(f"{place}: holds no vectors for a tensor of this model; they were collected with another model")
    return fitting


def describe(plans: Iterable[FilePlan], vectors: Importance, fitting: Importance) -> list[str]:
    """What a user should know of a file that `fit` took: how many tensors it serves, and what does not match."""
    types = {output.name: output.type for plan in plans for output in plan.outputs if not plan.draft}
    known = [name for name in fitting if name in types]
    used = [name for name in known if types[name] in WEIGHTED]
    lines = [f"importance for {len(used)} tensors"]
    if others := sorted({types[name].name for name in known if name not in used}):
        lines.append(f"it changes nothing in {len(known) - len(used)} tensors, which are {' or '.join(others)}")
    without = sorted(name for name in types if packed(name) and types[name] in WEIGHTED and name not in fitting)
    if without:
        lines.append(
            f"none for {len(without)} tensors of routed experts, such as {without[0]}; all columns count the same"
        )
    foreign = sorted(set(vectors) - set(types))
    if foreign:
        lines.append(
            f"{len(foreign)} entries are of no tensor of this model, such as {foreign[0]!r}; is it of another?"
        )
    return lines


def importance_of(unit: Unit, importance: Importance) -> Vectors | None:
    """float32 [cols] for a unit; None if there is none, or the expert was never used while it was collected."""
    found = importance.get(unit.output.name)
    if found is None or not bool((found[unit.part] > 0).any()):
        return None
    return np.ascontiguousarray(found[unit.part], dtype=np.float32)
