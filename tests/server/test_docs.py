"""What the documents promise of other files."""

from __future__ import annotations

from pathlib import Path

import pytest

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
