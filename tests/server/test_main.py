"""The command itself, in a process of its own; and the trace it writes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_harness import line, scripted, tiny_tensors, tokenizer_metadata

from ds4.engine import Engine
from ds4.errors import Ds4Error
from ds4.gguf.writer import save
from ds4.server.config import ServerConfig, parse_args
from ds4.server.main import listen, main
from ds4.server.serve import GracefulServer, load_backend, open_trace
from ds4.server.trace import Trace

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model file with random weights."""
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    shape, tensors = tiny_tensors(512)
    save(path, shape, tensors, tokenizer=tokenizer_metadata(), qat_sim=False)
    return path


@contextmanager
def command(
    *arguments: object, start: Sequence[str] = ("-m", "ds4.server.main")
) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The running command, its address, and the log lines until it was ready."""
    process = subprocess.Popen(
        [sys.executable, *start, "--port", "0", "-t", "1", *map(str, arguments)],
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
    assert f"--chdir {tmp_path / 'nowhere'}: No such file or directory; give a directory" in caplog.text
    assert "Errno" not in caplog.text
    with pytest.raises(Ds4Error, match="trace cannot be written"):
        open_trace(tmp_path / "no" / "trace")


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    shape, tensors = tiny_tensors(512)
    save(tmp_path / "mute.gguf", shape, tensors, qat_sim=False)
    with pytest.raises(Ds4Error, match="no tokenizer"):
        load_backend(ServerConfig(model=tmp_path / "mute.gguf"))
    (tmp_path / "script").write_text('{"pieces": ["x"]}\n')
    with pytest.raises(Ds4Error, match=r"mute\.gguf has no tokenizer"):
        load_backend(ServerConfig(model=tmp_path / "mute.gguf", scripted=tmp_path / "script"))


def test_the_layout_of_the_experts_is_passed_on_and_logged(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert load_backend(ServerConfig(model=model)).engine.config.expert_layout == "b"
    assert "layout" not in caplog.text  # the CPU has no choice
    assert "float32" not in caplog.text
    assert load_backend(ServerConfig(model=model, quality=True)).engine.quality
    assert "the model computes in float32" in caplog.text
    monkeypatch.setattr(Engine, "expert_layout", "b")
    assert load_backend(ServerConfig(model=model, expert_layout="a")).engine.config.expert_layout == "a"
    assert "experts are in layout B (--expert-layout a)" in caplog.text
    with pytest.raises(Ds4Error, match="--expert-layout is 'c', but must be auto, a or b"):
        ServerConfig(expert_layout="c")  # type: ignore[arg-type]


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


def test_the_signal_counts_before_the_log_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    with scripted(line("x")) as running:
        server = GracefulServer(object(), running.worker)
        monkeypatch.setattr("ds4.server.serve.log.warning", lambda *_: seen.append(server.should_exit))
        server.handle_exit(signal.SIGTERM, None)
        assert running.worker.stop(10)
    assert seen == [True]


STREAM = json.dumps({"messages": HELLO, "stream": True}).encode()


@pytest.mark.parametrize(
    "request_text",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"GET /health HTTP/1.1\r\nHost:",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(STREAM), STREAM),
    ],
    ids=["half a body", "half a chunk", "half a head", "a stream that is not read"],
)
def test_one_signal_is_enough_whatever_clients_do(model: Path, tmp_path: Path, request_text: bytes) -> None:
    script = tmp_path / "script"
    # More than all buffers between the server and a client that does not read.
    script.write_text(json.dumps({"pieces": ["</think>", *["word " * 2000] * 3000]}) + "\n")
    with command("-m", model, "--scripted", script, "-c", 1_000_000, "--scripted-kv-bytes-per-token", 0) as running:
        process, url, _ = running
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
            client.sendall(request_text)
            if STREAM in request_text:
                assert client.recv(10)
            # The server has taken the connection when it answers another one.
            assert httpx.get(url + "/health").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


READS_FOR_EVER = """
import sys, threading
from ds4.server import app, main, serve

def read(data):
    print("reading", file=sys.stderr, flush=True)
    threading.Event().wait()

app._LONG_BODY = 0
app.parse_json = read
serve._EXIT_SECONDS = serve._SHUTDOWN_SECONDS = 1
sys.exit(main.main(sys.argv[1:]))
"""


def test_one_signal_is_enough_while_threads_read_requests(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with command("-m", model, "--trace", trace, start=["-c", READS_FOR_EVER]) as (process, url, _):
        with socket.socket() as client:
            client.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
            client.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            assert process.stderr is not None
            assert process.stderr.readline() == "reading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "not everything ended within 1 s" in process.stderr.read()


def test_nobody_has_to_read_standard_error(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('{"pieces": ["</think>", "scripted"]}\n')
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "ds4.server.main", "--port", "0", "-m", model, "--scripted", script], stderr=write
    )
    try:
        text = b""
        while b" ready on " not in text or not text.endswith(b"\n"):
            text += os.read(read, 4096)
        url = text.split(b" ready on ")[1].decode().strip()
        os.set_blocking(write, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write, b"x")
        os.set_blocking(write, True)
        for _ in range(3):
            answer = httpx.post(url + "/v1/chat/completions", json={"messages": HELLO}, timeout=60).json()
            assert answer["choices"][0]["message"]["content"] == "scripted"
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as client:
            # The HTTP library logs as well when it has to cut this one off.
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert httpx.get(url + "/health").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(read)
        os.close(write)


def test_closed_standard_streams_do_not_matter(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('{"pieces": ["</think>", "scripted"]}\n')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = (sys.executable, "-m", "ds4.server.main", "--port", str(port), "-m", str(model), "--scripted", str(script))
    process = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *start])
    try:
        transport = httpx.HTTPTransport(retries=12)  # waits a little longer each time
        with httpx.Client(transport=transport, timeout=60) as client:
            answer = client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={"messages": HELLO}).json()
        assert answer["choices"][0]["message"]["content"] == "scripted"
        for descriptor in range(3):  # no socket took the number
            assert os.readlink(f"/proc/{process.pid}/fd/{descriptor}") == os.devnull
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("step", ["import", "load"])
def test_ctrl_c_while_the_server_starts_is_status_130_and_never_an_exception(step: str) -> None:
    program = """
import signal, sys
from ds4.server import main
def interrupted():
    try: signal.raise_signal(signal.SIGINT)
    except BaseException: print("swallowed")
class Finder:
    def find_spec(self, name, *rest):
        if name == "ds4.server.serve": interrupted()
if sys.argv[1] == "import":
    sys.meta_path.insert(0, Finder())
else:
    from ds4.server import serve
    serve.load_backend = lambda config: interrupted()
main.main(["--port", "0"])
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", program, step], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_names_and_addresses_of_both_kinds_are_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("127.0.0.1", "localhost"):
        with listen(host, 0) as listener:
            assert listener.getsockname()[0] == "127.0.0.1"
    tried: list[object] = []

    class Recording(socket.socket):
        def __init__(self, family: int, kind: int) -> None:
            super().__init__(socket.AF_INET, kind)
            self.wanted = family

        def bind(self, address: Any) -> None:
            tried.append((self.wanted, address[0]))
            if address[0] == "192.0.2.1":
                raise OSError(errno.EADDRNOTAVAIL, "not here")
            super().bind(("127.0.0.1", 0))

    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "socket", Recording)
    listen("::1", 0).close()
    assert tried == [(socket.AF_INET6, "::1")]
    tried.clear()
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: real("::1", *rest, **more) + real("192.0.2.1", *rest, **more)
    )
    listen("some.name", 0).close()
    assert tried == [(socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "::1")]


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("192.0.2.1", "192.0.2.1:0: Cannot assign requested address; --host takes an address"),
        ("no such host", "--host no such host: "),
        ("a" * 100, "is neither an address nor"),
    ],
)
def test_only_a_port_in_use_looks_like_another_server(host: str, message: str) -> None:
    with pytest.raises(Ds4Error) as caught:
        listen(host, 0)
    assert message in str(caught.value)
    assert "another server" not in str(caught.value)


def test_a_terminal_sees_a_bar_while_the_model_loads(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_backend(ServerConfig(model=model))
    assert "loading" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    backend = load_backend(ServerConfig(model=model))
    assert backend.name == "ds4-custom"
    assert "loading the model" in capsys.readouterr().err


def test_kernels_are_compiled_before_the_first_request_and_that_is_said(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ds4.server")

    def compile_two(self: Engine, progress: Any) -> None:
        for done in range(3):
            progress(done, 2)

    load_backend(ServerConfig(model=model))
    assert "kernels" not in caplog.text  # there are none on the CPU
    monkeypatch.setattr(Engine, "warm_up", compile_two)
    load_backend(ServerConfig(model=model, warmup=False))
    assert "kernels" not in caplog.text
    load_backend(ServerConfig(model=model))
    said = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert said[0] == "compiling kernels; they are kept for the next start"
    assert said[1].startswith("kernels are ready after ")
    assert len(said) == 2
    assert "compiling" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_backend(ServerConfig(model=model))
    assert "compiling kernels" in capsys.readouterr().err


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


def test_the_trace_is_complete_before_the_reply_ends(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    fails = {"fail_at": 2}
    with scripted(line("</think>", "a"), line("</think>", "b", **fails), trace=trace) as server:
        for stream in (False, True):
            for last in ("finish", "error"):
                server.worker.backend.chooser.__self__.taken = 0 if last == "finish" else 1  # type: ignore[attr-defined]
                server.post({"messages": HELLO, "stream": stream})
                events = [json.loads(text) for text in trace.read_text().splitlines()]
                assert events[-1]["event"] == last


def test_a_trace_says_what_was_injected_and_may_tell_of_a_store(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    trace = Trace(path)
    assert path.stat().st_mode & 0o777 == 0o600  # whole conversations
    for event in ("store", "load", "evict"):
        trace.write(3, event, key="ab" * 20, tokens=512, bytes=1 << 20, reason="cold")
    trace.close()
    for text, event in zip(path.read_text().splitlines(), ("store", "load", "evict"), strict=True):
        value = json.loads(text)
        del value["t"]
        assert value == {
            "request": 3, "event": event, "key": "ab" * 20, "tokens": 512, "bytes": 1 << 20, "reason": "cold",
        }  # fmt: skip


def test_time_limits_are_flags_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_args(["--request-timeout", "90", "--step-timeout", "2.5"])
    assert (config.request_timeout, config.step_timeout) == (90.0, 2.5)
    assert (ServerConfig().request_timeout, ServerConfig().step_timeout) == (0, 0)
    for flag in ("--request-timeout", "--step-timeout"):
        for value in ("-1", "inf", "nan", "soon"):
            with pytest.raises(SystemExit) as caught:
                parse_args([f"{flag}={value}"])
            assert caught.value.code == 2
            assert flag.removeprefix("--").replace("-", "_") in capsys.readouterr().err.replace("-", "_")
