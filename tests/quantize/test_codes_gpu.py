"""The quantisers as Triton kernels: on a GPU, or in Triton's interpreter, against the loops of the CPU."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from ds4.quantize import codes

if not torch.cuda.is_available():  # before triton is first imported
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")
pytest.importorskip("numba")

from ds4.quantize.codes import gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [GGMLQuantizationType.Q2_K, GGMLQuantizationType.Q4_K, GGMLQuantizationType.IQ2_XXS]


def block_errors(
    values: torch.Tensor, stored: np.ndarray, kind: GGMLQuantizationType, importance: np.ndarray
) -> np.ndarray:
    """What the search makes small, for each 256 values: with other weights, luck would be larger than a lost step."""
    x = values.double().numpy()
    apart = (codes.decode(stored, kind) - x).reshape(len(x), -1, 256)
    x = x.reshape(apart.shape)
    weight = importance.reshape(-1, 256) * np.sqrt((x * x).mean(2, keepdims=True) + x * x)
    return (weight * apart**2).sum(2).ravel()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kernels_find_what_the_loops_find(kind: GGMLQuantizationType) -> None:
    # On a GPU products are fused with sums: a search may end beside where it ends here, so many are compared.
    rows, apart = (3, 0.01) if DEVICE == "cpu" else (96, 0.06)
    rng = np.random.default_rng(4)
    values = torch.from_numpy(0.02 * rng.standard_normal((rows, 512), dtype=np.float32)).bfloat16()
    values[1, :256] = 0
    values[1, 256:] *= 1e30  # clipped
    importance = rng.gamma(1, 1, 512).astype(np.float32)
    importance /= importance.mean()
    on_device = torch.from_numpy(importance).to(DEVICE)
    found = gpu.encode(values.to(DEVICE), kind, on_device).cpu().numpy()
    expected = codes.encode(values, kind, importance)
    assert found.shape == expected.shape
    assert not codes.decode(found, kind)[1, :256].any()
    mine, theirs = (np.delete(block_errors(values, stored, kind, importance), 2) for stored in (found, expected))
    assert mine / theirs == pytest.approx(1, rel=apart)
    assert (mine / theirs).mean() == pytest.approx(1, rel=0.002)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, *KINDS], ids=lambda kind: kind.name)
def test_encode_on_a_gpu(kind: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(5)
    values = torch.from_numpy(0.02 * rng.standard_t(4, (64, 2048)).astype(np.float32))
    importance = rng.gamma(1, 1, 2048).astype(np.float32)
    found = codes.encode(values, kind, importance, device="cuda")
    assert np.array_equal(found, codes.encode(values.cuda(), kind, importance, device="cuda"))
    expected = codes.encode(values, kind, importance)
    mine, theirs = (block_errors(values, stored, kind, importance).sum() for stored in (found, expected))
    assert mine <= 1.002 * theirs


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_any_gpu_of_a_machine(kind: GGMLQuantizationType) -> None:
    """Not only the current one of the thread."""
    values = torch.from_numpy(np.random.default_rng(6).standard_normal((4, 512), dtype=np.float32))
    found = codes.encode(values, kind, device="cuda:1")
    assert np.array_equal(found, codes.encode(values, kind, device="cuda:0"))


def test_kernels_compile_for_a_gpu() -> None:
    """In a process of its own, where triton compiles and does not interpret; needs no GPU.

    The float16 scales that are stored have to be results of the search (in MLIR's text, %name#number), not those that
    it began with: a compiled loop can lose an assignment that the interpreter sees.
    """
    code = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ds4.quantize.codes import search
from ds4.quantize.codes.gpu import _K_QUANTS, iq2_xxs_kernel, k_quant_kernel
launches = [(iq2_xxs_kernel, dict(SCALES=15, ROUNDS=search.ROUNDS_IQ2))]
for n, top, limit in _K_QUANTS.values():
    launches.append((k_quant_kernel, dict(N=n, TOP=top, LIMIT=limit, TRIALS=15, ROUNDS=4)))
for function, constants in launches:
    signature = dict.fromkeys(function.arg_names, "*fp32") | dict.fromkeys(constants, "constexpr")
    signature |= dict(values="*bf16", out="*u8", halves="*i16", blocks="i32")
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=1)).asm
    print(len(asm["ptx"]) > 0, *re.findall("bitcast (.*) : f16 -> i16", asm["ttir"]))
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [(len(scales), compiled) for compiled, *scales in lines] == [(1, "True"), (2, "True"), (2, "True")]
    assert all("#" in scale for _, *scales in lines for scale in scales), lines
