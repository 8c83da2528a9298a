"""Where a model file runs: the choice of the device, and the runner on a CUDA one, planned before it is loaded.

triton and `ds4.model.cuda` are imported here, in the functions, and only where a CUDA device is there.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from ds4.engine.engine import EngineConfig, Runner
from ds4.errors import Ds4Error

if TYPE_CHECKING:
    from ds4.gguf.file import ModelFile
    from ds4.model.cuda.plan import ExpertLayout, MemoryPlan
    from ds4.ops.kernels.planes import Iq2Layout

CAPABILITY = (9, 0)
"""The least compute capability that the kernels are made for."""

_NAME = re.compile(r"cuda(:[0-9]{1,4})?")


def check_name(device: str) -> None:
    """Raise `Ds4Error` for what is no name of a device."""
    if not isinstance(device, str) or (device not in ("auto", "cpu") and not _NAME.fullmatch(device)):
        raise Ds4Error(f"device {device!r} is not available: use auto, cpu, cuda or cuda:N with the number of a card")


def choose(
    device: str = "auto", file: ModelFile | None = None, qat_sim: bool = True, index_selection: str = "topk"
) -> torch.device:
    """The device that a name means for a model file.

    "auto" is the current CUDA device if there is one of compute capability 9.0 or higher, triton can be imported, and
    the kernels take the model and the options; else the CPU. Memory does not count: a model that is too large for the
    card is refused when it is loaded.

    Raises:
        Ds4Error: a CUDA device that was asked for cannot be used; the text says why.
    """
    check_name(device)
    if device == "cpu":
        return torch.device("cpu")
    problem = _missing(device)
    if problem is None:
        problem = _unsupported(file, qat_sim, index_selection)
    if problem is None:
        return _cuda(device)
    if device == "auto":
        return torch.device("cpu")
    raise Ds4Error(f"device {device!r} is not available: {problem}; use --device cpu (device='cpu')")


def _cuda(device: str) -> torch.device:
    """With its number: "auto" and "cuda" are the current one."""
    number = torch.device(device).index if device != "auto" else None
    return torch.device("cuda", torch.cuda.current_device() if number is None else number)


def _missing(device: str) -> str | None:
    """What this machine lacks for a CUDA device; None if nothing."""
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device here"
    count = torch.cuda.device_count()
    chosen = _cuda(device)
    if chosen.index >= count:
        return f"there {'is' if count == 1 else 'are'} only {count} here, numbered from 0"
    capability = torch.cuda.get_device_capability(chosen)
    if capability < CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(chosen)} has compute capability {capability[0]}.{capability[1]}, but the"
            f" kernels are made for {CAPABILITY[0]}.{CAPABILITY[1]} and higher"
        )
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"the package triton cannot be imported ({error})"
    return None


def _unsupported(file: ModelFile | None, qat_sim: bool, index_selection: str) -> str | None:
    """What the kernels do not take of a model and its options; None if they take all."""
    if not qat_sim:
        return "it holds rows as the quantisation round trips leave them, so qat_sim=False works on the CPU only"
    if index_selection != "topk":
        return f"index_selection={index_selection!r} works on the CPU only"
    if file is None:
        return None
    from ds4.model.cuda.support import check_model

    try:
        check_model(file.shape, lambda name: file.tensors[name].type)
    except Ds4Error as error:
        return str(error).removesuffix("; use --device cpu (device='cpu')")
    return None


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still get on a CUDA device."""
    gc.collect()  # an engine that nobody holds any more may be in a cycle
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def plan_for(file: ModelFile, config: EngineConfig, room: int) -> MemoryPlan:
    """The plan for `room` free bytes; what the configuration leaves open becomes what fits.

    Raises:
        Ds4Error: what it asks for does not fit; with advice.
    """
    from ds4.model.cuda.plan import fit

    return fit(
        file.shape,
        file.tensors,
        room,
        context=config.context,
        sessions=config.sessions,
        chunk=config.prefill_chunk,
        layout=config.expert_layout,
        checkpoint_bytes=config.checkpoint_bytes,
        quality=config.quality,
    )


def plan_table(
    path: str | os.PathLike[str],
    *,
    context: int | None = None,
    sessions: int = 1,
    chunk: int | None = None,
    cards: Sequence[float] | None = None,
    quality: bool | None = None,
    expert_layout: ExpertLayout = "b",
) -> str:
    """What a model file takes on a CUDA device as text, from its header alone.

    Args:
        context: tokens of each session; None: the model's.
        chunk: tokens of a prefill step; None: the default of CUDA devices.
        cards: sizes in GB for which it is said what fits; None: usual ones.
        quality, expert_layout: as in `EngineConfig`; with "auto" it is said for each card which layout it would get.

    Raises:
        FileFormatError: the file cannot be used. Ds4Error: there are no kernels for the model, or the options do not
            fit it.
    """
    from ds4.gguf.file import open_model
    from ds4.model.cuda.plan import CARDS, Options, is_small, memory_plan, steps_of

    file = open_model(path)
    if problem := _unsupported(file, file.qat_sim, "topk"):
        raise Ds4Error(f"{path}: this model runs on the CPU only: {problem}")
    if context is None:
        context = file.shape.context
    quality = is_small(file.tensors) if quality is None else quality
    steps = steps_of(chunk, quality)
    tokens, experts = steps[0]
    layout: Iq2Layout = "b" if expert_layout == "auto" else expert_layout
    options = Options(context, sessions, layout, tokens, experts, quality=quality)
    return memory_plan(path, options).table(CARDS if cards is None else cards, expert_layout == "auto", steps)


def load_runner(
    file: ModelFile,
    device: torch.device,
    config: EngineConfig,
    progress: Callable[[int, int], None] | None = None,
    room: int | None = None,
) -> tuple[Runner, EngineConfig]:
    """The runner of a file on a device, and the configuration with what the plan decided.

    Args:
        device: a CUDA one; or the CPU, where triton interprets the kernels.
        progress: called with (bytes read, bytes in all).
        room: bytes for all of it; None: what is free on the device.

    Raises:
        Ds4Error: the model does not fit, or there are no kernels for it.
    """
    from ds4.model.cuda.runner import CudaRunner, RunnerConfig
    from ds4.model.cuda.weights import FileBytes

    plan = plan_for(file, config, free_bytes(device) if room is None else room)
    o = plan.options
    settings = RunnerConfig(
        context=o.context,
        slots=o.sessions,
        chunk=o.chunk,
        experts_at_once=o.experts_at_once,
        layout=o.layout,
        limits=plan.page_limits(),
        quality=o.quality,
    )
    runner = CudaRunner.load(FileBytes(file), device, settings, progress)
    config = replace(config, context=o.context, prefill_chunk=o.chunk, sessions=o.sessions, quality=o.quality)
    if plan.has_layouts:
        config = replace(config, expert_layout=o.layout)
    return cast(Runner, runner), config
