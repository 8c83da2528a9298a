"""What cases of kernels share: random weights and activations, timing by graph replays, errors, registers."""

from __future__ import annotations

import gc
import math
import os
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor
from triton.runtime.jit import JITFunction

from ds4.gguf.shape import PROFILES, Shape
from ds4.ops.kernels.planes import Iq2Layout, Planes, allocate, repack, unpack
from ds4.ops.kernels.quantize import Quantised

# Where the float16 scales of a block are.
_SCALES = {"Q8_0": (0,), "Q2_K": (80, 82), "Q4_K": (0, 2), "IQ2_XXS": (0,)}
_REPLAYS = 12


@dataclass
class Case:
    """One thing to time.

    Attributes:
        name: what comes behind the name of its group.
        runs: the same launch on different data, so that nothing stays in the L2; `check` looks at the first's results.
        nbytes: bytes that one launch has to move.
        check: relative error of the outputs against float64, or several.
        bar: the largest error allowed.
        outputs: tensors of the first run, filled with NaN before it.
        flops: useful operations of one launch, where that is the question.
    """

    name: str
    runs: Sequence[Callable[[], object]]
    nbytes: int
    check: Callable[[], float]
    bar: float
    outputs: Sequence[Tensor] = ()
    flops: int = 0


@dataclass
class Result:
    name: str
    us: float = 0.0
    tbytes: float = 0.0
    tflops: float = 0.0
    error: float = 0.0
    bar: float = 0.0
    checked: bool = False
    ok: bool = True
    kernels: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


@triton.jit
def _read_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + at, mask=at < n, other=0), 0))


class Bench:
    """The device, the shapes and the data of a run."""

    def __init__(
        self,
        shape: str,
        rows: list[int],
        tokens: list[int],
        sweep: bool,
        compile_only: bool,
        check: bool,
        wanted_tiles: str = "",
    ) -> None:
        self.shape: Shape = next(s for s in PROFILES if s.name == shape)
        self.rows, self.tokens, self.sweep, self.check = rows, tokens, sweep, check and not compile_only
        self.compile_only, self.wanted_tiles = compile_only, re.compile(wanted_tiles)
        self.on_gpu = torch.cuda.is_available() and not compile_only
        self.device = "cuda" if self.on_gpu else "cpu"
        # The interpreter gets products of bf16 wrong.
        self.half = torch.bfloat16 if self.on_gpu or compile_only else torch.float16
        self._generator = torch.Generator(device=self.device).manual_seed(1)
        self._launched: list[Any] = []
        self._watch()

    def machine(self) -> str:
        """The card and the versions that matter."""
        card = torch.cuda.get_device_name() if self.on_gpu else "no GPU"
        return f"{card}; torch {torch.__version__}, triton {triton.__version__}"

    # -- data ----------------------------------------------------------------------------------------------------------

    def copies(self, nbytes: int) -> int:
        """How many sets of data of that size are several times the L2."""
        return max(1, min(64, math.ceil((320 << 20) / max(nbytes, 1)))) if self.on_gpu else 1

    def empty(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    def randn(self, *size: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Normal values of that size; without content if nothing runs."""
        made = self.empty(*size, dtype=dtype)
        return made if self.compile_only else made.normal_(std=scale, generator=self._generator)

    def rand(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self._generator, device=self.device)

    def planes(
        self, type: GGMLQuantizationType, n: int, k: int, experts: int | None = None, layout: Iq2Layout = "b"
    ) -> Any:
        """Planes of random weights of about 0.02 to 0.1; without content if nothing runs."""
        made = allocate(type, n, k, self.device, experts=experts, layout=layout)
        if self.compile_only:
            return made
        values, width = GGML_QUANT_SIZES[type]
        step = max(1, (1 << 28) // (k // values * width))
        for first in range(0, made.rows, step):
            rows = min(step, made.rows - first)
            repack(self._raw(type, rows * k // values, width), made, first)
        return made

    def _raw(self, type: GGMLQuantizationType, blocks: int, width: int) -> Tensor:
        if type.name == "F16":
            return (self.randn(blocks) * 0.02).half().view(torch.uint8)
        size = (blocks, width)
        raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=self._generator, device=self.device)
        for start in _SCALES.get(type.name, ()):
            raw[:, start : start + 2] = (2e-3 * (0.5 + self.rand(blocks, 1))).half().view(torch.uint8)
        if type.name == "MXFP4":
            raw[:, 0] = 118 + raw[:, 0] % 6
        return raw.flatten()

    def activations(self, rows: int, k: int, words: bool = True, lanes: bool = False, sums: bool = False) -> Quantised:
        """Random rows, quantised by torch, not by the kernel."""
        q = Quantised.allocate(rows, k, self.device, words=words, lanes=lanes, sums=sums)
        if self.compile_only:
            return q
        x = self.randn(rows, k)
        for group, scales in ((128, q.scales), (32, q.fine)):
            if scales is None:
                continue
            groups = x.view(rows, -1, group)
            scale = groups.abs().amax(-1) / 127
            codes = torch.round(groups / scale.unsqueeze(-1)).to(torch.int8)
            scales.view(rows, -1).copy_(scale)
            natural = codes.view(rows, k).view(torch.int32)
            if group == 128 and q.words is not None:
                q.words.copy_(natural)
            elif q.lanes is not None:
                q.lanes.copy_(natural.view(rows, -1, 8, 4).transpose(1, 2))
        if q.sums is not None:
            q.sums.copy_(codes.view(rows, -1, 4, 2, 16).sum(-1).to(torch.int16).view(torch.int32).squeeze(-1))
        return q

    def choices(self, rows: int, top: int, experts: int) -> Tensor:
        """int32 [rows, top], different experts in each row."""
        if self.compile_only:
            return self.empty(rows, top, dtype=torch.int32)
        return self.rand(rows, experts).argsort(1)[:, :top].to(torch.int32).contiguous()

    @staticmethod
    def weight(planes: Planes, expert: int | None = None) -> Tensor:
        """The matrix of planes, or of one of their experts, as float64."""
        first, rows = (0, planes.rows) if expert is None else (expert * planes.n, planes.n)
        return unpack(planes, first, rows).double()

    def free(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, case: Case) -> Result:
        """Check and time a case, or only compile what it launches."""
        result = Result(case.name, bar=case.bar)
        self._launched.clear()
        for tensor in case.outputs:
            if not self.compile_only:
                tensor.fill_(float("nan")) if tensor.dtype.is_floating_point else tensor.fill_(0x7F7F7F7F)
        case.runs[0]()
        result.kernels = self._describe()
        if self.check:
            result.error, result.checked = float(case.check()), True
            result.ok = result.error <= case.bar
        if self.on_gpu:
            seconds = self.time(case.runs)
            result.us = seconds * 1e6
            result.tbytes = case.nbytes / seconds / 1e12
            result.tflops = case.flops / seconds / 1e12
        return result

    def time(self, runs: Sequence[Callable[[], object]]) -> float:
        """Seconds of one launch: the median of replays of a graph of all of them."""
        for run in runs:
            run()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for run in runs:
            run()
        end.record()
        torch.cuda.synchronize()
        # Long enough that the start of a replay does not show, and a second at most for all of them.
        turns = max(1, math.ceil(3.0 / max(start.elapsed_time(end), 1e-3)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(turns):
                for run in runs:
                    run()
        graph.replay()
        times = []
        for _ in range(_REPLAYS):
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times) / (turns * len(runs))

    def ceilings(self) -> tuple[float, float, float]:
        """TB/s of reading and of copying 4 GiB, TFLOP/s of a bf16 matrix product of random values."""
        n, block = 1 << 30, 4096
        x = torch.randint(0, 100, (n,), dtype=torch.int32, device="cuda")
        y = torch.empty_like(x)
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        read = self.time([lambda: _read_kernel[(n // block,)](x, y, n, BLOCK=block, num_warps=4)])
        copy = self.time([lambda: y.copy_(x)])
        matmul = self.time([lambda: torch.matmul(a, b)])
        return 4 * n / read / 1e12, 8 * n / copy / 1e12, 2 * 8192**3 / matmul / 1e12

    # -- what was launched ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Note every kernel that is launched; without a GPU launch nothing."""
        launch = JITFunction.run
        launched, only_note = self._launched, self.compile_only

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if only_note:
                launched.append((function, args, options))
                return None
            kernel = launch(function, *args, grid=grid, warmup=warmup, **options)
            launched.append((function, kernel, None))
            return kernel

        JITFunction.run = run

    def _describe(self) -> str:
        """Registers and spilled registers of the kernels that were launched, each once."""
        texts: dict[str, None] = {}
        for function, kernel, options in self._launched:
            if self.compile_only:
                texts[compile_for_sm90(function, kernel, options)] = None
            elif kernel is not None:
                spills = f" spills {kernel.n_spills}" if kernel.n_spills else ""
                texts[f"{function.__name__} {kernel.n_regs} reg{spills}"] = None
        return ", ".join(texts)


_TYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")


def _type_name(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + _TYPE_NAMES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def compile_for_sm90(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Compile a launch for compute capability 9.0, specialised as the launcher would, and say what it takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    settings = {name: options[name] for name in _OPTIONS if name in options}
    bound = dict(zip(function.arg_names, args, strict=False))
    bound.update({name: value for name, value in options.items() if name not in settings})
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(function.params):
        value = bound.get(parameter.name)
        if parameter.name == "ASM":
            value = True
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type_name(value)
        address = value.data_ptr() if isinstance(value, Tensor) else value
        if isinstance(address, int) and address % 16 == 0:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=settings)
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(kernel.asm["cubin"])
    try:
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        usage = _output(str(tools / "cuobjdump"), "-res-usage", file.name)
        instructions = _instructions(_output(str(tools / "nvdisasm"), "-c", file.name))
    finally:
        os.unlink(file.name)
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    registers, stack = numbers.groups() if numbers else ("?", "0")
    spills = "" if stack == "0" else f" stack {stack} B"
    loads = [name for name in instructions if name.startswith(("LDG.", "LDGSTS."))]
    shared = f" shared {kernel.metadata.shared >> 10} KB" if kernel.metadata.shared >= 1024 else ""
    return (
        f"{function.__name__} {registers} reg{spills}{shared}, {len(instructions)} instructions, "
        f"{sum('128' in name for name in loads)} of {len(loads)} loads 16 B"
    )


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _instructions(disassembly: str) -> list[str]:
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", disassembly)
    return [name for name in names if name != "NOP"]


def error(out: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of the reference; not finite where an output is not."""
    a, b = out.double().flatten(), reference.double().flatten()
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


def tiles(bench: Bench, default: Any, others: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Names and tiles to time: the default, and in a sweep the others that are wanted."""
    yield "", default
    if bench.sweep:
        for tile in others:
            text = " ".join(f"{key}={value}" for key, value in vars(tile).items() if value is not None)
            if bench.wanted_tiles.search(text):
                yield f"[{text}]", tile
