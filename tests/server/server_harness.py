"""Servers for tests: over a script or a small random model, on a real socket in a thread."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
import uvicorn

from ds4.engine import Engine, EngineConfig
from ds4.engine.loading import from_tensors
from ds4.gguf.shape import Shape, expected_tensors
from ds4.server.app import create_app
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig
from ds4.server.main import listen
from ds4.server.scripted import read_script, scripted_backend
from ds4.server.serve import http_config
from ds4.server.trace import Trace
from ds4.server.worker import Worker
from ds4.tokenizer import Tokenizer

TOKENIZER = Path(__file__).parents[2] / "tools" / "tiny" / "tokenizer.json"


@functools.cache
def tokenizer_metadata() -> dict[str, Any]:
    """The small tokenizer of the project, as a model file holds it."""
    data = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    texts = {id: text for text, id in data["model"]["vocab"].items()}
    types = dict.fromkeys(texts, 1)
    for added in data["added_tokens"]:
        texts[added["id"]], types[added["id"]] = added["content"], 3
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": [texts[id] for id in range(len(texts))],
        "tokenizer.ggml.token_type": [types[id] for id in range(len(texts))],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]],
    }


@functools.cache
def tokenizer() -> Tokenizer:
    """The small tokenizer of the project."""
    return Tokenizer.from_metadata(tokenizer_metadata())


def tiny_tensors(context: int) -> tuple[Shape, dict[str, torch.Tensor]]:
    """A very small model with random weights."""
    shape = Shape(
        name="custom", layers=3, hidden=64, heads=2, head_dim=32, rope_dim=8, q_lora_rank=16, o_groups=1,
        o_lora_rank=16, window=16, ratios=(0, 4, 16), index_heads=2, index_dim=16, index_top_k=4, experts=2,
        experts_used=1, expert_hidden=32, route_scale=1.0, hash_layers=1, vocab=tokenizer().vocab_size, context=context,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, spec in expected_tensors(shape).items():
        size = spec.dims[::-1]
        if "tid2eid" in name:
            tensors[name] = torch.randint(0, shape.experts, size, generator=generator, dtype=torch.int32)
        else:
            tensors[name] = 0.15 * torch.randn(size, generator=generator) + (1.0 if "norm" in name else 0.0)
    return shape, tensors


@functools.cache
def random_engine(context: int = 4096) -> Engine:
    """An engine that writes nonsense, by the real graph."""
    config = EngineConfig(context=context, prefill_chunk=64, checkpoint_interval=32)
    return from_tensors(*tiny_tensors(context), tokenizer(), qat_sim=False, config=config)


def script_backend(
    *lines: dict[str, Any], config: ServerConfig, chunk: int = 64, wait: Callable[[float], bool] | None = None
) -> Backend:
    """A backend that plays these lines."""
    text = "\n".join(json.dumps(line) for line in lines)
    engine_config = EngineConfig(context=config.ctx, prefill_chunk=chunk, checkpoint_interval=32)
    return scripted_backend(read_script(text), tokenizer(), engine_config, name="ds4-tiny", wait=wait)


@dataclass
class Running:
    """A server that answers at `url`."""

    url: str
    worker: Worker
    client: openai.OpenAI
    http: httpx.Client

    def post(self, body: object, path: str = "/v1/chat/completions") -> httpx.Response:
        """A plain POST."""
        return self.http.post(path, json=body)


@contextmanager
def serving(backend: Backend, config: ServerConfig) -> Iterator[Running]:
    """A server in a thread, on a free port of this machine."""
    worker = Worker(backend, config, Trace(config.trace))
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(http_config(create_app(worker, config)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    worker.start()
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    http = httpx.Client(base_url=url, timeout=60, verify=False, trust_env=False)
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, http_client=http)
    try:
        yield Running(url, worker, client, http)
    finally:
        http.close()
        stopped = worker.stop(10)
        server.should_exit = True
        thread.join(10)
        worker.trace.close()
        listener.close()
        assert stopped
        assert not thread.is_alive()


@contextmanager
def scripted(
    *lines: dict[str, Any], chunk: int = 64, wait: Callable[[float], bool] | None = None, **options: Any
) -> Iterator[Running]:
    """A server over a script; `options` are those of ServerConfig.

    A stream's status waits for the first event, however busy the machine is, unless they say otherwise.
    """
    config = ServerConfig(**{"first_byte_seconds": 600.0, **options})
    with serving(script_backend(*lines, config=config, chunk=chunk, wait=wait), config) as running:
        yield running


def line(*pieces: str, **options: Any) -> dict[str, Any]:
    """One line of a script."""
    return {"pieces": list(pieces), **options}


def call_pieces(*calls: tuple[str, Sequence[tuple[str, str, bool]]]) -> list[str]:
    """A tool call block as tokens: (name, [(parameter, value, is a string)])."""
    mark = "｜DSML｜"
    pieces = ["\n\n", "<", mark, "tool_calls", ">\n"]
    for name, parameters in calls:
        pieces += ["<", mark, "invoke", f' name="{name}"', ">\n"]
        for key, value, is_string in parameters:
            pieces += ["<", mark, "parameter", f' name="{key}" string="{"true" if is_string else "false"}"', ">"]
            pieces += [*value, "</", mark, "parameter", ">\n"]
        pieces += ["</", mark, "invoke", ">\n"]
    return [*pieces, "</", mark, "tool_calls", ">"]


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
