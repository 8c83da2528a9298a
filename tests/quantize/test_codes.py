"""The quantisers on the CPU: error next to ggml's, exact layouts, any finite input, errors."""

import sys

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import Ds4Error
from ds4.quantize import codes
from ds4.quantize.codes import search
from tools import ggml_quantize, quantize_bench

Q8_0, Q2_K = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q2_K
Q4_K, IQ2_XXS = GGMLQuantizationType.Q4_K, GGMLQuantizationType.IQ2_XXS
KINDS = [Q8_0, Q2_K, Q4_K, IQ2_XXS]
SEARCHED = [Q2_K, Q4_K, IQ2_XXS]


@pytest.fixture(autouse=True, scope="module")
def _needs_numba() -> None:
    pytest.importorskip("numba")


def name(kind: GGMLQuantizationType) -> str:
    return kind.name


def gaussian(rows: int, cols: int, seed: int = 1) -> np.ndarray:
    return 0.02 * np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


def relative_error(values: np.ndarray, stored: np.ndarray, kind: GGMLQuantizationType) -> float:
    return quantize_bench.weighted_error(values, stored, kind, np.ones(values.shape[1], np.float32))


# --- error --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_the_error_is_no_larger_than_that_of_the_c_quantiser(kind: GGMLQuantizationType) -> None:
    pytest.importorskip("pywhispercpp")
    for label, values in quantize_bench.tensors(8):
        for shape, importance in quantize_bench.importances(values.shape[1]):
            weight = np.ones(values.shape[1], np.float32) if importance is None else importance
            mine = codes.encode(values, kind, importance)
            theirs = ggml_quantize.encode(values, kind, importance)
            assert mine.shape == theirs.shape
            bar = 1.01 * quantize_bench.weighted_error(values, theirs, kind, weight) + 1e-12
            assert quantize_bench.weighted_error(values, mine, kind, weight) <= bar, (label, shape)


@pytest.mark.parametrize(
    ("kind", "plain", "outliers"),
    [(Q8_0, 2.9e-5, 1e-4), (Q2_K, 0.07, 0.0505), (Q4_K, 0.00496, 0.0078), (IQ2_XXS, 0.111, 0.405)],
)
def test_the_error_of_gaussian_weights(kind: GGMLQuantizationType, plain: float, outliers: float) -> None:
    """Fails if a step of a search is lost, on machines without the C quantisers too."""
    values = gaussian(16, 1024)
    assert relative_error(values, codes.encode(values, kind), kind) < plain
    values[::4, ::97] *= 20
    assert relative_error(values, codes.encode(values, kind), kind) < outliers


@pytest.mark.parametrize("kind", SEARCHED, ids=name)
def test_important_columns_are_closer(kind: GGMLQuantizationType) -> None:
    values = gaussian(16, 512)
    importance = np.ones(512, np.float32)
    importance[5::16] = 300
    apart = codes.decode(codes.encode(values, kind, importance), kind) - values
    plain = codes.decode(codes.encode(values, kind), kind) - values
    assert (apart[:, 5::16] ** 2).sum() < 0.5 * (plain[:, 5::16] ** 2).sum()
    # Only proportions count, and no importance at all is the same as an equal one.
    scaled = codes.encode(values, kind, torch.from_numpy(importance) * 2.0**20)
    assert np.array_equal(scaled, codes.encode(values, kind, importance))
    assert np.array_equal(codes.encode(values, kind, np.zeros(512, np.float32)), codes.encode(values, kind))
    assert np.array_equal(codes.encode(values, kind, np.full(512, 7, np.float32)), codes.encode(values, kind))


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_values_that_the_type_can_hold_come_back(kind: GGMLQuantizationType) -> None:
    """Blocks with random codes, whose largest scale has the largest code as encoders choose it."""
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (24, 2, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    half = np.array([0.0123, 0.0345], "<f2").view(np.uint8)
    if kind == Q8_0:
        blocks[..., :2] = half[:2]
        blocks[..., 2] = 127
        blocks[..., 3:][blocks[..., 3:] == 128] = 0  # -128 is not used
    elif kind == IQ2_XXS:
        blocks[..., :2] = half[:2]
        blocks[..., 9] |= 0xF0
    else:
        at = 80 if kind == Q2_K else 0
        blocks[..., at : at + 4] = half
    values = codes.decode(blocks.reshape(24, -1), kind)
    bar = {Q8_0: 0.0, IQ2_XXS: 1e-5, Q2_K: 0.006, Q4_K: 0.0007}[kind]
    assert relative_error(values, codes.encode(values, kind), kind) <= bar


def test_iq2_xxs_takes_the_best_point_and_signs_for_its_scales() -> None:
    """Against all points and all signs that can be stored, with the weights that the package states."""
    rng = np.random.default_rng(6)
    values = gaussian(3, 256)
    importance = rng.gamma(0.5, 1, 256).astype(np.float32)
    stored = codes.encode(values, IQ2_XXS, importance)
    decoded = codes.decode(stored, IQ2_XXS).astype(np.float64)
    words = stored[:, 2:].reshape(3, 8, 8)
    steps = 2 * (words[..., 7] >> 4).astype(np.float64) + 1
    scale = np.repeat(stored[:, :2].copy().view("<f2").astype(np.float64) * steps / 8, 4, axis=1).reshape(-1, 1, 1)
    points = search.grid().T.astype(np.float64)
    x = values.astype(np.float64)
    w = (importance * np.sqrt((x * x).mean(1, keepdims=True) + x * x)).reshape(-1, 1, 8)
    taken = (w[:, 0] * (x - decoded).reshape(-1, 8) ** 2).sum(1)
    x = x.reshape(-1, 1, 8)
    sizes = np.abs(x)
    least = np.full(len(x), np.inf)
    odd = (x < 0).sum(2)[:, 0] % 2 == 1
    for flipped in range(-1, 8):
        shown = sizes.copy()
        if flipped >= 0:
            shown[..., flipped] *= -1
        error = (w * (shown - scale * points) ** 2).sum(2).min(1)
        least = np.where(odd == (flipped >= 0), np.minimum(least, error), least)
    assert np.allclose(taken, least, rtol=1e-3)


@pytest.mark.parametrize("kind", [Q2_K, Q4_K], ids=name)
def test_k_quants_round_to_the_nearest_value(kind: GGMLQuantizationType) -> None:
    values = gaussian(4, 256)
    n, top = (16, 3) if kind == Q2_K else (32, 15)
    decoded = codes.decode(codes.encode(values, kind), kind)
    for x, near in zip(values.reshape(-1, n), decoded.reshape(-1, n), strict=True):
        levels = np.unique(near)
        step = np.diff(levels).min()
        inside = (x > levels[0]) & (x < levels[-1])
        assert (np.abs(x - near)[inside] <= step / 2 * 1.001).all()
        assert len(levels) <= top + 1


# --- any input ----------------------------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
rows_of_anything = st.one_of(
    st.lists(finite, min_size=1, max_size=12),
    st.lists(st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 3e38, -3.4e38, 1.0, 6e-8, 1e-18]), min_size=1, max_size=12),
    finite.map(lambda value: [value]),
)


@given(rows_of_anything, st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-6, 1.0]), st.sampled_from(KINDS))
@settings(max_examples=100, deadline=None)
def test_any_finite_row_is_stored_no_worse_than_as_zeros(
    items: list[float], seed: int, noise: float, kind: GGMLQuantizationType
) -> None:
    rng = np.random.default_rng(seed)
    values = np.asarray(items, np.float32)[rng.integers(0, len(items), (1, 256))]
    values = (values.astype(np.float64) * (1 + noise * rng.standard_normal((1, 256)))).clip(-3.4e38, 3.4e38)
    values = values.astype(np.float32)
    importance = np.where(rng.random(256) < 0.2, 0, rng.gamma(0.5, 1e10, 256)).astype(np.float32)
    stored = codes.encode(values, kind, importance)
    decoded = codes.decode(stored, kind).astype(np.float64)
    assert np.isfinite(decoded).all()
    largest = float(np.abs(values).max()) or 1.0
    x, apart = values.astype(np.float64) / largest, (decoded - values) / largest
    weight = np.maximum(importance / max(importance.mean(), 1e-30), 1e-6) * np.sqrt((x * x).mean() + x * x)
    assert (weight * apart**2).sum() <= (weight * x * x).sum() * (1 + 1e-3)


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_special_rows(kind: GGMLQuantizationType) -> None:
    values = np.zeros((5, 256), np.float32)
    values[1] = 1e-41
    values[2] = np.float32(3.4e38)
    values[3] = -0.5
    values[4, 7] = 1
    decoded = codes.decode(codes.encode(values, kind), kind)
    assert not decoded[:2].any()
    assert (decoded[2] > 65504).all()
    assert np.allclose(decoded[3], -0.5, rtol=0.001)
    assert abs(decoded[4, 7] - 1) < 0.05 or kind == IQ2_XXS
    empty = codes.encode(np.zeros((0, 256), np.float32), kind)
    assert empty.shape == (0, 256 // GGML_QUANT_SIZES[kind][0] * GGML_QUANT_SIZES[kind][1])


def test_float16_scales_are_rounded_as_numpy_does() -> None:
    from ds4.quantize.codes.cpu.scale import half_bits, half_value

    every = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)  # all finite ones, >= 0
    between = np.concatenate([every, (every[1:] + every[:-1]) / 2, every[1:] * (1 - 1e-9), [1e-30, 65519.9]])
    assert [half_bits(value) for value in between[::7]] == between[::7].astype(np.float16).view(np.uint16).tolist()
    assert [half_bits(value) for value in (-1.0, 65504.0, 1e30)] == [0, 0x7BFF, 0x7BFF]
    assert [half_value(bits) for bits in range(0, 0x7C00, 11)] == every[::11].tolist()


# --- the same bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_bytes_depend_on_the_values_alone(kind: GGMLQuantizationType) -> None:
    values = torch.from_numpy(gaussian(9, 512)).bfloat16()
    importance = np.random.default_rng(2).gamma(1, 1, 512).astype(np.float32)
    stored = codes.encode(values, kind, importance)
    plain = values.float().numpy()
    locked = plain.copy()
    locked.flags.writeable = False
    wide = torch.zeros(512, 9).copy_(values.float().T).T  # not contiguous
    for same in (plain, locked, wide):
        assert np.array_equal(codes.encode(same, kind, importance), stored)
    rows = [codes.encode(values[i : i + 1], kind, importance) for i in range(len(values))]
    assert np.array_equal(np.concatenate(rows), stored)


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_threads_change_nothing(kind: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "_CHUNK_CPU", 1024)
    values = gaussian(13, 512)
    stored = codes.encode(values, kind)
    for threads in (2, 5):
        assert np.array_equal(codes.encode(values, kind, threads=threads), stored)


# --- errors -------------------------------------------------------------------------------------------------------


def test_supports() -> None:
    assert [kind for kind in GGMLQuantizationType if codes.supports(kind)] == sorted(KINDS)
    with pytest.raises(Ds4Error, match=r"No quantiser for Q5_K; there is one for Q8_0, Q2_K, Q4_K, IQ2_XXS"):
        codes.encode(np.zeros((1, 256), np.float32), GGMLQuantizationType.Q5_K)


@pytest.mark.parametrize("kind", KINDS, ids=name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_not_finite_is_refused(kind: GGMLQuantizationType, bad: float, threads: int) -> None:
    values = np.zeros((700, 512), np.float32)
    values[650, 300] = bad
    with pytest.raises(Ds4Error, match=rf"Value \[650, 300\] is {bad}; only finite"):
        codes.encode(values, kind, threads=threads)


@pytest.mark.parametrize(
    ("values", "importance", "text"),
    [
        (np.zeros(256, np.float32), None, r"Values have the shape \[256\]; expected \[rows, cols\]"),
        (np.zeros((1, 128), np.float32), None, r"Rows of 128 values cannot be stored as Q2_K, whose blocks hold 256"),
        (np.zeros((1, 256)), None, r"dtype float64; expected float32"),
        (torch.zeros(1, 256, dtype=torch.int8), None, r"dtype torch.int8; expected float32"),
        (
            np.zeros((1, 256), np.float32),
            np.ones(255, np.float32),
            r"Importance has the shape \[255\]; expected \[256\]",
        ),
        (np.zeros((1, 256), np.float32), np.full(256, -1, np.float32), r"Importance of column 0 is -1.0"),
        (np.zeros((1, 256), np.float32), np.full(256, np.nan, np.float32), r"Importance of column 0 is nan"),
    ],
)
def test_wrong_input(values: object, importance: np.ndarray | None, text: str) -> None:
    with pytest.raises(Ds4Error, match=text):
        codes.encode(values, Q2_K, importance)  # type: ignore[arg-type]


def test_threads_must_be_positive() -> None:
    with pytest.raises(Ds4Error, match="threads is 0"):
        codes.encode(np.zeros((1, 256), np.float32), Q2_K, threads=0)


@pytest.mark.parametrize(("device", "text"), [("gpu", "'gpu' is no device"), ("meta", "Cannot quantise on meta")])
def test_unknown_devices(device: str, text: str) -> None:
    with pytest.raises(Ds4Error, match=text):
        codes.encode(np.zeros((1, 256), np.float32), Q2_K, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_says_so() -> None:
    with pytest.raises(Ds4Error, match="finds no CUDA device; use cpu"):
        codes.encode(np.zeros((1, 256), np.float32), Q2_K, device="cuda")


def test_without_numba_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [key for key in sys.modules if key.startswith("ds4.quantize.codes.cpu")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "numba", None)
    codes._loops.cache_clear()
    with pytest.raises(Ds4Error, match=r"needs numba: pip install 'ds4\[quantize\]'"):
        codes.encode(np.zeros((1, 256), np.float32), Q2_K)
    codes.encode(np.zeros((1, 256), np.float32), Q8_0)  # needs none
    codes._loops.cache_clear()


def test_importance_from_weights() -> None:
    values = gaussian(300, 512)
    expected = (values.astype(np.float64) ** 2).mean(0)
    assert np.allclose(codes.importance_from_weights(torch.from_numpy(values)), expected, rtol=1e-5)
    values[3, 4] = np.nan
    with pytest.raises(Ds4Error, match=r"Value \[3, 4\] is nan"):
        codes.importance_from_weights(values)
