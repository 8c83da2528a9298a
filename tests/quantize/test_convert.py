"""Files from checkpoints: their values, the same bytes always, what interruptions and bad input leave behind."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from safetensors.torch import load_file, save_file

from ds4.errors import Ds4Error
from ds4.gguf.blocks import dequantize
from ds4.gguf.file import collect_problems, open_model
from ds4.quantize import convert as conversion
from ds4.quantize import journal
from ds4.quantize.checkpoint import open_checkpoint
from ds4.quantize.compare import compare
from ds4.quantize.convert import Settings, check_outputs, convert
from ds4.quantize.plan import FilePlan, make_plans
from ds4.quantize.recipe import Recipe, parse_overrides
from tests.quantize.conftest import TOY, Make, copy_of, spoil_index

DRIVER = Path(__file__).parent / "kill_driver.py"
ROOT = Path(__file__).parents[2]


def nothing(*_: object) -> None:
    """Progress and notes that nobody reads."""


def plans_of(folder: Path, out: Path, recipe: str = "q4", *overrides: str, name: str | None = "toy") -> list[FilePlan]:
    return make_plans(open_checkpoint(folder), out, Recipe(recipe, 1, parse_overrides(overrides)), name=name)


def made(folder: Path, out: Path, recipe: str = "q4", *overrides: str, **settings: Any) -> bytes:
    """Convert and return the bytes of all files, one behind the other."""
    plans = plans_of(folder, out, recipe, *overrides)
    convert(plans, Settings(**settings), nothing, nothing)
    return b"".join(plan.path.read_bytes() for plan in plans)


def values_of(path: Path, name: str) -> torch.Tensor:
    file = open_model(path)
    info = file.tensors[name]
    return dequantize(file.raw(name), info.type, info.n_values).view(info.shape)


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


# --------------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [*((layout, "q2-q4") for layout in ("official", "fp8", "bf16", "transformers")),
     *(("official", recipe) for recipe in ("q2", "q4", "mxfp4", "q8"))],
)  # fmt: skip
def test_every_recipe_of_every_layout_is_a_usable_file(toy: Make, tmp_path: Path, layout: str, recipe: str) -> None:
    out = tmp_path / "toy.gguf"
    made(toy(layout), out, recipe)
    assert names_in(tmp_path) == {"toy.gguf"}
    assert collect_problems(out) == []
    file = open_model(out)
    assert file.shape == TOY
    assert file.has_tokenizer
    assert file.qat_sim


def test_layouts_of_the_same_weights_give_the_same_file(toy: Make, tmp_path: Path) -> None:
    """bf16 under two spellings, fused experts and single ones: only the number of listed ratios may differ."""
    tensors = []
    for layout in ("bf16", "transformers"):
        out = tmp_path / f"{layout}.gguf"
        made(toy(layout), out, "q4", "experts=BF16", "shared=BF16")
        file = open_model(out)
        vectors = {n for n, info in file.tensors.items() if info.type in (T.F32, T.F16)}  # F32 and BF16 at the source
        tensors.append({name: file.raw(name).tobytes() for name in file.tensors if name not in vectors})
    assert len(tensors[0]) > 30
    assert tensors[0] == tensors[1]


def test_float_types_hold_the_checkpoints_values(toy: Make, tmp_path: Path, builder: Any) -> None:
    out, get = tmp_path / "toy.gguf", builder.random_values(TOY, 5)
    made(toy("bf16"), out, "q4", "experts=BF16", "attention=F32", "embedding=F32", "hyper=F32", "router=F32")
    for name in (
        "blk.2.ffn_up_exps.weight",
        "blk.2.ffn_down_exps.weight",
        "blk.1.attn_q_b.weight",
        "token_embd.weight",
    ):
        assert torch.equal(values_of(out, name), get(name).bfloat16().float()), name
    for name in ("output_hc_base.weight", "blk.2.hc_ffn_fn.weight", "blk.0.attn_sinks.weight"):
        assert torch.equal(values_of(out, name), get(name)), name


def test_fp4_experts_become_mxfp4_without_loss(toy: Make, tmp_path: Path) -> None:
    out, folder = tmp_path / "toy.gguf", toy("official")
    made(folder, out, "mxfp4", jobs=2)
    exact = tmp_path / "exact.gguf"
    made(folder, exact, "q4", "experts=F32")
    for kind in ("gate", "up", "down"):
        name = f"blk.2.ffn_{kind}_exps.weight"
        assert open_model(out).tensors[name].type == T.MXFP4
        assert torch.equal(values_of(out, name), values_of(exact, name))
        assert len(values_of(out, name).unique()) > 20


def test_only_experts_that_are_not_fp4_are_rounded(toy: Make, tmp_path: Path) -> None:
    """One expert in bfloat16 among those in FP4: the others keep their bytes."""
    folder = copy_of(toy("official"), tmp_path / "c")
    stored = open_checkpoint(folder).tensors["layers.2.ffn.experts.1.w2.weight"]
    tensors = load_file(stored.file)
    plain = torch.randn(TOY.hidden, TOY.expert_hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    del tensors["layers.2.ffn.experts.1.w2.scale"]
    tensors[stored.name] = plain
    save_file(tensors, stored.file)
    spoil_index(folder, {"layers.2.ffn.experts.1.w2.scale": None})
    made(toy("official"), tmp_path / "a.gguf", "mxfp4")
    made(folder, tmp_path / "b.gguf", "mxfp4")
    name = "blk.2.ffn_down_exps.weight"
    before, after = (open_model(tmp_path / file).raw(name).reshape(TOY.experts, -1) for file in ("a.gguf", "b.gguf"))
    assert [bool((x == y).all()) for x, y in zip(before, after, strict=True)] == [True, False, True]
    error = values_of(tmp_path / "b.gguf", name)[1] - plain.float()
    assert 0.05 < float(error.norm() / plain.float().norm()) < 0.2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recipe", ["q2-q4", "mxfp4"])
def test_a_gpu_makes_the_same_files(toy: Make, tmp_path: Path, recipe: str) -> None:
    """But for ties among codes: every tensor is as near to the checkpoint as from the CPU, plain ones are the same."""
    device = torch.device("cuda")
    made(toy(), tmp_path / "cpu.gguf", recipe)
    again = made(toy(), tmp_path / "gpu.gguf", recipe, device=device, jobs=4)
    assert again == made(toy(), tmp_path / "again.gguf", recipe, device=device)
    plans = plans_of(toy(), tmp_path / "cpu.gguf", recipe)
    on_cpu = list(compare(plans, "*", Settings()))
    on_gpu = list(compare([replace(plans[0], path=tmp_path / "gpu.gguf")], "*", Settings()))
    for mine, theirs in zip(on_gpu, on_cpu, strict=True):
        exact = mine.type in (T.F32, T.F16, T.MXFP4, T.I32)
        assert mine.rms == pytest.approx(theirs.rms, rel=0 if exact else 0.01, abs=0 if exact else 1e-6)


def test_hash_tables(toy: Make, tmp_path: Path, builder: Any) -> None:
    out = tmp_path / "toy.gguf"
    made(toy(), out)
    table = open_model(out).raw("blk.0.ffn_gate_tid2eid.weight").view("<i4").reshape(TOY.vocab, TOY.experts_used)
    assert np.array_equal(table, builder.random_values(TOY, 5)("blk.0.ffn_gate_tid2eid.weight").numpy())


def test_importance_reaches_its_expert(toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert gets its own vector; one that was never used gets none."""
    seen: list[tuple[str, Any]] = []

    def record(values: torch.Tensor, type: T, importance: Any, name: str) -> np.ndarray:
        seen.append((name, None if importance is None else importance.tolist()))
        return original(values, type, importance, name)

    original = conversion.encode_rows
    monkeypatch.setattr(conversion, "encode_rows", record)
    name = "blk.2.ffn_down_exps.weight"
    vectors = np.arange(3 * 256, dtype=np.float32).reshape(3, 256)
    vectors[1] = 0
    with_importance = made(toy(), tmp_path / "a.gguf", "q2", importance={name: vectors}, importance_id="x")
    assert [v for n, v in seen if n == name] == [vectors[0].tolist(), None, vectors[2].tolist()]
    assert {v for n, v in seen if n != name} == {None}
    assert with_importance != made(toy(), tmp_path / "b.gguf", "q2")


# --------------------------------------------------------------------------------------------------------------------
# The same bytes


def test_runs_and_numbers_of_jobs_give_the_same_bytes(
    toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds4.quantize.plan.UNIT_VALUES", 1 << 15)  # rows of one expert in several units
    folder = toy("official", "mtp")
    first = made(folder, tmp_path / "a.gguf", "q2")
    assert made(folder, tmp_path / "b.gguf", "q2") == first
    assert made(folder, tmp_path / "c.gguf", "q2", jobs=5) == first
    assert made(folder, tmp_path / "d.gguf", "q2", jobs=3, memory=1) == first


def test_units_do_not_change_the_bytes(toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made(toy(), tmp_path / "a.gguf", "q2")
    monkeypatch.setattr("ds4.quantize.plan.UNIT_VALUES", 1 << 15)
    assert made(toy(), tmp_path / "b.gguf", "q2") == whole


def driven(folder: Path, out: Path, jobs: int, *events: int) -> list[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT), *sys.path))}
    command = [sys.executable, str(DRIVER), str(folder), str(out), str(jobs), *map(str, events)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr, result.stderr  # of a child that was to be killed
    return [line for line in result.stdout.splitlines() if line in ("killed", "done")]


def test_kills_at_random_moments(toy: Make, tmp_path: Path) -> None:
    """Children that are killed at random writes, synchronisations and renames, each going on from the one before."""
    folder = toy("official", "mtp")
    out = tmp_path / "killed" / "toy.gguf"
    out.parent.mkdir()
    expected = made_with_folder_name(folder, tmp_path / "toy.gguf")
    told = driven(folder, out, 3, *random.Random(3).choices(range(1, 120), k=8))
    assert told.count("killed") == 8
    assert out.read_bytes() + out.with_name("toy-mtp.gguf").read_bytes() == expected
    assert names_in(out.parent) == {"toy.gguf", "toy-mtp.gguf"}


def made_with_folder_name(folder: Path, out: Path) -> bytes:
    """As the driver does it: the file has the folder's name."""
    plans = plans_of(folder, out, "q4", name=None)
    convert(plans, Settings(), nothing, nothing)
    return b"".join(plan.path.read_bytes() for plan in plans)


class Stop(BaseException):
    """An interruption that no handler knows."""


def interrupted(folder: Path, out: Path, units: int, recipe: str = "q4", **settings: Any) -> list[FilePlan]:
    """A conversion that is stopped after some units."""
    plans = plans_of(folder, out, recipe)
    count = 0

    def stop(values: int, found: bool) -> None:
        nonlocal count
        count += 1
        if count == units:
            raise Stop

    with pytest.raises(Stop):
        convert(plans, Settings(**settings), stop, nothing)
    return plans


def found_again(plans: list[FilePlan], notes: list[str] | None = None, **settings: Any) -> tuple[int, int]:
    """Finish a conversion; units that were found done, and units that were made."""
    counts = {True: 0, False: 0}

    def count(values: int, found: bool) -> None:
        counts[found] += 1

    convert(plans, Settings(**settings), count, [].append if notes is None else notes.append)
    return counts[True], counts[False]


def test_an_interrupted_run_goes_on(toy: Make, tmp_path: Path) -> None:
    expected = made(toy(), tmp_path / "a.gguf")
    out = tmp_path / "b.gguf"
    plans = interrupted(toy(), out, 40)
    assert not out.exists()
    assert names_in(tmp_path) == {"a.gguf", "b.gguf.part", "b.gguf.journal"}
    total = len(list(plans[0].units()))
    assert found_again(plans) == (40, total - 40)
    assert out.read_bytes() == expected
    assert names_in(tmp_path) == {"a.gguf", "b.gguf"}


def test_work_that_was_damaged_is_done_again(toy: Make, tmp_path: Path) -> None:
    expected = made(toy(), tmp_path / "a.gguf")
    out = tmp_path / "b.gguf"
    plans = interrupted(toy(), out, 40)
    with (tmp_path / "b.gguf.part").open("r+b") as file:
        unit = list(plans[0].units())[5]
        file.seek(unit.offset)
        byte = file.read(1)
        file.seek(unit.offset)
        file.write(bytes([byte[0] ^ 1]))
        file.seek(0)
        file.write(b"XXXX")
    with (tmp_path / "b.gguf.journal").open("ab") as file:
        file.write(b"99999 deadbeef\n7 zzz\n\n41 00")  # numbers that are none, and a line that was cut off
    found, _ = found_again(plans)
    assert found == 39
    assert out.read_bytes() == expected


def test_another_conversion_starts_over(toy: Make, tmp_path: Path) -> None:
    out = tmp_path / "b.gguf"
    interrupted(toy(), out, 40, "mxfp4")
    notes: list[str] = []
    found, _ = found_again(plans_of(toy(), out, "q4"), notes)
    assert found == 0
    assert notes == [f"{out}.part was of another conversion and is started over"]
    assert out.read_bytes() == made(toy(), tmp_path / "a.gguf")
    interrupted(toy(), tmp_path / "c.gguf", 40, "q4")
    assert found_again(plans_of(toy(), tmp_path / "c.gguf"), importance_id="an imatrix")[0] == 0


def test_a_changed_checkpoint_starts_over(toy: Make, tmp_path: Path) -> None:
    folder = copy_of(toy(), tmp_path / "c")
    plans = interrupted(folder, tmp_path / "b.gguf", 40)
    os.utime(folder / "model-00002-of-00003.safetensors", ns=(1, 1))
    assert found_again(plans)[0] == 0


def test_a_finish_that_was_interrupted_is_finished(toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts have their name already, the model not yet; then both have, and only journals are left."""
    folder, out = toy("official", "mtp"), tmp_path / "b.gguf"
    expected = made(folder, tmp_path / "a.gguf")
    plans = plans_of(folder, out)
    original = journal.Workfile.publish

    def once(work: journal.Workfile) -> None:
        if work.out == out:
            raise Stop
        original(work)

    with monkeypatch.context() as patch:
        patch.setattr(journal.Workfile, "publish", once)
        with pytest.raises(Stop):
            convert(plans, Settings(), nothing, nothing)
    assert plans[1].path.exists()
    assert not out.exists()
    check_outputs(plans, Settings())
    with monkeypatch.context() as patch:
        patch.setattr(journal.Workfile, "forget", lambda path: (_ for _ in ()).throw(Stop()))
        with pytest.raises(Stop):
            convert(plans, Settings(), nothing, nothing)
    check_outputs(plans, Settings())
    assert found_again(plans)[1] == 0
    assert out.read_bytes() + plans[1].path.read_bytes() == expected
    assert names_in(tmp_path) == {"a.gguf", "a-mtp.gguf", "b.gguf", "b-mtp.gguf"}
    with pytest.raises(Ds4Error, match=r"b.gguf: exists; give another --out, or --force"):
        check_outputs(plans, Settings())


# --------------------------------------------------------------------------------------------------------------------
# Bad input, bad disks


def spoiled(folder: Path, name: str, change: Any) -> None:
    """Change one tensor of a copied checkpoint."""
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            tensors[name] = change(tensors[name])
            save_file(tensors, shard)
            return
    raise KeyError(name)


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = float("nan")
    return tensor


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("head.weight", with_nan, "tensor 'head.weight': 1 values are not finite"),
        ("layers.2.ffn.experts.2.w2.scale", lambda t: torch.full_like(t.view(torch.uint8), 255).view(t.dtype),
         "experts.2.w2.weight': .* not finite"),
        ("layers.2.hc_ffn_fn", lambda t: t * 1e9, "hc_ffn_fn.weight' has values beyond the range of F16; use --over"),
        ("layers.0.ffn.gate.tid2eid", lambda t: t + 3, "holds expert numbers from 3 to 5, expected 0 to 2"),
        ("layers.0.ffn.gate.tid2eid", lambda t: t - 1, "holds expert numbers from -1"),
    ],
)  # fmt: skip
def test_bad_weights_leave_nothing(toy: Make, tmp_path: Path, name: str, change: Any, message: str) -> None:
    folder = copy_of(toy("official", "mtp"), tmp_path / "c")
    spoiled(folder, name, change)
    (tmp_path / "out").mkdir()
    with pytest.raises(Ds4Error, match=message):
        made(folder, tmp_path / "out" / "b.gguf", jobs=3)
    assert names_in(tmp_path / "out") == set()


def test_a_shard_that_vanishes_on_the_way(toy: Make, tmp_path: Path) -> None:
    folder = copy_of(toy(), tmp_path / "c")
    plans = plans_of(folder, tmp_path / "b.gguf")
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"gone")
    with pytest.raises(Ds4Error, match=r"model-00003-of-00003.safetensors: tensor .* the file has become shorter"):
        convert(plans, Settings(), nothing, nothing)
    assert names_in(tmp_path) == {"c"}


def test_a_checkpoint_that_is_away_for_a_while_keeps_the_work(toy: Make, tmp_path: Path) -> None:
    """A disk that is not mounted is not a damaged checkpoint."""
    folder = copy_of(toy(), tmp_path / "c")
    plans = plans_of(folder, tmp_path / "b.gguf")

    def unmount(values: int, found: bool) -> None:
        if folder.exists():
            folder.rename(tmp_path / "away")

    with pytest.raises(OSError, match="No such file"):
        convert(plans, Settings(), unmount, nothing)
    (tmp_path / "away").rename(folder)
    found, _ = found_again(plans)
    assert found > 0
    assert plans[0].path.read_bytes() == made(toy(), tmp_path / "a.gguf")


def test_what_encoding_lacks_is_told_before_anything_is_touched(
    toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = interrupted(toy(), tmp_path / "b.gguf", 20)

    def lacking(*_: object) -> None:
        raise Ds4Error("a package is missing")

    with monkeypatch.context() as patch:
        patch.setattr("ds4.quantize.encoder.encode_rows", lacking)
        with pytest.raises(Ds4Error, match="a package is missing"):
            convert(plans, Settings(), nothing, nothing)
    assert found_again(plans)[0] == 20


def test_no_room_is_told_before_the_work_begins(toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = plans_of(toy("official", "mtp"), tmp_path / "b.gguf")
    free = plans[0].size + 1000

    def statvfs(path: Path) -> SimpleNamespace:
        taken = sum(file.stat().st_size for file in path.iterdir())
        return SimpleNamespace(f_bavail=max(free - taken, 0), f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.raises(
        Ds4Error, match=r"b-mtp.gguf: cannot be written: needs [\d,]+ bytes, [\d,]+ are free; give --out on"
    ):
        convert(plans, Settings(), nothing, nothing)
    assert names_in(tmp_path) == set()


def test_a_disk_that_cannot_reserve(toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Ds4Error, match=r"b.gguf: cannot be written: Disk quota exceeded"):
        made(toy(), tmp_path / "b.gguf")
    assert names_in(tmp_path) == set()


def test_a_disk_that_fails_keeps_the_work(toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the input's fault: what was done is worth going on from."""
    expected = made(toy(), tmp_path / "a.gguf")
    original, count = os.pwrite, 0

    def failing(descriptor: int, data: Any, offset: int) -> int:
        nonlocal count
        count += 1
        if count > 40:
            raise OSError(errno.EIO, "Input/output error")
        return original(descriptor, data, offset)

    plans = plans_of(toy(), tmp_path / "b.gguf")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        with pytest.raises(OSError, match="Input/output error"):
            convert(plans, Settings(), nothing, nothing)
    found, _ = found_again(plans)
    assert found == 39  # one write was the header
    assert plans[0].path.read_bytes() == expected


def test_short_writes_are_completed(toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = made(toy(), tmp_path / "a.gguf")
    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: original(fd, data[:65_537], offset))
    assert made(toy(), tmp_path / "b.gguf") == expected


def test_two_processes_cannot_write_one_file(toy: Make, tmp_path: Path) -> None:
    plans = plans_of(toy(), tmp_path / "b.gguf")
    first = journal.Workfile(plans[0].path, plans[0].size, "x")
    with pytest.raises(Ds4Error, match="another ds4-quantize is writing this file"):
        convert(plans, Settings(), nothing, nothing)
    assert first.part.exists()
    first.close()
    convert(plans, Settings(), nothing, nothing)


@pytest.mark.parametrize(("name", "text"), [("part", b"a download"), ("journal", b"a diary\n"), ("journal", b"[]\n")])
def test_files_of_others_are_not_touched(toy: Make, tmp_path: Path, name: str, text: bytes) -> None:
    (tmp_path / f"b.gguf.{name}").write_bytes(text)
    with pytest.raises(Ds4Error, match=rf"b.gguf.{name}: is not of ds4-quantize, .* move it away"):
        made(toy(), tmp_path / "b.gguf")
    assert (tmp_path / f"b.gguf.{name}").read_bytes() == text


def test_a_part_of_another_size_is_started_over(toy: Make, tmp_path: Path) -> None:
    """As a crash between the first line of the journal and the reservation leaves it."""
    plans = interrupted(toy(), tmp_path / "b.gguf", 10)
    os.truncate(tmp_path / "b.gguf.part", 1000)
    assert found_again(plans)[0] == 0
    assert plans[0].path.read_bytes() == made(toy(), tmp_path / "a.gguf")


def test_a_folder_that_cannot_be_written(toy: Make, tmp_path: Path) -> None:
    with pytest.raises(Ds4Error, match=r"b.gguf.journal: cannot be written: No such file or directory"):
        made(toy(), tmp_path / "none" / "b.gguf")


def test_a_journal_that_was_taken_away_while_it_was_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that had it ended just then; what is locked has no name any more."""
    out = tmp_path / "m.gguf"
    original = journal.fcntl.flock

    def late(descriptor: int, how: int) -> None:
        journal.journal_path(out).unlink()
        original(descriptor, how)

    monkeypatch.setattr(journal.fcntl, "flock", late)
    with pytest.raises(Ds4Error, match="another ds4-quantize is writing this file"):
        journal.Workfile(out, 100, "x")
    assert list(tmp_path.iterdir()) == []
