"""Loads what is to be served, and serves it until a signal."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import uvicorn

from ds4.engine import Engine, EngineConfig
from ds4.engine.loading import load
from ds4.engine.packing import ModelCodec
from ds4.errors import Ds4Error
from ds4.gguf.file import embedded_model_path, open_model
from ds4.process import exit_at_interrupt
from ds4.server.api.models import model_id
from ds4.server.app import create_app
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig
from ds4.server.disk import SWITCH_SECONDS
from ds4.server.edges import MAX_HEADER_BYTES, read_key_file
from ds4.server.scripted import load_script, scripted_backend
from ds4.server.trace import Trace
from ds4.server.worker import Worker
from ds4.tokenizer import Tokenizer

log = logging.getLogger("ds4.server")

_MAX_UNREAD_HEAD = 4 * MAX_HEADER_BYTES
"""Bytes of a request's head that the HTTP parser collects at most; larger ones get its own bare 400."""

_SHUTDOWN_SECONDS = 3
"""How long connections may take to end at a signal: clients that send half a request or read nothing do not end."""

_STORE_SECONDS = 60
"""How long the live conversations may take to be stored on disk at a signal."""

_EXIT_SECONDS = 8
"""How long all may take at a signal. Threads that still read a request, or prepare its schema, cannot be ended."""


def run(config: ServerConfig, listener: socket.socket) -> int:
    """Load the model and serve on a listening socket until a signal; the exit status. Raises Ds4Error."""
    if config.api_key_file is not None:
        config = replace(config, api_keys=(*config.api_keys, *read_key_file(config.api_key_file)))
    trace = open_trace(config.trace)
    with exit_at_interrupt():
        backend = load_backend(config)
    worker = Worker(backend, config, trace)
    worker.prompts.prepare()
    server = GracefulServer(create_app(worker, config), worker, lambda: _leave(worker, trace))
    host, port = listener.getsockname()[:2]
    if not config.api_keys and not _is_loopback(host):
        log.warning(
            "no API key is set: everybody who can reach %s can use this server; see --api-key-file in --help", host
        )
    if config.kv_disk_dir is not None:
        sys.setswitchinterval(SWITCH_SECONDS)
    worker.start()
    log.info("%s ready on http://%s:%d", backend.name, f"[{host}]" if ":" in host else host, port)
    try:
        server.run(sockets=[listener])
    finally:
        worker.stop(timeout=5)
        worker.disk.close(timeout=_STORE_SECONDS)
        trace.close()
    return 0


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def http_config(app: object) -> uvicorn.Config:
    """How the application is served, whatever HTTP parsers are installed."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http="h11",
        h11_max_incomplete_event_size=_MAX_UNREAD_HEAD,
        timeout_keep_alive=65,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        log_config=None,  # its own handlers write to standard error, and wait if nobody reads it
    )


class GracefulServer(uvicorn.Server):
    """Ends running answers at the first signal, the process a few seconds later, and at once at the second."""

    def __init__(self, app: object, worker: Worker, leave: Callable[[], None] = lambda: None) -> None:
        """`leave` ends the process if it still runs _EXIT_SECONDS after the first signal."""
        super().__init__(http_config(app))
        self._worker, self._leave = worker, leave

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for SIGINT and SIGTERM."""
        if self.should_exit:
            os._exit(130)
        self.should_exit = True
        log.warning("shutting down; a second signal exits at once")
        # Answers have to end before their connections can be closed, and a signal handler must not wait.
        threading.Thread(target=self._worker.stop, daemon=True).start()
        # The event loop and the interpreter would wait for all threads, however long these take.
        deadline = threading.Timer(_EXIT_SECONDS, self._leave)
        deadline.daemon = True
        deadline.start()


def _leave(worker: Worker, trace: Trace) -> None:
    """End the process as soon as the conversations are stored that are being stored."""
    worker.disk.close(timeout=_STORE_SECONDS)
    # Once the log has ended, lines of it would go to standard error itself, and wait if nobody reads it.
    if logging.getLogger().handlers:
        log.warning("not everything ended within %g s; exiting without it", _EXIT_SECONDS)
    trace.close()
    logging.shutdown()
    os._exit(0)


def load_backend(config: ServerConfig) -> Backend:
    """What the configuration wants to be served. Raises Ds4Error."""
    engine_config = EngineConfig(
        context=config.ctx,
        prefill_chunk=config.prefill_chunk,
        checkpoint_bytes=config.checkpoint_mb << 20,
        threads=config.threads,
        quality=config.quality,
        expert_layout=config.expert_layout,
        sessions=config.max_sessions + 1,  # a new conversation is there before the oldest one leaves
    )
    if config.scripted is not None:
        return _scripted(config, config.scripted, engine_config)
    with progress_bar("loading the model") as progress:
        engine = load(config.model, config.device, config=engine_config, progress=progress)
    if not engine.has_tokenizer:
        raise Ds4Error(f"the model {config.model} has no tokenizer, so text cannot be served; use a complete file")
    if engine.context < config.ctx:
        log.warning("the model's context of %d tokens is smaller than --ctx %d", engine.context, config.ctx)
    if engine.config.quality:
        log.info("the model computes in float32 (--quality, and small models on a CUDA device)")
    if engine.expert_layout is not None:
        log.info("experts are in layout %s (--expert-layout %s)", engine.expert_layout.upper(), config.expert_layout)
    if config.warmup:
        warm_up(engine)
    codec = None if config.kv_disk_dir is None else ModelCodec(engine)
    return Backend(engine, model_id(engine.shape.name), codec=codec)


def _scripted(config: ServerConfig, script: Path, engine_config: EngineConfig) -> Backend:
    lines = load_script(script)
    file = open_model(config.model or embedded_model_path())
    if not file.has_tokenizer:
        raise Ds4Error(f"the model {file.path} has no tokenizer, so text cannot be served; use a complete file")
    tokenizer = Tokenizer.from_metadata(file.metadata, file.path)
    return scripted_backend(lines, tokenizer, engine_config, config.scripted_kv_bytes, model_id(file.shape.name))


def warm_up(engine: Engine) -> None:
    """Compile what serving needs, which the first requests would else wait for, and say so if there is any."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        shown: list[Callable[[int, int], None] | None] = []

        def progress(done: int, total: int) -> None:
            if not shown:
                log.info("compiling kernels; they are kept for the next start")
                shown.append(stack.enter_context(progress_bar("compiling kernels", transfer=False)))
            if shown[0] is not None:
                shown[0](done, total)

        engine.warm_up(progress)
    if shown:
        log.info("kernels are ready after %.1f s", time.monotonic() - began)


@contextlib.contextmanager
def progress_bar(title: str, transfer: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar for bytes (`transfer`) or steps, if someone looks at the terminal; else None."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if transfer else MofNCompleteColumn()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn(), console=Console(stderr=True)
    ) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def open_trace(path: Path | None) -> Trace:
    """The trace file, emptied. Raises Ds4Error."""
    try:
        return Trace(path)
    except OSError as error:
        raise Ds4Error(f"the trace cannot be written to {path}: {error.strerror or error}") from None
