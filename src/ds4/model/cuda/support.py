"""Which models the kernels for CUDA take, told from a header: it needs neither a device nor triton."""

from __future__ import annotations

from collections.abc import Callable

from gguf import GGMLQuantizationType

from ds4.errors import Ds4Error
from ds4.gguf.shape import EXPERT_TYPES, Shape


def check_shape(shape: Shape) -> None:
    """Raise `Ds4Error` for sizes that the kernels do not take."""
    limits = {
        "hidden": shape.hidden % 128 == 0,
        "q_lora_rank": shape.q_lora_rank % 128 == 0,
        "expert_hidden": shape.expert_hidden % 128 == 0,
        "head_dim": shape.head_dim in (128, 256, 512),
        "rope_dim": shape.rope_dim == 64,
        "o_lora_rank": (shape.o_groups * shape.o_lora_rank) % 128 == 0,
        "hc_streams": shape.hc_streams == 4,
        "hc_eps": shape.hc_eps >= 1e-12,  # Sinkhorn divides by products of four sums
        "index_dim": shape.index_dim == 128 or shape.sparse_ratio not in shape.ratios,
    }
    for name, fits in limits.items():
        if not fits:
            raise Ds4Error(
                f"the kernels for CUDA do not take {name} {getattr(shape, name)}; use --device cpu (device='cpu')"
            )


def check_model(shape: Shape, type_of: Callable[[str], GGMLQuantizationType]) -> None:
    """Raise `Ds4Error` for a shape or types of experts that the kernels do not take.

    Args:
        type_of: the type of the tensor of a name.
    """
    check_shape(shape)
    for layer in range(shape.layers):
        names = [f"blk.{layer}.ffn_{kind}_exps.weight" for kind in ("gate", "up", "down")]
        gate, up, down = (type_of(name) for name in names)
        for name, kind in zip(names, (gate, up, down), strict=True):
            if kind not in EXPERT_TYPES:
                known = ", ".join(t.name for t in EXPERT_TYPES)
                raise Ds4Error(
                    f"tensor {name} is {kind.name}; experts on a CUDA device are one of {known};"
                    " use --device cpu (device='cpu')"
                )
        if gate != up:
            raise Ds4Error(
                f"layer {layer}: gate experts are {gate.name}, up experts {up.name}, but the kernels for CUDA need one"
                " type; use --device cpu (device='cpu')"
            )
