"""The command from its arguments to its output and exit status."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import ds4
from ds4.cli import diagnostics
from ds4.cli.conversation import Conversation
from ds4.cli.main import answer_once, load_engine, main, prompt_ids, read_prompt
from ds4.cli.options import Options
from ds4.cli.prompt import Style
from ds4.engine import Engine
from ds4.process import exit_at_interrupt
from tests.cli.conftest import Screen
from tests.cli.scripted import scripted_engine
from tests.helpers import random_engine

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(embedded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command with the random model in place of the embedded one: status, stdout, stderr."""

    def command(*argv: str, stdin: io.StringIO | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", stdin or Screen())
        status = main(argv)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


@pytest.fixture
def say(engine: Engine, tokenizer: ds4.Tokenizer) -> Callable[..., Conversation]:
    def conversation(reply: str, mode: str = "high") -> Conversation:
        scripted = scripted_engine(engine.shape, tokenizer, reply)
        return Conversation(scripted, Style(mode=mode), ds4.Sampling(temperature=0))  # type: ignore[arg-type]

    return conversation


def test_a_pipe_gets_the_answer_and_stderr_the_thinking(say: Callable[..., Conversation]) -> None:
    out, err = io.StringIO(), io.StringIO()
    assert answer_once(say("hm</think>Four."), Options(), "2+2?", out, err) == 0
    assert out.getvalue() == "Four.\n"
    assert err.getvalue() == "hm\n"


def test_thinking_can_be_hidden(say: Callable[..., Conversation]) -> None:
    out, err = io.StringIO(), io.StringIO()
    answer_once(say("hm</think>Four."), Options(hide_thinking=True), "2+2?", out, err)
    assert (out.getvalue(), err.getvalue()) == ("Four.\n", "")


def test_a_terminal_gets_both_and_the_speed(say: Callable[..., Conversation]) -> None:
    out, err = Screen(), Screen()
    answer_once(say("hm</think>Four."), Options(), "2+2?", out, err)
    assert out.getvalue().endswith("\n\nFour.\n")
    assert err.getvalue().startswith("[prompt 8 tokens")


def test_a_prompt_answers_once(run: Run, engine: Engine) -> None:
    status, out, err = run("-p", "Hello", "-n", "6", "--temp", "0", "--nothink")
    session = engine.session()
    session.sync(engine.tokenizer.encode_chat(ds4.chat.render([{"role": "user", "content": "Hello"}], thinking=False)))
    text = b"".join(session.generate(ds4.Sampling(temperature=0), 6)).decode("utf-8", "replace")
    assert (status, out, err) == (0, text + "\n", "[cut off at 6 tokens; --tokens sets this limit]\n")


def test_an_answer_that_is_cut_off_is_followed_by_a_note(engine: Engine, tokenizer: ds4.Tokenizer) -> None:
    def err_of(max_tokens: int | None, context: int, reply: str = "word " * 50) -> str:
        scripted = scripted_engine(engine.shape, tokenizer, reply, context=context)
        talk = Conversation(scripted, Style(mode="none"), ds4.Sampling(temperature=0), max_tokens)
        out, err = io.StringIO(), io.StringIO()
        assert answer_once(talk, Options(max_tokens=max_tokens), "Hi", out, err) == 0
        return err.getvalue()

    assert err_of(3, 4096) == "[cut off at 3 tokens; --tokens sets this limit]\n"
    assert err_of(None, 20) == err_of(100, 20) == "[cut off: the context of 20 tokens is full; --ctx sets its size]\n"
    assert err_of(None, 4096) == err_of(3, 4096, "Ho") == ""


def test_a_context_above_the_models_is_lowered_with_a_warning(run: Run) -> None:
    flags = ("-p", "Hello", "-n", "0", "--nothink")
    assert "the model allows a context of 4096 tokens, so --ctx 4097 is lowered" in run(*flags, "-c", "4097")[2]
    assert "lowered" not in run(*flags, "-c", "4096")[2]


def test_an_empty_prompt_is_a_message(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for argv, text in (([], ""), ([], "\n"), (["--prompt-file", "-"], ""), (["--dump-tokens"], "")):
        status, out, err = run(*argv, stdin=io.StringIO(text))
        assert (status, out) == (1, "")
        assert "there is no prompt, standard input is empty" in err
    assert f"{tmp_path / 'empty'} is empty" in run("--prompt-file", str(tmp_path / "empty"))[2]


def test_standard_input_that_cannot_be_read_is_a_message(run: Run) -> None:
    class Broken(io.StringIO):
        def read(self, size: int | None = -1) -> str:
            raise OSError(5, "Input/output error")

    assert run(stdin=Broken())[::2] == (1, "ds4: standard input cannot be read: Input/output error\n")


def test_prompts_come_from_files_and_pipes(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("Hi \N{EURO SIGN}\xff\n\n".encode())
    pipe = io.StringIO("from a pipe\n")
    assert read_prompt(Options(prompt_file=str(path)), Screen()) == "Hi €ÿ\n"
    assert read_prompt(Options(prompt_file=str(path), raw_prompt=True), Screen()) == "Hi €ÿ\n\n"
    assert read_prompt(Options(), pipe) == "from a pipe"
    assert read_prompt(Options(prompt_file="-"), Screen("typed\n")) == "typed"
    assert read_prompt(Options(prompt="given"), pipe) == "given"
    assert read_prompt(Options(), Screen()) is None


def test_a_pipe_without_flags_is_the_prompt(run: Run) -> None:
    flags = ("-n", "3", "--temp", "0", "--hide-thinking", "--nothink")
    assert run(*flags, stdin=io.StringIO("Hello\n")) == run(*flags, "-p", "Hello")


def test_prompt_ids_follow_the_flags(tokenizer: ds4.Tokenizer) -> None:
    def text(prompt: str, context: int = 4096, **flags: object) -> str:
        return tokenizer.decode(prompt_ids(tokenizer, prompt, Options(**flags), context)).decode()  # type: ignore[arg-type]

    bos = "<｜begin▁of▁sentence｜>"
    assert text("Hi") == f"{bos}<｜User｜>Hi<｜Assistant｜><think>"
    assert text("Hi", mode="none", system="Be brief.") == f"{bos}Be brief.<｜User｜>Hi<｜Assistant｜></think>"
    assert text("Hi", mode="max") == text("Hi")
    assert text("Hi", mode="max", context=500_000).startswith(f"{bos}Reasoning Effort: ")
    assert text("Hi", raw_prompt=True) == "Hi"
    # A marker in a raw prompt is one; in a question it is text.
    assert prompt_ids(tokenizer, "<｜User｜>", Options(raw_prompt=True), 4096) == [tokenizer.user]
    assert prompt_ids(tokenizer, "<｜User｜>", Options(), 4096).count(tokenizer.user) == 1


def test_dump_tokens(run: Run, tokenizer: ds4.Tokenizer) -> None:
    status, out, _ = run("-p", "Hello", "--dump-tokens", "--nothink")
    ids = [int(line.split()[1]) for line in out.splitlines()]
    rendered = ds4.chat.render([{"role": "user", "content": "Hello"}], thinking=False)
    assert (status, ids) == (0, tokenizer.encode_chat(rendered))


def test_a_file_without_a_tokenizer_is_not_called_damaged(run: Run, tmp_path: Path) -> None:
    random_engine(qat_sim=False).save_gguf(tmp_path / "mute.gguf")
    for more in (["--dump-tokens"], []):
        status, out, err = run("-m", str(tmp_path / "mute.gguf"), "-p", "Hello", *more)
        assert (status, out) == (1, "")
        assert "no tokenizer" in err
        assert "damaged" not in err


def test_dump_logits_and_consistency(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "logits.npz"
    assert run("-p", "Hello", "--dump-logits", str(path))[0] == 0
    with np.load(path) as stored:
        assert stored["logits"].shape == (4096,)
    status, out, _ = run("-p", "Hello", "--decode-consistency", "3")
    assert (status, out) == (0, "4 positions, largest difference between decode and prefill: 0\n")


@pytest.mark.parametrize("flag", ["--dump-logits", "--dump-logprobs"])
def test_a_file_that_cannot_be_written_is_told_before_the_prompt_is_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr("ds4.cli.main.load_engine", None)
    status, _, err = run("-p", "Hello", flag, str(tmp_path / "nowhere" / "x"))
    assert (status, "no such folder; make it first" in err) == (1, True)


def test_a_decode_that_differs_is_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "decode_consistency", lambda *_: (4, 0.25))
    status, out, _ = run("-p", "Hello", "--decode-consistency", "3")
    assert (status, out) == (1, "4 positions, largest difference between decode and prefill: 0.25\n")


def test_dump_logprobs_takes_its_length_from_tokens(run: Run) -> None:
    status, out, _ = run("-p", "Hello", "--dump-logprobs", "-", "-n", "2", "--logprobs-top-k", "1")
    assert status == 0
    assert out.count('"selected"') == 2


@pytest.mark.parametrize("flags", [["--dump-tokens"], ["--dump-logits", "x"], ["--decode-consistency", "1"]])
def test_diagnostics_need_a_prompt(flags: list[str], run: Run) -> None:
    status, out, err = run(*flags)
    assert (status, out) == (2, "")
    assert "needs a prompt" in err


def test_inspect(run: Run, model_file: Path) -> None:
    for flags in (["--inspect", str(model_file)], ["-m", str(model_file), "--inspect"], ["--inspect"]):
        status, out, _ = run(*flags)
        assert status == 0
        assert "usable" in out


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["-p", "x", "-m", "/nowhere/x.gguf"], "/nowhere/x.gguf"),
        (["-p", "x", "-m", __file__], "test_main.py"),
        (["-p", "x", "-m", __file__, "--dump-tokens"], "test_main.py"),
        (["--prompt-file", "~nosuchuser/x"], "~nosuchuser/x: cannot be read: there is no such user"),
        (["--prompt-file", "/nowhere/x"], "/nowhere/x: cannot be read: No such file or directory"),
        (["-p", "word " * 100, "-c", "16"], "but the configured context size is 16 tokens"),
    ],
)
def test_mistakes_get_one_line_and_status_1(argv: list[str], part: str, run: Run) -> None:
    status, out, err = run(*argv)
    assert (status, out) == (1, "")
    assert err.startswith("ds4: ")
    assert part in err
    assert "Traceback" not in err


def test_wrong_flags_get_status_2(run: Run) -> None:
    assert run("--mtp", "x")[0] == run("--nonsense")[0] == 2


def test_small_models_use_one_thread_unless_told(model_file: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        load_engine(Options(model=str(model_file)))
        assert torch.get_num_threads() == 1
        load_engine(Options(model=str(model_file), threads=3))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_kernels_are_compiled_at_the_start_unless_told(model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr("ds4.engine.Engine.warm_up", lambda engine, progress: compiled.append(progress))
    load_engine(Options(model=str(model_file), warmup=False))
    assert not compiled
    load_engine(Options(model=str(model_file)))
    assert len(compiled) == 1


def test_the_layout_of_the_experts_is_passed_on(model_file: Path) -> None:
    assert load_engine(Options(model=str(model_file))).config.expert_layout == "b"
    engine = load_engine(Options(model=str(model_file), expert_layout="a"))
    assert engine.config.expert_layout == "a"
    assert engine.expert_layout is None  # the CPU has no choice


def test_the_installed_command_answers(model_file: Path) -> None:
    command = [str(Path(sys.executable).with_name("ds4")), "-m", str(model_file), "-n", "4", "--seed", "1", "-p", "Hi"]
    first, second = (subprocess.run(command, capture_output=True, timeout=200) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stderr  # the random model does not leave its thinking
    assert (first.stdout, first.stderr) == (second.stdout, second.stderr)


def test_a_reader_that_goes_away_is_no_error_of_ours(model_file: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ds4.cli.main", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=200)
    os.close(write)
    assert done.stderr == ""


def shell(redirections: str, *argv: object) -> subprocess.CompletedProcess[str]:
    """Run the command from a shell with these redirections."""
    command = [sys.executable, "-m", "ds4.cli.main", *map(str, argv)]
    script = f'exec "$@" {redirections}'
    # Unbuffered output fails where it is written, buffered output when the process ends.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(["sh", "-c", script, "sh", *command], capture_output=True, text=True, timeout=200, env=env)


@pytest.mark.parametrize(
    "argv", [["-p", "Hi", "-n", "2", "--nothink"], ["-p", "Hi", "--dump-tokens"], ["--inspect"], ["--help"]]
)
def test_output_that_cannot_be_written_is_a_message(argv: list[str], model_file: Path) -> None:
    done = shell("> /dev/full", "-m", model_file, *argv)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ds4: the output cannot be written: No space left on device"
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_errors_that_cannot_be_written_keep_their_status(model_file: Path) -> None:
    done = shell("2> /dev/full", "-m", "/nowhere", "-p", "Hi", "--dump-tokens")
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("argv", [["-p", "Hi", "-n", "2", "--nothink"], ["-p", "Hi", "--dump-tokens"], ["--help"]])
def test_streams_may_be_closed(closed: str, argv: list[str], model_file: Path) -> None:
    done = shell(closed, "-m", model_file, *argv)
    assert done.returncode == 0
    assert "Error" not in done.stderr
    assert bool(done.stdout) == (" >&-" not in f" {closed}")


def test_a_closed_standard_input_is_an_empty_one(model_file: Path) -> None:
    done = shell("<&-", "-m", model_file)
    assert (done.returncode, done.stdout) == (1, "")
    assert "standard input is empty" in done.stderr
    done = shell("2>&- <&-", "-m", model_file)
    assert (done.returncode, done.stdout) == (1, "")


def test_input_that_is_no_utf8_is_read_all_the_same(model_file: Path) -> None:
    command = [sys.executable, "-m", "ds4.cli.main", "-m", str(model_file), "--dump-tokens"]
    env = {**os.environ, "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, input=b"a\xff", capture_output=True, env=env, timeout=200)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "\ufffd" in done.stdout.decode()


@pytest.mark.parametrize(
    ("step", "argv"),
    [
        *(("load", argv) for argv in (["-p", "Hi"], ["-p", "Hi", "--dump-tokens"], ["--inspect"])),
        *(("numpy", argv) for argv in (["-p", "Hi"], ["-p", "Hi", "--dump-logits", "x"], ["--inspect"])),
        ("torch", ["-p", "Hi"]),
    ],
)
def test_ctrl_c_while_the_model_loads_is_status_130_and_never_an_exception(
    step: str, argv: list[str], tmp_path: Path
) -> None:
    program = """
import signal, sys
from ds4.cli import main
def interrupted(*_):
    try: signal.raise_signal(signal.SIGINT)
    except BaseException: print("swallowed")
class Finder:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]: interrupted()
if sys.argv[1] == "load":
    main.load_engine = main.model_path = interrupted
sys.meta_path.insert(0, Finder())
main.main(sys.argv[2:])
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", program, step, *argv], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_afterwards_ctrl_c_is_an_exception_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with exit_at_interrupt():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
