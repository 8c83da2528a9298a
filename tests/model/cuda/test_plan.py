"""The memory plan: sums against the layouts it speaks of, full shapes from headers alone, and the advice."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace

import pytest
import torch
from gguf import GGMLQuantizationType as T

from ds4.errors import Ds4Error
from ds4.gguf.file import embedded_model_path, open_model
from ds4.gguf.header import TensorInfo, row_bytes
from ds4.gguf.shape import FLASH, PRO, TINY, Shape, expected_tensors
from ds4.model import KVCache
from ds4.model.cuda.plan import (
    CARDS,
    GIB,
    VOCABULARY_ROWS,
    MemoryPlan,
    Options,
    bucket,
    checkpoint_sizes,
    fit,
    is_small,
    key_bytes,
    memory_plan,
    plan_memory,
    weight_bytes,
)
from ds4.model.cuda.plan import row_bytes as kv_row_bytes
from ds4.model.cuda.plan_text import size
from ds4.model.cuda.transfer import LANE_BYTES, MOST_LANES, Lanes
from ds4.ops.kernels.planes import allocate

Q2 = {"gate": T.IQ2_XXS, "up": T.IQ2_XXS, "down": T.Q2_K}
Q4 = {"gate": T.Q4_K, "up": T.Q4_K, "down": T.Q4_K}
MXFP4 = {"gate": T.MXFP4, "up": T.MXFP4, "down": T.MXFP4}


def tensors_of(shape: Shape, experts: dict[str, T], sets: int | None = None) -> dict[str, TensorInfo]:
    """The tensors of a file of that shape, as a header has them. The experts of layer i are those of i % sets."""
    infos, offsets, end = {}, {}, 0
    for name, spec in expected_tensors(shape).items():
        kind, source = spec.types[0], name
        if "_exps." in name:
            _, layer, part = name.split(".", 2)
            kind = experts[part.split("_")[1]]
            source = f"{int(layer) % (sets or shape.layers)}.{part}"
        nbytes = row_bytes(kind, spec.dims[0]) * math.prod(spec.dims[1:])
        if source not in offsets:
            offsets[source], end = end, end + nbytes
        infos[name] = TensorInfo(name, kind, spec.dims, offsets[source], nbytes)
    return infos


def plan(shape: Shape = FLASH, experts: dict[str, T] = Q2, sets: int | None = None, **options: object) -> MemoryPlan:
    settings = Options(**{"context": 32768, **options})
    return plan_memory(shape, tensors_of(shape, experts, sets), settings)


def item(found: MemoryPlan, start: str) -> int:
    return sum(i.nbytes for i in found.items if i.name.startswith(start))


def test_weights_of_flash():
    """What the layouts were measured to take: 90 GB and 113 GB."""
    b, a = plan(), plan(layout="a")
    assert 89e9 < b.bytes_of("weights") < 92e9
    assert 112e9 < a.bytes_of("weights") < 115e9
    assert a.card_bytes - b.card_bytes == a.bytes_of("weights") - b.bytes_of("weights")
    matrices = 43 * 256 * 2048 * 4096
    assert item(b, "routed experts, IQ2_XXS") == 2 * matrices * 2.1875 / 8
    assert item(a, "routed experts, IQ2_XXS") == 2 * matrices * 3.1875 / 8
    assert item(b, "vocabulary matrix") == 129_280 * 4096 * 34 // 32
    assert item(b, "embedding") == 129_280 * 4096 * 2


@pytest.mark.parametrize("layout", ["a", "b"])
@pytest.mark.parametrize("kind", [T.IQ2_XXS, T.Q2_K, T.Q4_K, T.MXFP4, T.Q8_0, T.F16])
def test_a_matrix_is_what_its_planes_take(kind, layout):
    experts = 3 if kind not in (T.Q8_0, T.F16) else None
    dims = (512, 256) if experts is None else (512, 256, 3)
    info = TensorInfo("blk.0.x.weight", kind, dims, 0, 1)
    planes = allocate(kind, 256, 512, "meta" if kind.name in ("Q8_0", "F16") else "cpu", experts=experts, layout=layout)
    held = [getattr(planes, f.name) for f in fields(planes) if f.name != "table"]
    assert weight_bytes(info, layout) == sum(t.numel() * t.element_size() for t in held if isinstance(t, torch.Tensor))


def test_vectors_are_float32():
    assert weight_bytes(TensorInfo("output_norm.weight", T.F16, (100,), 0, 200), "b") == 400
    assert weight_bytes(TensorInfo("blk.2.attn_compressor_ape.weight", T.F16, (1024, 4), 0, 8192), "b") == 16384


def test_shared_data_count_once():
    whole, two = plan(), plan(sets=2)
    experts, shared = item(whole, "routed experts"), item(two, "routed experts")
    assert shared == experts * 2 // 43
    assert whole.card_bytes - two.card_bytes == experts - shared


@pytest.mark.parametrize("shape", [FLASH, PRO, TINY])
def test_kv_is_what_the_cache_takes(shape):
    """The CPU's pool has the same rows without the byte that fills up a row's exponents."""
    cache = KVCache(shape, True)
    assert kv_row_bytes(shape) == cache.row_format.row_bytes + 1
    assert key_bytes(shape) == cache.key_format.row_bytes
    tokens = 65536
    found = plan(shape, context=tokens)
    for ratio in {*shape.ratios} - {0}:
        layers = shape.ratios.count(ratio)
        assert item(found, f"rows, ratio {ratio}") == layers * tokens // ratio * kv_row_bytes(shape)
    assert item(found, "index keys") == shape.ratios.count(4) * tokens // 4 * key_bytes(shape)
    state = cache.new_state()
    frontier = sum(t.numel() * 4 for t in state._frontier.values())
    assert item(found, "frontiers") == frontier


def test_flash_at_a_million_tokens():
    found = plan(context=1_048_576)
    rows = sum(item(found, name) for name in ("rows", "index keys"))
    assert 3.42 < rows / GIB < 3.45
    assert found.session_bytes() < 3.6 * GIB
    # A page of each layer is the least.
    assert item(plan(context=1, sessions=1), "rows") == 41 * 64 * 584
    assert item(plan(context=4, sessions=1), "rows, ratio 4") == 21 * 64 * 584


def test_sessions_are_added():
    one, four = plan(), plan(sessions=4)
    assert four.bytes_of("sessions") == 4 * one.bytes_of("sessions")
    assert four.session_bytes() == one.session_bytes()
    assert [bucket(n) for n in (1, 3, 16, 33, 64, 65)] == [1, 4, 16, 64, 64, 64]


def test_checkpoints_are_in_host_memory():
    least, most = checkpoint_sizes(FLASH)
    assert 3.5e6 < least < 3.8e6
    assert least < most < 18e6
    assert plan(checkpoint_bytes=0).card_bytes == plan().card_bytes


def test_checkpoint_sizes_are_those_of_the_cache():
    cache = KVCache(TINY, True)
    state = cache.new_state()
    state.prepare(255)
    for n, expected in ((255, checkpoint_sizes(TINY)[1] - 4 * TINY.vocab), (256, checkpoint_sizes(TINY)[0])):
        state.length = n
        state.floor = 0
        assert state.checkpoint().nbytes == expected


def test_scratch_follows_its_options():
    base = plan()
    ring = 8192 * kv_row_bytes(FLASH)
    assert item(plan(chunk=8192), "streams") - 2 * ring == 2 * (item(base, "streams") - ring)
    assert not [i for i in base.items if "experts in" in i.name]
    exact = item(plan(quality=True), "experts in float32")
    assert exact == 4 * 64 * 2 * 2048 * 4096
    assert item(plan(experts_at_once=1000, quality=True), "experts in float32") == 4 * exact
    assert item(base, "a dense matrix") == 2 * 32768 * 1024
    long = plan(context=1_048_576)
    assert item(long, "activations") - item(base, "activations") < GIB


def test_quality_takes_floats():
    base, found = plan(), plan(quality=True)
    assert item(found, "a dense matrix in float32") == 2 * item(base, "a dense matrix in bf16")
    assert item(base, "activations") < item(found, "activations") < 2 * item(base, "activations")
    # Only pieces of a prompt that go through steps need those of all sizes.
    assert item(found, "activations of steps") < item(base, "activations of steps")
    assert item(plan(quality=True, sessions=64), "activations of steps") > item(base, "activations of steps")
    assert item(found, "CUDA graphs") > item(base, "CUDA graphs")
    assert item(plan(TINY, quality=True), "a dense matrix") >= 4 * min(TINY.vocab, VOCABULARY_ROWS) * TINY.hidden
    fast = fit(FLASH, tensors_of(FLASH, Q2), 141 * GIB, context=32768)
    exact = fit(FLASH, tensors_of(FLASH, Q2), 141 * GIB, context=32768, quality=True)
    assert (exact.options.chunk, exact.options.experts_at_once) == (2048, 32)
    assert exact.options.quality
    assert exact.bytes_of("scratch of prefill") < fast.bytes_of("scratch of prefill") + 4 * 32 * 2 * 2048 * 4096


def test_small_models_take_floats_if_nobody_says():
    tensors = open_model(embedded_model_path()).tensors
    assert is_small(tensors)
    assert not is_small(tensors_of(FLASH, Q2))
    # Experts that all layers share are there once.
    middle = replace(TINY, expert_hidden=1024, experts=32)
    assert is_small(tensors_of(middle, MXFP4, sets=1))
    assert not is_small(tensors_of(middle, MXFP4))
    for quality in (None, True, False):
        found = fit(TINY, tensors, 1 << 40, quality=quality).options
        assert found.quality == (quality is not False)
        assert found.chunk == (2048 if found.quality else 4096)
    assert not fit(FLASH, tensors_of(FLASH, Q2), 1 << 40).options.quality


def test_flash_on_cards():
    found = plan()
    assert [found.verdict(card).fits for card in (141, 96, 80, 24)] == [True, True, False, False]
    assert "the weights alone take" in found.verdict(24).advice[0]
    a = plan(layout="a").verdict(96)
    assert not a.fits
    assert a.advice == ("layout B of the experts (--expert-layout b or auto) takes 21.50 GiB less and fits",)
    assert "(--expert-layout b or auto) is needed, and more" in plan(layout="a").verdict(85).advice[0]


def test_auto_is_layout_a_where_all_of_it_fits_and_a_little_is_left():
    tensors = tensors_of(FLASH, Q2)
    need = plan(sessions=9, layout="a").card_bytes
    least = need + 2 * GIB
    for room, layout in ((least, "a"), (least - 1, "b"), (need, "b"), (96 * GIB, "b")):
        found = fit(FLASH, tensors, room, context=32768, sessions=9)
        assert found.options == replace(plan(sessions=9).options, layout=layout)
        assert found.card_bytes <= room
    # What is asked for is taken, with nothing to spare too.
    assert fit(FLASH, tensors, need, context=32768, sessions=9, layout="a").options.layout == "a"
    assert fit(FLASH, tensors, 1 << 40, context=32768, sessions=9, layout="b").options.layout == "b"
    with pytest.raises(Ds4Error, match=r"9 sessions of 32,768 tokens and experts in layout A takes .*layout B"):
        fit(FLASH, tensors, 106 * GIB, context=32768, sessions=9, layout="a")


@pytest.mark.parametrize("quality", [False, True])
def test_auto_makes_nothing_smaller(quality):
    """Context, sessions and chunks that are left open are those of layout B."""
    tensors, taken = tensors_of(FLASH, Q2), set()
    for gib in (90, 120, 150):
        auto, b = (fit(FLASH, tensors, gib * GIB, layout=layout, quality=quality) for layout in ("auto", "b"))
        assert replace(auto.options, layout="b") == b.options
        assert auto.card_bytes <= gib * GIB
        taken.add(auto.options.layout)
    assert taken == {"a", "b"}


def test_other_types_have_one_layout():
    tensors = tensors_of(FLASH, Q4)
    plans = [fit(FLASH, tensors, 200 * GIB, context=32768, layout=layout) for layout in ("auto", "a", "b")]
    assert len({found.card_bytes for found in plans}) == 1
    assert not plans[0].has_layouts
    assert "layout" not in plans[0].table(auto=True)
    with pytest.raises(Ds4Error) as error:
        fit(FLASH, tensors, 100 * GIB, context=32768, layout="a")
    assert "layout" not in str(error.value)


def test_the_table_has_both_layouts():
    text = plan(sessions=9).table([141, 96, 24], auto=True)
    assert "routed experts, IQ2_XXS, layout B    47.03 GiB   68.53 GiB in layout A\n" in text
    a, b = (size(plan(sessions=9, layout=layout).card_bytes) for layout in ("a", "b"))
    assert f"\non the card: {b} with layout B of the experts, {a} with layout A\n" in text
    lines = {line.split()[0]: line for line in text.splitlines() if " GB card: " in line}
    assert re.fullmatch(r"141 GB card: fits, 30.* left with layout A \(layout B: fits, 51.* left\)", lines["141"])
    assert re.fullmatch(r"96 GB card: fits, .* with layout B \(layout A: does not fit, 14.* short\)", lines["96"])
    assert re.fullmatch(r"24 GB card: does not fit, .* with layout B \(layout A: does not .*\)", lines["24"])
    # More of something fits with layout B.
    contexts = dict(re.findall(r"up to --ctx (\d+) fits with layout (.)", text))
    assert sorted(contexts.values()) == ["A", "B"]
    assert int(max(contexts, key=int)) > int(min(contexts, key=int))
    # What was asked for comes first.
    given = plan(sessions=9, layout="a").table([141, 96])
    assert "routed experts, IQ2_XXS, layout A    68.53 GiB   47.03 GiB in layout B\n" in given
    assert "96 GB card: does not fit, " in given
    assert "short with layout A (layout B: fits, " in given


def test_a_card_gets_the_chunks_that_a_start_would_take():
    """As `fit` does, which tries them in this order."""
    steps = [(2048, 32), (1024, 16), (512, 8)]
    found = plan(context=262_144, sessions=9, quality=True, chunk=2048, experts_at_once=32)
    text = found.table([141, 96, 80], steps=steps)
    assert "prefill chunk 2,048, in float32\n" in text
    lines = {line.split()[0]: line for line in text.splitlines() if " GB card: " in line}
    assert "prefill chunks" not in lines["141"]
    assert lines["96"].startswith("96 GB card: fits, ")
    assert lines["96"].endswith(", in prefill chunks of 1,024")
    assert lines["80"].startswith("80 GB card: does not fit, ")
    room = int(96 * GIB * 0.985)
    started = fit(FLASH, tensors_of(FLASH, Q2), room, context=262_144, sessions=9, quality=True, layout="b")
    assert found.settled(room, steps) == started
    assert found.settled(80 * GIB, steps) is found
    assert "in prefill chunks" not in found.table([96])


def test_advice_is_true():
    """What is proposed fits, and one step more does not."""
    found = plan(context=524_288, sessions=8)
    verdict = found.verdict(96)
    assert not verdict.fits
    words = " ".join(verdict.advice).split()
    room = found.card_bytes + verdict.free
    context = int(words[words.index("--ctx") + 1].rstrip(";"))
    assert found.change(context=context).card_bytes <= room < found.change(context=context + 1024).card_bytes
    more = plan(context=131_072).verdict(141)
    sessions = int(more.advice[0].split()[2])
    assert 64 < sessions < 1024
    assert plan(context=131_072, sessions=sessions).verdict(141).fits
    assert not plan(context=131_072, sessions=sessions + 1).verdict(141).fits
    assert plan(context=512).verdict(141).advice[0] == "up to 1024 sessions of this length fit"


def test_everything_together_is_the_last_resort():
    tight = plan(context=1_048_576, sessions=16, chunk=8192)
    advice = " ".join(tight.verdict(88).advice)
    assert "together: one session, --ctx" in advice
    assert advice.endswith("a prefill chunk of 512")
    exact = plan(context=1_048_576, sessions=16, chunk=8192, experts_at_once=256, quality=True)
    assert exact.verdict(90).advice[-1].endswith("a prefill chunk of 512")
    hopeless = plan().verdict(85.5)
    assert not hopeless.fits
    assert "no room to work" in hopeless.advice[-1]


def test_buffers_of_states_on_disk_are_counted():
    lanes = MOST_LANES * LANE_BYTES
    assert [(i.place, i.nbytes) for i in plan().items if "disk" in i.name or "disk" in i.detail] == [
        ("host", lanes),
        ("card", lanes),
    ]
    assert Lanes(torch.device("cpu")).nbytes <= lanes == 32 << 20
    without = replace(plan(), items=tuple(i for i in plan().items if i.name != "states on their way to disk"))
    assert plan().card_bytes - without.card_bytes == lanes


def test_other_recipes():
    assert plan(experts=Q4).bytes_of("weights") > 150 * GIB
    assert not plan(experts=Q4).verdict(141).fits
    assert plan(PRO, MXFP4).bytes_of("weights") > 700 * GIB
    assert "IQ2_XXS" not in plan(experts=Q4).table()


def test_the_embedded_model():
    path = embedded_model_path()
    found = memory_plan(path, Options(context=4096, sessions=2))
    assert found.shape == open_model(path).shape
    assert found.verdict(24).fits
    text = found.table()
    assert text.startswith(f"Memory plan: {found.shape.name}, 2 sessions of 4,096 tokens, prefill chunk 4,096\n")
    for part in ("weights: ", "sessions: ", "host memory: ", "scratch of prefill: ", "on the card: "):
        assert part in text
    assert [f"{card} GB card: fits" in text for card in CARDS] == [True] * len(CARDS)


def test_a_table_of_a_card_that_is_too_small():
    text = plan().table([24])
    assert "24 GB card: does not fit, " in text
    assert "  - the weights alone take" in text


def test_refusals():
    with pytest.raises(Ds4Error, match="more than the model's"):
        memory_plan(embedded_model_path(), Options(context=10_000_000))
    with pytest.raises(Ds4Error, match="context is 0"):
        Options(context=0)
    with pytest.raises(Ds4Error, match="1025 sessions cannot be live"):
        Options(context=1, sessions=1025)
