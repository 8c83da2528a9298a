"""Types, order and sizes, for whole models without their weights; units; recipes and overrides."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from gguf import GGMLQuantizationType as T

from ds4.errors import Ds4Error
from ds4.gguf.shape import FLASH, TINY, expected_tensors
from ds4.quantize import plan
from ds4.quantize.checkpoint import Checkpoint, open_checkpoint
from ds4.quantize.drafts import draft_path
from ds4.quantize.plan import UNIT_VALUES, FilePlan, make_plans
from ds4.quantize.recipe import FAMILIES, VECTORS, Recipe, family, parse_overrides
from tests.quantize.conftest import TOY, Make, copy_of

OUT = Path("out.gguf")


@pytest.fixture(scope="module")
def flash(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Every name and shape of Flash with its MTP block; zeros that take no room."""
    out = tmp_path_factory.mktemp("flash") / "Flash"
    builder.build(out, FLASH, None, drafts="mtp", shards=46, sparse=True)
    return open_checkpoint(out)


@pytest.fixture(scope="module")
def flash_plans(flash: Checkpoint) -> dict[str, list[FilePlan]]:
    """Recipe -> plans for Flash, without the 6 MB of vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "tokenizer_keys", lambda *_: {})
        return {recipe: make_plans(flash, OUT, Recipe(recipe)) for recipe in ("q2", "q2-q4", "q4", "mxfp4")}


def plans_of(folder: Path, recipe: str = "q2", *overrides: str, last_layers: int = 6) -> list[FilePlan]:
    return make_plans(open_checkpoint(folder), OUT, Recipe(recipe, last_layers, parse_overrides(overrides)))


def types(file: FilePlan) -> dict[str, T]:
    return {output.name: output.type for output in file.outputs}


def test_flash_has_the_tensors_and_sizes_of_the_published_files(
    flash: Checkpoint, flash_plans: dict[str, list[FilePlan]]
) -> None:
    """Sizes in GB as announced for the three published files and the draft file."""
    assert len(flash.tensors) == 69_187
    sizes = {}
    for recipe, (model, draft) in flash_plans.items():
        assert [output.name for output in model.outputs] == list(expected_tensors(FLASH))
        assert len(model.outputs) == 1328
        assert model.shape == FLASH
        sizes[recipe] = round(model.size / 1e9, 1)
        sizes[f"{recipe}-mtp"] = round(draft.size / 1e9, 1)
    assert sizes == {
        "q2": 86.7, "q2-q4": 97.6, "q4": 164.6, "mxfp4": 156.0,
        "q2-mtp": 3.8, "q2-q4-mtp": 3.8, "q4-mtp": 3.8, "mxfp4-mtp": 3.6,
    }  # fmt: skip
    layers = types(flash_plans["q2-q4"][0])
    assert [i for i in range(43) if layers[f"blk.{i}.ffn_up_exps.weight"] == T.Q4_K] == list(range(37, 43))


def test_flash_needs_less_than_16_gib(flash_plans: dict[str, list[FilePlan]]) -> None:
    """Any number of jobs stays within the default budget of 8 GiB; each unit is at most one expert."""
    largest = max(unit.work_bytes for plan in flash_plans["q2"] for unit in plan.units())
    assert largest == 24 * UNIT_VALUES == 192 << 20


def test_units_cover_every_byte_of_every_tensor_once(toy: Make) -> None:
    for file in plans_of(toy("official", "dspark"), "q2"):
        position = len(file.header)
        by_output: Counter[str] = Counter()
        for unit in file.units():
            assert unit.offset == position
            assert unit.start % unit.output.source.tile[0] == 0
            position += unit.nbytes
            by_output[unit.output.name] += unit.n_values
            if by_output[unit.output.name] == unit.output.n_values:
                position = -(-position // 32) * 32
        assert position == file.size
        assert by_output == {output.name: output.n_values for output in file.outputs}


def test_large_matrices_are_cut_on_tiles(flash_plans: dict[str, list[FilePlan]]) -> None:
    units = list(flash_plans["q2"][0].units())
    cut = [unit for unit in units if unit.output.name in ("token_embd.weight", "blk.0.attn_q_b.weight")]
    assert len(cut) == 129_280 // 2048 + 1 + 4
    assert max(unit.n_values for unit in units) == UNIT_VALUES
    assert {unit.start % 128 for unit in cut} == {0}


def test_a_file_of_a_profile_has_its_types(tiny: Path) -> None:
    model, draft = plans_of(tiny)
    assert model.shape == TINY
    for name, spec in expected_tensors(TINY).items():
        assert types(model)[name] in spec.types
    assert types(draft)["mtp.0.ffn_gate_exps.weight"] == T.Q4_K
    assert types(draft)["mtp.0.hc_head_fn.weight"] == types(draft)["mtp.0.ffn_gate_inp.weight"] == T.F32
    assert types(draft)["mtp.0.e_proj.weight"] == T.Q8_0


def test_types_beyond_a_profile_make_the_file_custom(tiny: Path) -> None:
    assert plans_of(tiny, "q8")[0].shape == replace(TINY, name="custom")
    model = plans_of(tiny, "q2", "shared=q4_K", "down=Q4_K", "output=F16", "attention=BF16")[0]
    assert model.shape.name == "custom"
    found = types(model)
    assert found["blk.0.ffn_up_shexp.weight"] == T.Q4_K
    assert found["blk.0.attn_output_b.weight"] == T.BF16
    assert found["blk.5.ffn_down_exps.weight"] == T.Q4_K
    assert found["blk.5.ffn_gate_exps.weight"] == T.IQ2_XXS
    assert found["output.weight"] == T.F16
    assert plans_of(tiny, "q2", "down=Q4_K")[0].shape == TINY


def test_a_custom_shape_has_the_usual_types(toy: Make) -> None:
    model = plans_of(toy())[0]
    assert model.shape == TOY
    found = types(model)
    assert found["blk.1.attn_q_a.weight"] == T.Q8_0
    assert found["token_embd.weight"] == T.F16
    assert found["blk.0.attn_sinks.weight"] == T.F32


def test_narrow_overrides_come_before_experts() -> None:
    recipe = Recipe("q2", 6, parse_overrides(["experts=Q4_K", "down=Q8_0"]))
    assert recipe.overrides == {"experts": T.Q4_K, "down": T.Q8_0}
    spec = expected_tensors(FLASH)["blk.0.ffn_down_exps.weight"]
    assert recipe.type_of("blk.0.ffn_down_exps.weight", spec, 43) == T.Q8_0
    assert recipe.type_of("blk.0.ffn_up_exps.weight", spec, 43) == T.Q4_K


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe("q3"), "recipe 'q3' is not known; use q2, "),
        (lambda: Recipe("q2-q4", -1), "cannot be negative"),
        (lambda: Recipe("q2", 6, parse_overrides(["gate=Q4_K"])), "gate and up experts need one type"),
        (lambda: parse_overrides(["down"]), "expected FAMILY=TYPE"),
        (lambda: parse_overrides(["dwon=Q4_K"]), "no family 'dwon'; there are gate, up, "),
        (lambda: parse_overrides(["down=Q5_K"]), "no type 'Q5_K'; there are F32, "),
    ],
)
def test_recipes_that_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(Ds4Error, match=message):
        make()


def test_rows_that_a_type_cannot_hold(toy: Make) -> None:
    with pytest.raises(
        Ds4Error, match=r"rows of 128 values, which Q4_K cannot hold \(blocks of 256\); use --override att"
    ):
        plans_of(toy(), "q2", "attention=Q4_K")


def test_every_tensor_has_one_family() -> None:
    found = Counter(family(name) for name in expected_tensors(FLASH))
    assert set(found) == set(FAMILIES) - {"experts", "draft"} | {VECTORS}
    assert (found["gate"], found["attention"], found["indexer"], found["compressor"]) == (43, 215, 105, 123)


def test_config_of_another_model(toy: Make, builder: ModuleType, tmp_path: Path) -> None:
    """Fewer layers than the checkpoint has: the others would be lost in silence."""
    checkpoint = open_checkpoint(toy())
    smaller = replace(TOY, layers=2, ratios=TOY.ratios[:2])
    with pytest.raises(Ds4Error, match=r"holds \d+ tensors that a model of this config.json does not have"):
        make_plans(replace(checkpoint, config=builder.config_of(smaller, "official", None)), OUT, Recipe())
    larger = replace(TOY, experts=4)
    with pytest.raises(Ds4Error, match=r"ffn.gate.weight': has shape \[3, 256\], expected \[4, 256\]"):
        make_plans(replace(checkpoint, config=builder.config_of(larger, "official", None)), OUT, Recipe())


def test_drafts_in_files_of_their_own(toy: Make) -> None:
    folder = toy("official", "dspark")
    model, draft = plans_of(folder)
    assert draft.path == draft_path(OUT, "dspark") == Path("out-dspark.gguf")
    assert draft_path(Path("a/flash"), "mtp") == Path("a/flash-mtp.gguf")
    assert draft.draft
    assert not model.draft
    assert len(draft.outputs) == 81
    assert not any(output.name.startswith("mtp.") for output in model.outputs)
    assert len(make_plans(open_checkpoint(folder), OUT, Recipe(), with_drafts=False)) == 1
    assert b"deepseek4.dspark.target_layer_ids" in draft.header
    stages = b"nextn_predict_layers" + (4).to_bytes(4, "little") + (3).to_bytes(4, "little")  # the type, the number
    assert stages in draft.header
    assert b"tokenizer" not in draft.header


@pytest.mark.parametrize("drafts", ["mtp", "dspark"])
def test_types_of_drafts_do_not_depend_on_the_profile(toy: Make, tiny: Path, drafts: str) -> None:
    """Of a custom model, and of one that an override makes so, they are those of the published file."""
    folders = [(toy("official", drafts), ()), (toy("official", drafts), ("output=F16",))]
    if drafts == "mtp":
        folders += [(tiny, ()), (tiny, ("output=F16",))]
    for folder, overrides in folders:
        found = types(plans_of(folder, "q2", *overrides)[1])
        assert found["mtp.0.attn_q_b.weight"] == found["mtp.0.ffn_down_shexp.weight"] == T.Q8_0
        assert found["mtp.0.attn_norm.weight"] == found["mtp.0.ffn_gate_inp.weight"] == T.F32
        assert found["mtp.0.ffn_down_exps.weight"] == T.Q4_K


def test_draft_stages_must_be_whole(toy: Make) -> None:
    checkpoint = open_checkpoint(toy("official", "dspark"))
    tensors = {name: t for name, t in checkpoint.tensors.items() if not name.startswith("mtp.1.")}
    with pytest.raises(Ds4Error, match=r"draft stages \[0, 2\], expected them numbered from 0"):
        make_plans(replace(checkpoint, tensors=tensors), OUT, Recipe())
    config = {**checkpoint.config, "dspark_target_layer_ids": [99]}
    with pytest.raises(Ds4Error, match=r"dspark_target_layer_ids is \[99\]"):
        make_plans(replace(checkpoint, config=config), OUT, Recipe())


@pytest.mark.parametrize("key", ["vocab_size", "hc_mult"])
def test_numbers_beyond_the_weights_are_refused_at_once(toy: Make, tmp_path: Path, key: str) -> None:
    """Before as many tokens as config.json says are made, or a key is written that cannot hold them."""
    folder = copy_of(toy(), tmp_path / "c")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: 10**9}))
    with pytest.raises(Ds4Error, match=r"expected .*000"):
        make_plans(open_checkpoint(folder), tmp_path / "m.gguf", Recipe("q4"))


def test_file_names_that_are_no_text_are_recorded_without_it(toy: Make) -> None:
    """Python shows bytes that are no UTF-8 as surrogates, which no key can hold."""
    (made,) = make_plans(open_checkpoint(toy()), OUT, Recipe("q4"), imatrix=("a\udcff.dat", 1))
    assert b"quantize.imatrix.file" in made.header
    assert b"a?.dat" in made.header
