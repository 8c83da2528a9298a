"""The command itself, in a process of its own; and the trace it writes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_harness import line, scripted, tiny_tensors, tokenizer_metadata

from ds4.errors import Ds4Error
from ds4.gguf.writer import save
from ds4.server.config import ServerConfig
from ds4.server.main import listen, main
from ds4.server.serve import GracefulServer, load_backend, open_trace

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model file with random weights."""
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    shape, tensors = tiny_tensors(512)
    save(path, shape, tensors, tokenizer=tokenizer_metadata(), qat_sim=False)
    return path


@contextmanager
def command(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The running command, its address, and the log lines until it was ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ds4.server.main", "--port", "0", "-t", "1", *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen: list[str] = []
    try:
        for text in process.stderr:
            seen.append(text)
            if " ready on " in text:
                yield process, text.split(" ready on ")[1].strip(), seen
                break
        else:
            raise AssertionError("".join(seen))
    finally:
        process.kill()
        process.stderr.close()
        process.wait()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_a_file_logs_and_ends_at_a_signal(model: Path, tmp_path: Path, sig: signal.Signals) -> None:
    trace = tmp_path / "trace"
    with command("-m", model, "-c", 400, "--trace", trace) as (process, url, _):
        answer = httpx.post(url + "/v1/chat/completions", json={"messages": HELLO, "max_tokens": 3}).json()
        assert answer["usage"]["completion_tokens"] <= 3
        assert httpx.get(url + "/v1/models").json()["data"][0]["context_length"] == 400
        process.send_signal(sig)
        assert process.wait(20) == 0
        assert process.stderr is not None
        rest = process.stderr.read()
    for fact in ("prompt start", "prefill chunk", "prompt done", "finish=", "shutting down"):
        assert fact in rest
    events = [json.loads(text)["event"] for text in trace.read_text().splitlines()]
    assert events[0] == "prompt"
    assert events[-2:] == ["parse", "finish"]


def test_it_plays_a_script_with_the_tokenizer_of_a_file(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('{"pieces": ["</think>", "scripted"]}\n')
    with command("-m", model, "--scripted", script, "--chdir", tmp_path) as (_, url, _):
        answer = httpx.post(url + "/v1/chat/completions", json={"messages": HELLO}).json()
    assert answer["choices"][0]["message"]["content"] == "scripted"


def test_a_port_in_use_is_status_1_before_anything_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port), "-m", "/no/such/file"]) == 1
    assert f"127.0.0.1:{port}" in caplog.text
    assert "another server" in caplog.text


def test_what_cannot_be_loaded_is_status_1_with_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["--port", "0", "-m", str(tmp_path / "missing.gguf")]) == 1
    assert "missing.gguf" in caplog.text
    assert "Traceback" not in caplog.text
    assert main(["--port", "0", "--chdir", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in caplog.text
    with pytest.raises(Ds4Error, match="trace cannot be written"):
        open_trace(tmp_path / "no" / "trace")


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    shape, tensors = tiny_tensors(512)
    save(tmp_path / "mute.gguf", shape, tensors, qat_sim=False)
    with pytest.raises(Ds4Error, match="no tokenizer"):
        load_backend(ServerConfig(model=tmp_path / "mute.gguf"))


def test_the_second_signal_exits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    with scripted(line("x")) as running:
        server = GracefulServer(object(), running.worker)
        server.handle_exit(signal.SIGINT, None)
        assert server.should_exit
        assert exits == []
        server.handle_exit(signal.SIGTERM, None)
        assert exits == [130]
        assert running.worker.stop(10)


def test_an_address_with_colons_is_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    families: list[int] = []
    real = socket.socket

    def recording(family: int, kind: int) -> socket.socket:
        families.append(family)
        return real(socket.AF_INET, kind)

    monkeypatch.setattr(socket, "socket", recording)
    with pytest.raises(OSError, match="::1:0"):
        listen("::1", 0)
    listen("127.0.0.1", 0).close()
    assert families == [socket.AF_INET6, socket.AF_INET]


def test_a_terminal_sees_a_bar_while_the_model_loads(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_backend(ServerConfig(model=model))
    assert "loading" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    backend = load_backend(ServerConfig(model=model))
    assert backend.name == "ds4-custom"
    assert "loading the model" in capsys.readouterr().err


def test_the_trace_tells_the_whole_story_of_a_request(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    half = "base64:8J+Y"
    with scripted(line("plan", "</think>", half, "base64:gA==", " ok"), trace=trace) as server:
        server.post({"messages": HELLO})
        server.post({"messages": HELLO})
    events: list[dict[str, Any]] = [json.loads(text) for text in trace.read_text().splitlines()]
    first = [event for event in events if event["request"] == 1]
    assert [event["event"] for event in first] == ["prompt", *["piece"] * 6, "parse", "finish"]
    assert all(list(event)[:3] == ["t", "request", "event"] for event in events)
    prompt, *pieces, parsed, finish = first
    assert prompt["text"] == "<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜><think>"
    assert (prompt["source"], prompt["reused"]) == ("none", 0)
    assert prompt["tokens"] == prompt["effective_tokens"]
    assert [piece["text"] for piece in pieces] == [
        "plan", "</think>", half, "base64:gA==", " ok", "<｜end▁of▁sentence｜>",
    ]  # fmt: skip
    assert (parsed["reasoning"], parsed["content"], parsed["calls"]) == ("plan", "😀 ok", [])
    assert finish["reason"] == "stop"
    assert finish["usage"] == {"prompt": prompt["tokens"], "reused": 0, "completion": 5, "reasoning": 1}
    again = next(event for event in events if event["request"] == 2)
    assert again["source"] == "checkpoint"
    assert again["reused"] == prompt["tokens"] - 1
