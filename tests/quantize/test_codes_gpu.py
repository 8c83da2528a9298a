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


def weighted_error(values: torch.Tensor, stored: np.ndarray, kind: GGMLQuantizationType, weight: np.ndarray) -> float:
    x = values.double().numpy()
    return float((weight * (codes.decode(stored, kind) - x) ** 2).sum() / (weight * x * x).sum())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kernels_find_what_the_loops_find(kind: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(4)
    values = torch.from_numpy(0.02 * rng.standard_normal((2, 512), dtype=np.float32)).bfloat16()
    values[1, :256] = 0
    values[1, 256:] *= 1e30  # clipped
    importance = rng.gamma(1, 1, 512).astype(np.float32)
    importance /= importance.mean()
    on_device = torch.from_numpy(importance).to(DEVICE)
    found = gpu.encode(values.to(DEVICE), kind, on_device).cpu().numpy()
    expected = codes.encode(values, kind, importance)
    assert found.shape == expected.shape
    assert not codes.decode(found, kind)[1, :256].any()
    for row, part in ((0, slice(0, 256)), (0, slice(256, 512)), (1, slice(256, 512))):
        block = slice(part.start // 256 * found.shape[1] // 2, part.stop // 256 * found.shape[1] // 2)
        mine, theirs = (
            weighted_error(values[row : row + 1, part], stored[row : row + 1, block], kind, importance[part])
            for stored in (found, expected)
        )
        assert mine == pytest.approx(theirs, rel=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, *KINDS], ids=lambda kind: kind.name)
def test_encode_on_a_gpu(kind: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(5)
    values = torch.from_numpy(0.02 * rng.standard_t(4, (64, 2048)).astype(np.float32))
    importance = rng.gamma(1, 1, 2048).astype(np.float32)
    found = codes.encode(values, kind, importance, device="cuda")
    assert np.array_equal(found, codes.encode(values.cuda(), kind, importance, device="cuda"))
    expected = codes.encode(values, kind, importance)
    assert weighted_error(values, found, kind, importance) == pytest.approx(
        weighted_error(values, expected, kind, importance), rel=0.002
    )


def test_kernels_compile_for_a_gpu() -> None:
    """In a process of its own, where triton compiles and does not interpret; needs no GPU."""
    code = """
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
    print(len(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=1)).asm["ptx"]))
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == 3
