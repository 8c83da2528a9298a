"""What the server can be told, and its command line. It imports nothing heavy: `--help` and mistakes answer at once."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

from ds4.errors import Ds4Error

DEFAULT_CONTEXT = 32_768
DEFAULT_MAX_TOKENS = 393_216
MAX_THREADS = 1024

# Flags of the runtime and the server that this version knows but cannot do yet. They are refused by name: to ignore
# one would run something else than what was asked for.
NOT_BUILT = frozenset(
    {
        "--metal", "--rocm", "--power", "--warm-weights", "--gpu-vram", "--gpu-devices",
        "--cuda-tensor-parallel", "--ssd-streaming", "--ssd-streaming-cold", "--ssd-streaming-cache-experts",
        "--ssd-streaming-preload-experts", "--simulate-used-memory", "--mtp", "--mtp-draft", "--mtp-margin", "--dspark",
        "--dspark-confidence", "--dspark-strict", "--expert-profile", "--dir-steering-file", "--dir-steering-ffn",
        "--dir-steering-attn", "--dir-steering-policy", "--batched-session",
        "--mixed-prefill-quantum", "--vision", "--role", "--layers", "--listen", "--coordinator", "--tensor-parallel",
        "--transport",
    }
)  # fmt: skip

# Flags of the command `ds4` that are nothing to the server.
OF_DS4 = frozenset(
    {
        "-p", "--prompt", "--prompt-file", "--raw-prompt", "-sys", "--system", "--think", "--think-max", "--nothink",
        "--hide-thinking", "--temp", "--top-p", "--min-p", "--top-k", "--seed", "--inspect", "--dump-tokens",
        "--dump-logits", "--dump-logprobs", "--logprobs-top-k", "--decode-consistency", "--plan", "--cards",
        "--sessions", "--perplexity-file", "--imatrix-dataset", "--imatrix-out", "--imatrix-max-prompts",
        "--imatrix-max-tokens",
    }
)  # fmt: skip

TOPICS = {
    "model": "model",
    "chat": "chat format",
    "kv-cache": "conversations on disk",
    "server": "server",
    "testing": "testing",
}

_KV_LIMITS = {
    "kv_disk_space_mb": 1,
    "kv_cache_min_tokens": 1,
    "kv_cache_cold_max_tokens": 0,
    "kv_cache_continued_interval_tokens": 0,
    "kv_cache_boundary_trim_tokens": 0,
    "kv_cache_boundary_align_tokens": 1,
}


@dataclass(frozen=True)
class ServerConfig:
    """How a server runs; the command line fills it.

    Attributes:
        model: model file; None: the small model that comes with the package.
        host, port: where it listens; port 0 takes a free one.
        ctx: most tokens of prompt and answer together.
        max_tokens: limit of an answer if the request gives none.
        device: where the model runs: `auto`, `cpu`, `cuda` or `cuda:N` (see `ds4.engine.device.choose`).
        threads: CPU threads of the engine; None: PyTorch's choice.
        prefill_chunk: most prompt tokens evaluated in one step (fewer while answers are running); None: the engine's
            default.
        quality: compute in float32 on a CUDA device; None: for small models (see `ds4.engine.EngineConfig`).
        expert_layout: how a CUDA device holds IQ2_XXS experts: `auto`, `a` or `b` (see there).
        warmup: compile the kernels of a CUDA device before the first request.
        checkpoint_mb: MiB that the ways back into earlier positions may hold.
        template: chat template, `official` or `ds4`.
        effort_profile: `preview` or `0731`: what effort names mean.
        think_default: thinking if a request does not say; None: each API's own default.
        raw_completions: prompts of /v1/completions are continued as they stand, without the chat format.
        cors: allow requests from web pages.
        api_keys: requests need one of them; none: everybody has access.
        api_key_file: file of further keys, one a line.
        trace: file that gets one JSON line per event.
        scripted: JSON Lines file that replaces the model (see docs/testing.md).
        scripted_kv_bytes: bytes of scripted state per token.
        max_queue: requests that may wait; 0: no limit.
        max_sessions: conversations kept live.
        request_timeout: seconds a request may take, from its arrival on; 0: no limit.
        step_timeout: seconds one step of the model may take; then its requests fail, and the live conversations are
            given up; 0: no limit.
        safe_client_text: text of clients never becomes special tokens.
        think_recovery: a tool call begun inside reasoning closes the reasoning.
        strict_tools: arguments of calls follow the tools' schemas, also of tools that do not ask for it.
        replay: repeat the sampled bytes of tool calls when a client sends them back.
        tool_memory_max_ids, tool_memory_bytes: limits of what `replay` remembers.
        keep_alive_seconds: longest silence on a stream.
        first_byte_seconds: how long a stream may wait for its status before the headers go out.
        kv_disk_dir: directory in which states of conversations are kept; None: they are in memory only.
        kv_disk_space_mb: MiB that its files may have.
        kv_cache_min_tokens: shorter states are not stored, nor loaded.
        kv_cache_cold_max_tokens: the beginning of a new prompt is stored for others if the prompt is at most this long;
            0: never.
        kv_cache_continued_interval_tokens: a state is stored each time it has grown by as many tokens, rounded up to
            `kv_cache_boundary_align_tokens`; 0: never.
        kv_cache_boundary_trim_tokens, kv_cache_boundary_align_tokens: a prompt without a system region is stored so
            many tokens before its end, at a multiple of the other.
        max_body_bytes: larger request bodies are refused.
        chdir: directory to work in.
    """

    model: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    ctx: int = DEFAULT_CONTEXT
    max_tokens: int = DEFAULT_MAX_TOKENS
    device: str = "auto"
    threads: int | None = None
    prefill_chunk: int | None = None
    quality: bool | None = None
    expert_layout: Literal["auto", "a", "b"] = "b"
    warmup: bool = True
    checkpoint_mb: int = 1024
    template: str = "official"
    effort_profile: str = "preview"
    think_default: bool | None = None
    raw_completions: bool = False
    cors: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    trace: Path | None = None
    scripted: Path | None = None
    scripted_kv_bytes: int = 64
    max_queue: int = 1024
    max_sessions: int = 8
    request_timeout: float = 0.0
    step_timeout: float = 0.0
    safe_client_text: bool = True
    think_recovery: bool = True
    strict_tools: bool = False
    replay: bool = True
    tool_memory_max_ids: int = 100_000
    tool_memory_bytes: int = 512 << 20
    keep_alive_seconds: float = 10.0
    first_byte_seconds: float = 1.0
    kv_disk_dir: Path | None = None
    kv_disk_space_mb: int = 4096
    kv_cache_min_tokens: int = 512
    kv_cache_cold_max_tokens: int = 30_000
    kv_cache_continued_interval_tokens: int = 10_000
    kv_cache_boundary_trim_tokens: int = 32
    kv_cache_boundary_align_tokens: int = 2048
    max_body_bytes: int = 64 << 20
    chdir: Path | None = None

    def __post_init__(self) -> None:
        for name, low in (("ctx", 1), ("max_tokens", 0), ("max_sessions", 1), ("max_queue", 0), ("checkpoint_mb", 0)):
            if getattr(self, name) < low:
                raise Ds4Error(f"{_flag(name)} is {getattr(self, name)}, but must be at least {low}")
        for name in _KV_LIMITS:
            if getattr(self, name) < _KV_LIMITS[name]:
                raise Ds4Error(f"{_flag(name)} is {getattr(self, name)}, but must be at least {_KV_LIMITS[name]}")
        if 0 < self.kv_cache_cold_max_tokens < self.kv_cache_min_tokens:
            raise Ds4Error(
                f"--kv-cache-cold-max-tokens is {self.kv_cache_cold_max_tokens}, but must be 0 or at least"
                f" --kv-cache-min-tokens, {self.kv_cache_min_tokens}"
            )
        for name in ("threads", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Ds4Error(f"{_flag(name)} is {value}, but must be at least 1")
        for name in ("request_timeout", "step_timeout"):
            if not 0 <= getattr(self, name) < math.inf:
                raise Ds4Error(
                    f"{_flag(name)} is {getattr(self, name)}, but must be a number of seconds, or 0 for no limit"
                )
        if self.threads is not None and self.threads > MAX_THREADS:
            raise Ds4Error(f"--threads is {self.threads}, but must be at most {MAX_THREADS}")
        if self.expert_layout not in ("auto", "a", "b"):
            raise Ds4Error(f"--expert-layout is {self.expert_layout!r}, but must be auto, a or b")
        # An empty address would mean all networks of the machine.
        if not self.host.strip():
            raise Ds4Error("--host is empty; give an address, such as 127.0.0.1")
        for name in ("scripted_kv_bytes", "tool_memory_max_ids"):
            if getattr(self, name) < 0:
                raise Ds4Error(f"{_flag(name)} is {getattr(self, name)}, but must be at least 0")
        if not 0 <= self.port <= 65535:
            raise Ds4Error(f"--port is {self.port}, but must be from 0 to 65535")
        for key in self.api_keys:
            check_api_key(key)


def _flag(name: str) -> str:
    """The flag that fills an attribute: whoever started the server knows only that."""
    others = {"max_tokens": "--tokens", "scripted_kv_bytes": "--scripted-kv-bytes-per-token"}
    return others.get(name) or "--" + name.replace("_", "-")


def check_api_key(key: str) -> str:
    """The key, if a header can carry it. Raises Ds4Error, which does not show it."""
    if not key:
        raise Ds4Error("the API key is empty")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise Ds4Error("the API key has a space or a character that is not ASCII; a header cannot carry it")
    return key


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nTry {self.prog} --help\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, flag: str | None = None) -> None:
        from ds4 import __version__

        print(f"{parser.prog} {__version__}")
        parser.exit()


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, flag: str | None = None) -> None:
        if values is None or values == "all":
            parser.print_help()
        elif values in TOPICS:
            formatter = parser._get_formatter()
            for group in parser._action_groups:
                if group.title == TOPICS[values]:
                    formatter.start_section(group.title)
                    formatter.add_arguments(group._group_actions)
                    formatter.end_section()
            print(formatter.format_help(), end="")
        else:
            parser.error(f"there is no help topic {values!r}; topics: {', '.join(TOPICS)}, all")
        parser.exit()


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return Path(text)


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; use auto, cpu, cuda or cuda:N")
    return text


def _backend(text: str) -> str:
    if text in ("metal", "rocm"):
        raise argparse.ArgumentTypeError(f"the backend {text} is not built yet in this version; use cpu or cuda")
    if text not in ("auto", "cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a backend; use cpu, cuda or auto")
    return text


def build_parser() -> argparse.ArgumentParser:
    """The parser of the server's command line."""
    parser = _Parser(
        prog="ds4-server",
        description="Serve a DeepSeek V4 model over HTTP with OpenAI's and Anthropic's APIs.",
        allow_abbrev=False,
        add_help=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    on_off = argparse.BooleanOptionalAction
    topics = f"this text, or one part: {', '.join(TOPICS)}"
    parser.add_argument("-h", "--help", metavar="TOPIC", nargs="?", action=_Help, help=topics)
    parser.add_argument("--version", nargs=0, action=_Version, help="print the version")

    model = parser.add_argument_group("model")
    model.add_argument(
        "-m", "--model", type=_path, metavar="FILE", help="model file (GGUF); default: the embedded model"
    )
    model.add_argument("-c", "--ctx", type=int, metavar="N", help=f"tokens of context ({DEFAULT_CONTEXT})")
    model.add_argument(
        "-n", "--tokens", dest="max_tokens", type=int, metavar="N", help=f"limit of an answer ({DEFAULT_MAX_TOKENS})"
    )
    model.add_argument("-t", "--threads", type=int, metavar="N", help="CPU threads")
    device = "cpu, cuda, cuda:N (the card of this number), or auto: a CUDA device if it can run the model (auto)"
    model.add_argument("--device", metavar="NAME", type=_device, help=device)
    # Names that the C engine has; whichever of them comes last counts.
    model.add_argument("--backend", dest="device", metavar="NAME", type=_backend, help="the same: cpu, cuda or auto")
    for name in ("cpu", "cuda"):
        model.add_argument(
            f"--{name}", dest="device", action="store_const", const=name, help=f"the same as --device {name}"
        )
    model.add_argument("--prefill-chunk", type=int, metavar="N", help="prompt tokens evaluated in one step")
    quality = "float32 on a CUDA device, nearly the CPU's results, but slow; or not (float32 for models up to 32 MiB)"
    model.add_argument("--quality", action=argparse.BooleanOptionalAction, help=quality)
    layout = "of IQ2_XXS experts on a CUDA device: b, a (larger), or auto: a if everything fits (b)"
    model.add_argument("--expert-layout", choices=("auto", "a", "b"), help=layout)
    cold = "on a CUDA device compile kernels when they are first needed, not at the start"
    model.add_argument("--no-warmup", action="store_true", help=cold)
    model.add_argument("--checkpoint-mb", type=int, metavar="N", help="MiB for ways back into a conversation (1024)")
    model.add_argument("--max-sessions", type=int, metavar="N", help="conversations kept live (8)")

    chat = parser.add_argument_group("chat format")
    chat.add_argument("--template", choices=("official", "ds4"), help="chat template (official)")
    chat.add_argument("--effort-profile", choices=("preview", "0731"), help="meaning of effort names (preview)")
    chat.add_argument("--think-default", choices=("on", "off"), help="thinking if a request does not say")
    chat.add_argument("--safe-client-text", action=on_off, help="clients' text never becomes special tokens (on)")
    chat.add_argument(
        "--raw-completions", action="store_true", help="/v1/completions continues prompts as they stand, not as a chat"
    )
    chat.add_argument("--no-think-recovery", action="store_true", help="leave a tool call inside reasoning alone")
    chat.add_argument(
        "--strict-tools",
        action="store_true",
        help="arguments of calls follow the schemas of all tools, not only of strict ones",
    )
    chat.add_argument("--disable-exact-dsml-tool-replay", action="store_true", help="always write calls anew")
    chat.add_argument("--tool-memory-max-ids", type=int, metavar="N", help="tool calls remembered for replay (100000)")

    disk = parser.add_argument_group("conversations on disk")
    disk.add_argument(
        "--kv-disk-dir",
        type=_path,
        metavar="DIR",
        help="keep states of conversations in this directory (off)",
    )
    for flag, text in (
        ("--kv-disk-space-mb", "MiB that its files may have (4096)"),
        ("--kv-cache-min-tokens", "store and load states of at least N tokens (512)"),
        ("--kv-cache-cold-max-tokens", "store the beginning of new prompts of at most N tokens; 0: never (30000)"),
        ("--kv-cache-continued-interval-tokens", "store a state each time it has grown by N tokens; 0: never (10000)"),
        ("--kv-cache-boundary-trim-tokens", "store a prompt without system region N tokens before its end (32)"),
        ("--kv-cache-boundary-align-tokens", "and at a multiple of N tokens (2048)"),
    ):
        disk.add_argument(flag, type=int, metavar="N", help=text)
    disk.add_argument(
        "--kv-cache-reject-different-quant",
        action="store_true",
        help="never load states of another quantisation; this is always so",
    )

    http = parser.add_argument_group("server")
    http.add_argument("--host", help="address to listen on (127.0.0.1)")
    http.add_argument("--port", type=int, metavar="N", help="port to listen on (8000)")
    http.add_argument(
        "--api-key",
        dest="api_keys",
        action="append",
        metavar="KEY",
        help="requests need this key; may be repeated. Other users of the machine see it in the list of processes:"
        " --api-key-file and the environment variable DS4_API_KEY do not show it",
    )
    http.add_argument(
        "--api-key-file", type=_path, metavar="FILE", help="requests need one of the keys in this file, one a line"
    )
    http.add_argument("--cors", action="store_true", help="allow requests from web pages of any site")
    http.add_argument("--max-queue", type=int, metavar="N", help="requests that may wait; 0: no limit (1024)")
    http.add_argument(
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        help="end requests that take longer, waiting included; 0: no limit (0)",
    )
    http.add_argument(
        "--step-timeout",
        type=float,
        metavar="SECONDS",
        help="give up a step of the model that takes longer, and all live conversations with it; 0: no limit (0)",
    )
    http.add_argument("--chdir", type=_path, metavar="DIR", help="change to this directory first")

    testing = parser.add_argument_group("testing")
    testing.add_argument("--trace", type=_path, metavar="FILE", help="write prompts, tokens and decisions as JSON")
    testing.add_argument("--scripted", type=_path, metavar="FILE", help="answer from a script instead of the model")
    testing.add_argument(
        "--scripted-kv-bytes-per-token",
        dest="scripted_kv_bytes",
        type=int,
        metavar="N",
        help="size of the scripted state (64)",
    )
    return parser


def parse_args(argv: Sequence[str], key: str | None = None) -> ServerConfig:
    """The configuration that a command line asks for; `key` is the environment's API key, if it names none.

    Exits with status 2 and a message for an unknown flag, one that is not built yet or that only `ds4` has, or a bad
    value; 0 for --help and --version.
    """
    parser = build_parser()
    for argument in argv:
        flag = argument.split("=", 1)[0]
        if flag in NOT_BUILT:
            parser.error(f"{flag} is not built yet in this version")
        if flag in OF_DS4:
            parser.error(f"{flag} is a flag of ds4, not of the server")
    options = vars(parser.parse_args(argv))
    if "think_default" in options:
        options["think_default"] = options["think_default"] == "on"
    if options.pop("no_warmup", False):
        options["warmup"] = False
    if options.pop("no_think_recovery", False):
        options["think_recovery"] = False
    if options.pop("disable_exact_dsml_tool_replay", False):
        options["replay"] = False
    if "api_keys" in options:
        options["api_keys"] = tuple(options["api_keys"])
    elif "api_key_file" not in options and key is not None:
        try:
            # An empty one is refused as well: who sets it wants a key, and would serve everybody.
            options["api_keys"] = (check_api_key(key),)
        except Ds4Error as error:
            parser.error(f"the environment variable DS4_API_KEY: {error}")
    known = {entry.name for entry in fields(ServerConfig)}
    try:
        return ServerConfig(**{name: value for name, value in options.items() if name in known})
    except Ds4Error as error:
        parser.error(str(error))
