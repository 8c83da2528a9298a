"""The command on ds4-tiny's weights in the official layout, and every way in which it ends with a message."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import ds4
from ds4.cli.main import main as ds4_main
from ds4.gguf.file import embedded_model_path, open_model
from ds4.gguf.shape import TINY
from ds4.quantize import main as command
from ds4.quantize.checkpoint import INDEX
from ds4.quantize.imatrix import Imatrix
from ds4.quantize.main import main
from ds4.quantize.options import build_parser, parse
from ds4.quantize.recipe import EXPERTS
from ds4.quantize.report import progress
from tests.quantize.conftest import Make, copy_of


def run(*args: object) -> int:
    return main([str(arg) for arg in args])


@pytest.fixture(scope="module")
def q2(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A q2 file of ds4-tiny, made by the command from FP8 and FP4."""
    out = tmp_path_factory.mktemp("out") / "q2.gguf"
    assert run(tiny, "--out", out, "-j", 2) == 0
    return out


def greedy(path: Path, question: str, limit: int = 80) -> str:
    engine = ds4.load(path)
    session = engine.session()
    prompt = ds4.chat.render([{"role": "user", "content": question}])
    session.sync(engine.tokenizer.encode_chat(prompt))
    return b"".join(session.generate(ds4.Sampling(temperature=0.0), max_tokens=limit)).decode()


def test_the_q2_file_is_the_profile_tiny_and_answers(q2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From FP4 to 2 bits once more, it still adds."""
    assert open_model(q2).shape == TINY
    shipped, made = open_model(embedded_model_path()), open_model(q2)
    assert {n: (i.type, i.dims) for n, i in made.tensors.items()} == {
        n: (i.type, i.dims) for n, i in shipped.tensors.items()
    }
    assert list(made.tensors) == list(shipped.tensors)
    assert ds4_main(["--inspect", str(q2)]) == 0
    assert "usable: every check passed" in capsys.readouterr().out
    assert "12 + 30 = 42" in greedy(q2, "What is 12 + 30?")


def test_keys_are_those_of_the_shipped_file(q2: Path) -> None:
    shipped, made = open_model(embedded_model_path()).metadata, open_model(q2).metadata
    different = {key for key in shipped if made.get(key) != shipped[key]}
    assert different <= {"general.name", "general.license", "deepseek4.nextn_predict_layers", "ds4.qat_sim",
                         "deepseek4.attention.compress_ratios", "general.file_type"}  # fmt: skip
    assert made["deepseek4.attention.compress_ratios"] == [*TINY.ratios, 0]
    assert made["general.name"] == "tiny"


@pytest.mark.parametrize("recipe", sorted(set(EXPERTS) - {"q2"}))
def test_every_recipe_of_the_command_answers(tiny: Path, tmp_path: Path, recipe: str) -> None:
    out = tmp_path / "m.gguf"
    assert run(tiny, "--out", out, "--recipe", recipe, "--no-drafts") == 0
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]
    assert "12 + 30 = 42" in greedy(out, "What is 12 + 30?")


def test_drafts_are_a_file_of_their_own(q2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = q2.with_name("q2-mtp.gguf")
    assert draft.is_file()
    assert ds4_main(["--inspect", str(draft)]) == 1
    assert "holds only the MTP draft blocks" in capsys.readouterr().out


def test_importance_is_used_and_recorded(
    tiny: Path, q2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "tiny.dat", tmp_path / "m.gguf"
    generator = np.random.default_rng(1)
    vectors = {
        f"blk.{layer}.ffn_{kind}_exps.weight": generator.uniform(0, 4, (8, 256)).astype(np.float32) ** 4
        for layer in range(6) for kind in ("gate", "up", "down")
    }  # fmt: skip
    Imatrix(vectors).save(path)
    assert run(tiny, "--out", out, "--imatrix", path, "--no-drafts") == 0
    assert "importance for 18 tensors" in capsys.readouterr().err
    metadata = open_model(out).metadata
    assert (metadata["quantize.imatrix.file"], metadata["quantize.imatrix.entries_count"]) == ("tiny.dat", 18)
    name = "blk.2.ffn_down_exps.weight"
    assert open_model(out).raw(name).tobytes() != open_model(q2).raw(name).tobytes()
    assert open_model(out).raw("output.weight").tobytes() == open_model(q2).raw("output.weight").tobytes()
    assert run(tiny, "--out", out, "--imatrix", path, "--compare-tensor", name, "--no-drafts") == 0
    assert "imatrix" in next(line for line in capsys.readouterr().out.splitlines() if name in line)


def test_importance_that_ds4_collected(
    tiny: Path, q2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, path, out = tmp_path / "text.jsonl", tmp_path / "tiny.dat", tmp_path / "m.gguf"
    questions = [f"What is {a} + {a + 7}?" for a in range(11, 40, 4)]
    lines = [json.dumps({"messages": [{"role": "user", "content": question}]}) for question in questions]
    text.write_text("\n".join(lines), encoding="utf-8")
    assert ds4_main(["-m", str(q2), "--imatrix-dataset", str(text), "--imatrix-out", str(path)]) == 0
    assert run(tiny, "--out", out, "--imatrix", path, "--no-drafts") == 0
    assert "importance for 18 tensors" in capsys.readouterr().err
    before, after = (weighted(file, path, tiny, capsys) for file in (q2, out))
    assert len(before) == 12
    assert all(new < old for new, old in zip(after, before, strict=True))
    assert "12 + 30 = 42" in greedy(out, "What is 12 + 30?")


def weighted(file: Path, imatrix: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """The weighted error of gate and up of every layer."""
    flags = ("--imatrix", imatrix, "--no-drafts")
    assert run(folder, "--out", file, *flags, "--compare-tensor", "blk.*.ffn_[gu]*_exps.weight") == 0
    return [float(line.split("│")[8]) for line in capsys.readouterr().out.splitlines() if "_exps" in line]


def test_dry_run_writes_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(tiny, "--dry-run", "-j", 3) == 0
    text = capsys.readouterr().out
    assert "tiny-q2.gguf (profile tiny)" in text
    assert "tiny-q2-mtp.gguf (profile tiny, drafts)" in text
    assert re.search(r"gate +│ IQ2_XXS │ +6 │ +3,145,728 │ +811,008 │ +2.06", text)
    assert re.search(r"file +│ +│ +178 │ +18,564,249 │", text)
    assert "(3 jobs, 24.0 MiB for the largest unit, --memory-gib 8)" in text
    assert re.search(r"memory: [\d.]+ [MG]iB for program, tables and importance; at most 72.0 MiB for the units", text)
    assert list(tmp_path.iterdir()) == []


def test_dry_run_says_the_size_of_the_file(tiny: Path, q2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--dry-run", "--out", q2) == 0
    text = capsys.readouterr().out
    assert f"{q2.stat().st_size:,}" in text
    assert f"{q2.with_name('q2-mtp.gguf').stat().st_size:,}" in text


def test_compare_tensors(tiny: Path, q2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--out", q2, "--compare-tensor", "blk.0.ffn_*_exps.weight") == 0
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "exps" in line]
    assert [line[1].strip() for line in lines] == [f"blk.0.ffn_{kind}_exps.weight" for kind in ("gate", "up", "down")]
    for line in lines:
        assert 0.05 < float(line[7]) < 0.3
    assert run(tiny, "--out", q2, "--compare-tensor", "*tid2eid*") == 0
    assert capsys.readouterr().out.count("0.000e+00") == 4
    assert run(tiny, "--out", q2, "--compare-tensor", "mtp.0.e_proj.weight") == 0
    assert "Q8_0" in capsys.readouterr().out


def said(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    lines = [line for line in captured.err.splitlines() if line.startswith("ds4-quantize: ")]
    assert len(lines) == 1, captured.err
    return lines[0]


def test_an_existing_file_is_not_replaced_unless_told(
    toy: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.gguf"
    out.write_bytes(b"precious")
    assert run(toy(), "--out", out, "-r", "q4") == 1
    assert "exists; give another --out, or --force" in said(capsys)
    assert out.read_bytes() == b"precious"
    assert run(toy(), "--out", out, "-r", "q4", "--force") == 0
    assert open_model(out).shape.name == "custom"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_link_stays_a_link(toy: Make, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(tmp_path / "real.gguf")
    assert run(toy(), "--out", tmp_path / "link.gguf", "-r", "q4") == 0
    assert (tmp_path / "link.gguf").is_symlink()
    assert open_model(tmp_path / "real.gguf").shape.name == "custom"


def test_bad_input_ends_with_one_line_and_no_file(
    toy: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    file = out / "m.gguf"
    whole = toy()

    def refused(*args: object) -> str:
        assert run(*args) == 1
        assert list(out.iterdir()) == []
        return said(capsys)

    assert "not a folder" in refused(tmp_path / "none", "--out", file)
    assert "is a directory" in refused(whole, "--out", out)
    assert "no such folder; make it first" in refused(whole, "--out", tmp_path / "x" / "m.gguf")
    assert "no family 'x'" in refused(whole, "--out", file, "--override", "x=Q4_K")
    assert "--compare-tensor" in refused(whole, "--out", embedded_model_path(), "--compare-tensor", "nothing")
    assert "no such file; make it first" in refused(whole, "--out", file, "--compare-tensor", "output.weight")
    assert "it is of another model" in refused(whole, "--out", embedded_model_path(), "--compare-tensor", "*exps*")
    assert "cannot be read" in refused(whole, "--out", file, "--imatrix", tmp_path / "none.dat")
    Imatrix({"blk.99.ffn_up_exps.weight": np.ones((3, 256), np.float32)}).save(tmp_path / "other.dat")
    assert "no vectors for a tensor of this model" in refused(whole, "--out", file, "--imatrix", tmp_path / "other.dat")
    Imatrix({"blk.1.ffn_up_exps.weight": np.ones((4, 256), np.float32)}).save(tmp_path / "wrong.dat")
    assert "are [1, 1024], expected [3, 256]" in refused(whole, "--out", file, "--imatrix", tmp_path / "wrong.dat")
    for name, message in (
        ("tokenizer.json", "tokenizer.json: cannot be read"),
        ("config.json", "config.json: cannot be read"),
        ("model-00002-of-00003.safetensors", f"missing, {INDEX} says"),
    ):
        folder = copy_of(whole, tmp_path / f"without-{name}")
        (folder / name).unlink()
        assert message in refused(folder, "--out", file)


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda:99", "device 'cuda:99' is not available"), ("tpu", "use auto, cpu, cuda"), ("meta", "use auto, cpu, cuda")],
)
def test_devices_that_are_not_there(
    toy: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, message: str
) -> None:
    assert run(toy(), "--out", tmp_path / "m.gguf", "--device", device) == 1
    assert message in said(capsys)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: CHECKPOINT"),
        (["c"], "--out is missing"),
        (["c", "--out", "x", "--recipe", "q3"], "invalid choice: 'q3'"),
        (["c", "--out", "x", "--jobs", "0"], "'0' is not a whole number from 1 to 1024"),
        (["c", "--out", "x", "--memory-gib", "no"], "is not a number from 0.01 on"),
        (["c", "--out", "x", "--last-layers", "3"], "--last-layers belongs to --recipe q2-q4"),
        (["c", "--dry-run", "--compare-tensor", "x"], "cannot run together"),
        (["c", "--out", "x", "--rec", "q4"], "unrecognized arguments"),
    ],
)
def test_wrong_flags(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert message in capsys.readouterr().err


def test_help_needs_nothing_heavy() -> None:
    code = "import sys; from ds4.quantize.main import main; main(['--help']); print(sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "CHECKPOINT" in result.stdout
    assert "'torch'" not in result.stdout
    assert "'rich'" not in result.stdout


def test_flags_as_values() -> None:
    options = parse(
        ["c", "-o", "x.gguf", "-r", "q2-q4", "--last-layers", "2", "--override", "down=Q4_K",
         "--override", "output=F16", "-j", "7", "--memory-gib", "2.5", "--name", "n", "--no-drafts",
         "--skip", "vision.*", "--device", "cpu"]
    )  # fmt: skip
    assert options.overrides == ("down=Q4_K", "output=F16")
    assert (options.recipe, options.last_layers, options.jobs, options.memory_gib) == ("q2-q4", 2, 7, 2.5)
    assert (options.drafts, options.skip, options.out) == (False, ("vision.*",), Path("x.gguf"))
    assert next(a for a in build_parser()._actions if a.dest == "recipe").choices == tuple(EXPERTS)


def test_ctrl_c_keeps_the_work(
    toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ds4.quantize import convert as conversion

    original, count, noticed = conversion.encode_unit, 0, threading.Event()

    def interrupting(*args: object) -> object:
        nonlocal count
        count += 1
        if count == 30:
            # To the thread that waits, as a terminal's would go, and not on before it has noticed.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert noticed.wait(60)
        return original(*args)  # type: ignore[arg-type]

    def notice(number: int, frame: object) -> None:
        noticed.set()
        raise KeyboardInterrupt

    out = tmp_path / "m.gguf"
    before = signal.signal(signal.SIGINT, notice)
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "encode_unit", interrupting)
        code = run(toy(), "--out", out, "-r", "q4", "-j", 1)
    signal.signal(signal.SIGINT, before)
    assert code == 130
    assert "interrupted; the same command goes on where it stopped" in said(capsys)
    assert not out.exists()
    assert run(toy(), "--out", out, "-r", "q4", "-j", 1) == 0
    assert re.search(r"m.gguf.part: \d+ of \d+ pieces are there from an earlier run", capsys.readouterr().err)
    assert out.exists()


def test_a_disk_error_is_one_line(
    toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fdatasync", failing)
    assert run(toy(), "--out", tmp_path / "m.gguf", "-r", "q4") == 1
    ending = "m.gguf.part: Input/output error; when that is mended, the same command goes on where it stopped"
    assert said(capsys) == f"ds4-quantize: {tmp_path}/{ending}"


def test_a_full_folder_for_temporary_files_is_named(
    toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")  # as a write says it, without a name

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("gguf.GGUFWriter.write_kv_data_to_file", full)
    assert run(toy(), "--out", tmp_path / "m.gguf") == 1
    text = said(capsys)
    assert f"ds4-quantize: {tmp_path}/tmp" in text
    assert "header: No space left on device" in text
    assert list(tmp_path.iterdir()) == []


def test_matrices_that_mxfp4_rounds_are_counted(toy: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(toy(), "--dry-run", "-r", "mxfp4") == 0
    assert "rounded" not in capsys.readouterr().err
    assert run(toy(), "--dry-run", "-r", "mxfp4", "--override", "shared=MXFP4") == 0
    assert "MXFP4: 9 of 36 matrices are not FP4 in the checkpoint and are rounded" in capsys.readouterr().err
    assert run(toy("bf16"), "--dry-run", "-r", "mxfp4") == 0
    assert "MXFP4: 27 of 27 matrices" in capsys.readouterr().err


def test_progress_on_a_terminal_and_in_a_log() -> None:
    terminal = io.StringIO()
    with progress(100, Console(file=terminal, force_terminal=True, width=120)) as advance:
        advance(40, True)
        advance(60, False)
    assert "100%" in terminal.getvalue()
    log = io.StringIO()
    with progress(100, Console(file=log, width=120)) as advance:
        for _ in range(100):
            advance(1, False)
    lines = log.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("10 %, ")
    assert lines[4].endswith("s left")
    assert lines[9].startswith("100 %, ")
    log = io.StringIO()
    with progress(100, Console(file=log, width=120)) as advance:
        advance(40, True)  # found, which is no speed
        advance(60, False)
    assert [line.split(",")[0] for line in log.getvalue().splitlines()] == ["100 %"]


def test_the_command_is_installed() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'ds4-quantize = "{command.__name__}:main"' in text


def test_inputs_are_never_replaced(toy: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even with --force, nor under the name of a link."""
    folder = copy_of(toy(), tmp_path / "c")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    (tmp_path / "link.gguf").symlink_to(folder / "model-00002-of-00003.safetensors")
    Imatrix({"blk.1.ffn_up_exps.weight": np.ones((3, 256), np.float32)}).save(tmp_path / "i.dat")
    for out, more in (
        (folder / "model-00001-of-00003.safetensors", ()),
        (tmp_path / "link.gguf", ()),
        (folder / INDEX, ()),
        (tmp_path / "i.dat", ("--imatrix", tmp_path / "i.dat")),
    ):
        assert run(folder, "--out", out, "--force", *more) == 1
        assert "which would be replaced; give another file to write" in said(capsys)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_folder_in_the_place_of_the_drafts(toy: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Told before the work, not after hours of it."""
    (tmp_path / "m-mtp.gguf").mkdir()
    assert run(toy(drafts="mtp"), "--out", tmp_path / "m.gguf", "--force") == 1
    assert "m-mtp.gguf: cannot be written: it is a directory" in said(capsys)
    assert [file.name for file in tmp_path.iterdir()] == ["m-mtp.gguf"]


def test_names_that_are_no_text(toy: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(toy(), "--dry-run", "--name", "a\udcff") == 2
    assert "argument --name: this is not UTF-8 text" in capsys.readouterr().err
    (tmp_path / "loop").symlink_to("loop")
    assert run(tmp_path / "loop", "--dry-run") == 1
    assert "not a folder" in said(capsys)


def test_importance_of_another_model_is_told(toy: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some of it fits by name and size; what does not is said."""
    vector = np.ones((3, 256), np.float32)
    names = [f"blk.{n}.ffn_{m}_exps.weight" for n in (0, 1, 2) for m in ("down", "gate", "up")]
    Imatrix(dict.fromkeys((*names[:-3], "blk.9.ffn_up_exps.weight"), vector)).save(tmp_path / "other.dat")
    assert run(toy(), "--dry-run", "--imatrix", tmp_path / "other.dat") == 0
    text = capsys.readouterr().err
    assert "importance for 6 tensors" in text
    assert "none for 3 tensors of routed experts, such as blk.2.ffn_down_exps.weight" in text
    assert "1 entries are of no tensor of this model, such as 'blk.9.ffn_up_exps.weight'" in text
    Imatrix(dict.fromkeys(names, vector)).save(tmp_path / "all.dat")
    assert run(toy(), "--dry-run", "--imatrix", tmp_path / "all.dat") == 0
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert run(toy(), "--dry-run", "-r", "mxfp4", "--override", "down=Q2_K", "--imatrix", tmp_path / "all.dat") == 0
    text = capsys.readouterr().err
    assert "importance for 3 tensors" in text
    assert "it changes nothing in 6 tensors, which are MXFP4" in text
