"""The command line: what it fills, what it refuses, and that it is quick about it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

import ds4
from ds4.cli.options import build_parser as cli_parser
from ds4.errors import Ds4Error
from ds4.server.config import NOT_BUILT, OF_DS4, TOPICS, ServerConfig, build_parser, parse_args
from ds4.server.main import main


def test_defaults_are_those_of_the_documentation() -> None:
    config = parse_args([])
    assert config == ServerConfig()
    assert (config.host, config.port, config.ctx, config.max_tokens) == ("127.0.0.1", 8000, 32768, 393216)
    assert (config.max_queue, config.tool_memory_max_ids, config.safe_client_text) == (1024, 100_000, True)


def test_every_flag_reaches_the_configuration() -> None:
    flags = (
        "-m m.gguf --host 0.0.0.0 --port 1 -c 100 -n 7 -t 2 --prefill-chunk 32 --checkpoint-mb 5 --template ds4"
        " --effort-profile 0731 --think-default off --cors --trace t --scripted s --scripted-kv-bytes-per-token 3"
        " --max-queue 4 --max-sessions 2 --no-safe-client-text --no-think-recovery --disable-exact-dsml-tool-replay"
        " --tool-memory-max-ids 9 --chdir /tmp --device cuda:1 --raw-completions --api-key one --api-key=-two"
        " --quality --no-warmup --api-key-file keys --request-timeout 1.5 --step-timeout 2 --expert-layout a"
    )
    config = parse_args(flags.split())
    assert config == ServerConfig(
        model=Path("m.gguf"), host="0.0.0.0", port=1, device="cuda:1", quality=True, warmup=False, ctx=100,
        max_tokens=7, threads=2, prefill_chunk=32, checkpoint_mb=5, template="ds4", effort_profile="0731",
        think_default=False, cors=True, trace=Path("t"), scripted=Path("s"), scripted_kv_bytes=3, max_queue=4,
        max_sessions=2, safe_client_text=False, think_recovery=False, replay=False, tool_memory_max_ids=9,
        chdir=Path("/tmp"), raw_completions=True, expert_layout="a",
        api_keys=("one", "-two"), api_key_file=Path("keys"), request_timeout=1.5, step_timeout=2.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vision", "x"], "--vision is not built yet in this version"),
        (["--mtp=draft.gguf"], "--mtp is not built yet"),
        (["--rocm"], "--rocm is not built yet"),
        (["--device", "gpu"], "'gpu' is not a device; use auto, cpu, cuda or cuda:N"),
        (["--device", "cuda:x"], "'cuda:x' is not a device"),
        (["--expert-layout", "c"], "argument --expert-layout: invalid choice: 'c' (choose from"),
        (["--api-key", ""], "the API key is empty"),
        (["--api-key", "good", "--api-key", "hush hush"], "the API key has a space or a character that is not ASCII"),
        (["--api-key", "hushé"], "the API key has a space"),
        (["--api-key", "hush\n"], "the API key has a space"),
        (["--api-key"], "argument --api-key: expected one argument"),
        (["--api-key", "hush", "--ctx", "0"], "ctx is 0"),
        (["--api-key-file", ""], "the name is empty"),
        (["--max-queue", "-1"], "--max-queue is -1"),
        (["--max-sessions", "0"], "--max-sessions is 0"),
        (["--request-timeout", "-1"], "--request-timeout is -1.0"),
        (["--step-timeout", "inf"], "--step-timeout is inf"),
        (["--backend", "rocm"], "the backend rocm is not built yet"),
        (["--frobnicate"], "--frobnicate"),
        (["--ctx", "many"], "many"),
        (["--ctx", "0"], "ctx is 0"),
        (["--port", "70000"], "port is 70000"),
        (["--template", "x"], "template"),
        (["--por", "1"], "--por"),
        (["stray"], "stray"),
        (["--host", ""], "host is empty"),
        (["--host", " "], "host is empty"),
        (["-t", "1025"], "threads is 1025, but must be at most 1024"),
        (["--threads", "100000"], "threads is 100000"),
        (["-t", "0"], "threads is 0"),
        (["-m", ""], "the name is empty"),
        (["--chdir", ""], "the name is empty"),
        (["--trace="], "the name is empty"),
        (["--scripted", ""], "the name is empty"),
        (["--backend", ""], "'' is not a backend; use cpu, cuda or auto"),
        (["--help", "nonsense"], "no help topic 'nonsense'; topics: model, chat, kv-cache, server, testing"),
        (["--plan"], "--plan is a flag of ds4"),
        (["--dump-logits", "x"], "--dump-logits is a flag of ds4"),
        (["--decode-consistency=3"], "--decode-consistency is a flag of ds4"),
    ],
)
def test_wrong_flags_end_with_a_message_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert "hush" not in said


def test_the_key_of_the_environment_counts_if_the_command_line_names_none() -> None:
    assert parse_args([], "sk-environment").api_keys == ("sk-environment",)
    assert parse_args(["--api-key", "one"], "sk-environment").api_keys == ("one",)
    assert parse_args(["--api-key-file", "keys"], "sk-environment").api_keys == ()
    assert parse_args([]).api_keys == ()


def test_the_command_takes_the_key_of_its_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # An empty one ends the command before it does anything.
    monkeypatch.setenv("DS4_API_KEY", "")
    with pytest.raises(SystemExit) as caught:
        main(["--port", "0"])
    assert caught.value.code == 2
    assert "DS4_API_KEY: the API key is empty" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", "hush hush", "hush\n"])
def test_a_key_of_the_environment_that_is_none_is_refused(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args([], key)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "DS4_API_KEY: the API key" in said
    assert "hush" not in said


def test_help_shows_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--api-key", "hush2", "--help"], "hush")
    assert "hush" not in capsys.readouterr().out
    config = parse_args([], "hush")
    assert config.api_keys == ("hush",)
    assert "hush" not in repr(config)


def test_names_of_the_device() -> None:
    assert parse_args([]).device == "auto"
    assert parse_args(["--backend", "cuda"]).device == parse_args(["--cuda"]).device == "cuda"
    assert parse_args(["--cpu", "--device", "cuda:2"]).device == "cuda:2"
    assert parse_args(["--device", "cuda", "--cpu"]).device == "cpu"


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions if action.help != argparse.SUPPRESS for flag in action.option_strings}


def test_no_flag_is_both_built_and_refused() -> None:
    built = flags_of(build_parser())
    assert not built & NOT_BUILT
    assert not (built | NOT_BUILT) & OF_DS4


def test_every_flag_of_the_other_command_is_told_from_an_unknown_one() -> None:
    assert flags_of(cli_parser()) - flags_of(build_parser()) == OF_DS4


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--version"])
    assert not caught.value.code
    assert capsys.readouterr().out == f"ds4-server {ds4.__version__}\n"


@pytest.mark.parametrize("topic", TOPICS)
def test_help_topics_print_their_part(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help", topic])
    assert not caught.value.code
    text = capsys.readouterr().out
    assert [title for title in TOPICS.values() if f"{title}:\n" in text] == [TOPICS[topic]]
    assert "--" in text


def test_help_and_mistakes_import_nothing_heavy() -> None:
    code = (
        "import sys; from ds4.server.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as e: print(e.code, [m for m in ('torch', 'fastapi', 'numpy', 'rich') if m in sys.modules])"
    )
    for arguments, status in ((["--help"], 0), (["--mtp", "x"], 2)):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == f"{status} []"


def test_impossible_values_are_refused_by_the_flag_that_sets_them() -> None:
    """In code too, where whoever reads it knows the attribute as well."""
    flags = {flag: action.dest for action in build_parser()._actions for flag in action.option_strings}
    for values in (
        {"ctx": 0},
        {"max_tokens": -1},
        {"max_sessions": 0},
        {"max_queue": -1},
        {"threads": 0},
        {"threads": 1025},
        {"prefill_chunk": 0},
        {"request_timeout": -1},
        {"expert_layout": "c"},
        {"host": ""},
        {"port": -1},
        {"scripted_kv_bytes": -1},
        {"tool_memory_max_ids": -1},
        {"checkpoint_mb": -1},
        {"kv_disk_space_mb": 0},
        {"kv_cache_cold_max_tokens": 1},
    ):
        with pytest.raises(Ds4Error) as error:
            ServerConfig(**values)  # type: ignore[arg-type]
        assert flags[str(error.value).split()[0]] == next(iter(values))
