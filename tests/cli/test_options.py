"""The flags of `ds4`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds4.cli.options import COMMANDS, NOT_BUILT, TOPICS, Options, build_parser, parse


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse(argv)
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ds4: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_without_flags_everything_is_the_default() -> None:
    assert parse([]) == Options()


def test_every_flag_arrives() -> None:
    argv = (
        "-m a.gguf -c 100 -n 5 -t 2 --prefill-chunk 64 --temp 0.5 --top-p 0.9 --min-p 0 --top-k 40 --seed 7 --nothink"
        " -sys Hi -p Ask --template ds4 --hide-thinking --quality --no-warmup --dump-logprobs out --logprobs-top-k 3"
        " --expert-layout b"
    )
    assert parse(argv.split()) == Options(
        model="a.gguf", context=100, max_tokens=5, threads=2, prefill_chunk=64, temperature=0.5, top_p=0.9, min_p=0.0,
        top_k=40, seed=7, mode="none", system="Hi", prompt="Ask", template="ds4", hide_thinking=True, quality=True,
        warmup=False, dump_logprobs="out", logprobs_top_k=3, expert_layout="b",
    )  # fmt: skip


def test_flags_that_need_another_one_are_refused_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--logprobs-top-k belongs to --dump-logprobs" in refusal(capsys, "-p", "Hi", "--logprobs-top-k", "20")
    assert parse(["--dump-logprobs", "x"]).logprobs_top_k == 20


def test_the_number_of_threads_has_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["-t", "1024"]).threads == 1024
    for number in ("0", "1025", "100000", "9" * 5000):
        assert "is not a whole number from 1 to 1024" in refusal(capsys, "--threads", number)


def test_long_names_mean_the_same() -> None:
    short = parse(["-m", "a", "-c", "9", "-n", "5", "-t", "2", "-sys", "S", "-p", "P", "--think"])
    long = parse(["--model=a", "--ctx=9", "--tokens=5", "--threads=2", "--system=S", "--prompt=P"])
    assert short == long


@pytest.mark.parametrize(("flag", "mode"), [("--think", "high"), ("--think-max", "max"), ("--nothink", "none")])
def test_modes(flag: str, mode: str) -> None:
    assert parse([flag]).mode == mode


def test_the_last_mode_counts() -> None:
    assert parse(["--nothink", "--think-max"]).mode == "max"


def test_inspect_takes_a_file_or_that_of_model() -> None:
    assert parse(["--inspect", "a.gguf"]).inspect == "a.gguf"
    assert parse(["-m", "a.gguf", "--inspect"]).inspect == ""
    assert parse(["-m", "a.gguf"]).inspect is None


def test_seed_zero_is_random() -> None:
    assert parse(["--seed", "0"]).seed is None


def test_prompts_may_begin_with_a_dash() -> None:
    assert parse(["-p", "-5 + 3?"]).prompt == "-5 + 3?"
    assert parse(["-p", "-5"]).prompt == "-5"
    assert parse(["--prompt=--mtp"]).prompt == "--mtp"


@pytest.mark.parametrize("flag", [flag for flags in NOT_BUILT.values() for flag in flags])
def test_flags_not_built_are_refused_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "-p", "Hi", flag, "1").startswith(f"ds4: {flag} is not built yet")
    assert flag not in _help(capsys)


def test_other_backends_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the backend metal is not built yet" in refusal(capsys, "--backend", "metal")
    assert "'x' is not a backend" in refusal(capsys, "--backend", "x")
    assert "'cuda:' is not a device; use auto, cpu, cuda or cuda:N" in refusal(capsys, "--device", "cuda:")


def test_names_of_the_device() -> None:
    assert parse([]).device == "auto"
    assert parse(["--backend", "cpu"]).device == parse(["--cpu"]).device == parse(["--device=cpu"]).device == "cpu"
    assert parse(["--cuda"]) == parse(["--backend", "cuda"]) == Options(device="cuda")
    assert parse(["--cpu", "--device", "cuda:3"]).device == "cuda:3"


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--plan", "-c", "100", "--sessions", "4", "--cards", "141,96,24.5"]) == Options(
        plan=True, context=100, sessions=4, cards=(141, 96, 24.5)
    )
    assert "--cards belongs to --plan" in refusal(capsys, "--cards", "24")
    for text in ("", "24,", "a", "0", "inf"):
        assert "is not a list of sizes in GB" in refusal(capsys, "--plan", "--cards", text)
    assert "--inspect and --plan cannot run together" in refusal(capsys, "--plan", "--inspect")


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ("--frobnicate", "--frobnicate"),
        ("Hello", "Hello"),
        ("--mod x", "--mod"),
        ("-n", "expected one argument"),
        ("--expert-layout c", "'c' is not a layout of the experts; use auto, a or b"),
        ("-n -1", "'-1' is not a whole number from 0 on"),
        ("-n 1.5", "'1.5' is not a whole number"),
        ("-c 0", "from 1 on"),
        ("-t 0", "from 1 to 1024"),
        ("--temp -1", "not a number from 0 on"),
        ("--temp nan", "not a number from 0 on"),
        ("--temp inf", "not a number from 0 on"),
        ("--top-p 1.01", "not a number from 0 to 1"),
        ("--min-p x", "not a number from 0 to 1"),
        ("--top-k -1", "not a whole number from 0 on"),
        ("--seed -3", "not a whole number from 0"),
        ("--seed 9223372036854775808", "not a whole number from 0"),
        ("--template x", "use official or ds4"),
        ("-p a --prompt-file b", "given both"),
        ("--raw-prompt -sys a", "no place in a raw prompt"),
        ("--dump-tokens --dump-logits x", "--dump-tokens and --dump-logits cannot run together"),
        ("--dump-tokens --inspect", "--inspect and --dump-tokens cannot run together"),
        ("--bench --ctx-start 9", "--bench is a command of its own now: ds4-bench"),
        ("-p a --dump-logits -", "writes binary numbers; give the name of a file"),
        ("--help nonsense", "no help topic 'nonsense'"),
    ],
)
def test_what_cannot_be_used_is_refused(argv: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in refusal(capsys, *argv.split())


def test_an_empty_file_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [action.option_strings[-1] for action in build_parser()._actions if action.metavar == "FILE"]
    assert len(flags) == 8
    for flag in ("-m", *flags):
        assert f"{flag}: the name of the file is empty" in refusal(capsys, flag, "").replace("-m/--model", flag)
    assert "'' is not a backend; use cpu" in refusal(capsys, "--backend", "")


def _help(capsys: pytest.CaptureFixture[str], *topic: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse(["--help", *topic])
    assert not end.value.code
    return capsys.readouterr().out


def test_help_lists_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = _help(capsys)
    for part in (*TOPICS.values(), *COMMANDS, "--decode-consistency N", "-m FILE, --model FILE"):
        assert part in text


@pytest.mark.parametrize("topic", TOPICS)
def test_help_topics_print_their_part(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = _help(capsys, topic)
    assert TOPICS[topic] in text
    assert sum(title in text for title in TOPICS.values()) == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--version"])
    assert not end.value.code
    assert capsys.readouterr().out.startswith("ds4 0.")


def test_flags_help_and_inspect_load_nothing_heavy(model_file: Path) -> None:
    program = f"""
import sys
from ds4.cli.main import main
assert main(["--help"]) == 0
assert main(["--mtp", "x"]) == 2
assert main(["-n", "x"]) == 2
assert main(["--inspect", {str(model_file)!r}]) == 0
assert main(["-m", {str(model_file)!r}, "-p", "Hi", "--dump-tokens"]) == 0
heavy = {{"torch", "fastapi", "prompt_toolkit", "transformers", "uvicorn", "pydantic"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
