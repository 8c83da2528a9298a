"""What the documents promise of other files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from ds4.server.config import build_parser, parse_args
from ds4.server.edges import OPEN_PATHS

ROOT = Path(__file__).parents[2]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_dashboard_shows_what_the_table_of_metrics_has_of_the_process() -> None:
    assert "memory, processor time, open files" in read("docs/server.md")
    dashboard = read("deploy/grafana-dashboard.json")
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert name in dashboard


@pytest.mark.parametrize("tool", ["load", "mask_cost"])
def test_the_tools_that_measure_a_server_are_told_of(tool: str) -> None:
    assert (ROOT / f"tools/{tool}.py").is_file()
    assert f"tools/{tool}.py" in read("docs/testing.md")


@pytest.mark.parametrize(
    "refused",
    [
        "$anchor", "patternProperties", "64 bits", "fuel", "too large", "circle", "surrogate", "1,000 properties",
        "lookaround", "references to groups", "word boundaries", "1e-100", "empty `enum`",
    ],
)  # fmt: skip
def test_schemas_that_are_refused_are_listed(refused: str) -> None:
    listed = read("docs/server.md").partition("**Refused** with 400")[2].partition("\n- ")[0]
    assert refused in listed


@pytest.mark.parametrize(
    "narrowed", ["U+0000", "characters by their number", "beyond 64 bits", "exponent", "millionth"]
)
def test_what_is_never_written_is_listed(narrowed: str) -> None:
    assert narrowed in read("docs/server.md").partition("**Never written**")[2].partition("\n- ")[0]


def test_lines_that_troubleshooting_explains_are_those_of_the_log() -> None:
    rooms = ("server", "kvstore", "model/cuda")
    files = [path for room in rooms for path in sorted((ROOT / "src/ds4" / room).glob("*.py"))]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    page = read("docs/troubleshooting.md")
    for line in (
        "cannot start: ",
        "has no tokenizer",
        "compiling kernels; they are kept for the next start",
        "is not built yet in this version",
        "no API key is set: everybody who can reach ",
        " is smaller than --ctx ",
        "live kv cache miss ",
        "prompt start tokens=",
        "goes on from what its history shows: the reasoning behind its calls is not live any more",
        "prefill chunk ",
        "malformed tool call, asking the model again",
        "finish=cancelled in ",
        "a step of the model did not return within ",
        "the server cannot go on after a step of the model that did not return",
        "a step that had been given up has returned",
        "the worker failed",
        "lines of this log were dropped, as nobody read it",
        "the trace ends here, as its file cannot be written",
        "shutting down; a second signal exits at once",
        "unknown endpoint",
        " holds other files",
        " belongs to another user",
        "the disk is full",
        " bytes do not fit the budget",
        "other files in ",
        " is deleted: ",
        " is ignored: ",
        " wait to be written",
        "the pages of the state were needed by another conversation",
    ):
        assert line in source, line
        assert line in page, line


def test_the_service_and_the_container_start_the_server_with_flags_that_it_has() -> None:
    unit = read("deploy/ds4-server.service").replace("\\\n", " ")
    start = next(text for text in unit.splitlines() if text.startswith("ExecStart="))
    config = parse_args(shlex.split(start.replace("${CREDENTIALS_DIRECTORY}", "/run/credentials/x"))[1:])
    assert (config.host, config.api_key_file) == ("127.0.0.1", Path("/run/credentials/x/api-keys"))
    assert "LoadCredential=api-keys:" in unit
    container = read("deploy/Containerfile")
    entry = next(text for text in container.splitlines() if text.startswith("ENTRYPOINT"))
    program, *flags = json.loads(entry.removeprefix("ENTRYPOINT "))
    assert program == "ds4-server"
    assert (parse_args(flags).host, parse_args(flags).port) == ("0.0.0.0", 8000)


def test_the_container_copies_what_is_there_and_checks_a_path_that_needs_no_key() -> None:
    container = read("deploy/Containerfile")
    copied = [name for text in re.findall(r"^COPY (.*) \./?\S*$", container, re.MULTILINE) for name in text.split()]
    assert {"pyproject.toml", "src"} <= set(copied)
    ignored = read("deploy/Containerfile.dockerignore").splitlines()
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored
    assert container.index("USER ds4") < container.index("ENTRYPOINT")
    assert "/health" in container
    assert "/health" in OPEN_PATHS


def test_the_pages_of_the_documentation_are_listed_and_their_links_lead_somewhere() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    listed = set(re.findall(r"\]\(([a-z0-9-]+\.md)\)", read("docs/README.md")))
    assert listed == pages - {"README.md"}
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", read(f"docs/{page}")):
            assert (ROOT / "docs" / target).exists(), (page, target)


def test_every_flag_is_documented() -> None:
    listed = read("docs/server.md").partition("\n## Flags\n")[2]
    for action in build_parser()._actions:
        if action.dest not in ("help", "version"):
            assert any(f"`{flag}`" in listed for flag in action.option_strings), action.option_strings
