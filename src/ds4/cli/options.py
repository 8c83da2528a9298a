"""The command line of `ds4`, read without loading anything heavy.

argparse because a flag can have an optional value (`--inspect [FILE]`, `--help [TOPIC]`) and because it loads quickest.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

Mode = Literal["none", "high", "max"]
"""How the model answers: at once, after thinking, after thinking as hard as it can."""

Layout = Literal["auto", "a", "b"]
"""As `ds4.engine.EngineConfig.expert_layout`."""

NOT_BUILT = {
    "backends": ("--metal", "--rocm", "--gpu-vram", "--gpu-devices", "--cuda-tensor-parallel"),
    "memory": (
        "--warm-weights", "--ssd-streaming", "--ssd-streaming-cold", "--ssd-streaming-cache-experts",
        "--ssd-streaming-preload-experts", "--simulate-used-memory", "--expert-profile", "--power",
    ),
    "speculation": ("--mtp", "--mtp-draft", "--mtp-margin", "--dspark", "--dspark-confidence", "--dspark-strict"),
    "steering": ("--dir-steering-file", "--dir-steering-ffn", "--dir-steering-attn"),
    "distributed": (
        "--role", "--layers", "--listen", "--coordinator", "--dist-prefill-chunk", "--dist-prefill-window",
        "--dist-activation-bits", "--dist-replay-check", "--debug", "--tensor-parallel", "--transport",
        "--rdma-device", "--rdma-gid-index", "--debug-hash",
    ),
    "diagnostics": (
        "--head-test", "--first-token-test", "--metal-graph-test", "--metal-graph-full-test",
        "--metal-graph-prompt-test",
    ),
}  # fmt: skip
"""Flags of the C engine that this version refuses by name."""


MAX_THREADS = 1024

_JOBS = (
    "inspect", "plan", "dump_tokens", "dump_logits", "dump_logprobs", "decode_consistency", "perplexity_file",
    "imatrix_out",
)  # fmt: skip
"""What the command does instead of answering; one at a time."""


@dataclass(frozen=True)
class Options:
    """The command line as values; None where the model file or the context decides.

    `model` None is the small model that comes with the package; `inspect` is "" for the file that `model` names.
    """

    model: str | None = None
    context: int | None = None
    max_tokens: int | None = None
    threads: int | None = None
    prefill_chunk: int | None = None
    device: str = "auto"
    sessions: int | None = None
    quality: bool | None = None
    expert_layout: Layout = "b"
    warmup: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.05
    top_k: int = 0
    seed: int | None = None
    mode: Mode = "high"
    system: str = ""
    prompt: str | None = None
    prompt_file: str | None = None
    raw_prompt: bool = False
    template: str = "official"
    hide_thinking: bool = False
    inspect: str | None = None
    plan: bool = False
    cards: tuple[float, ...] | None = None
    dump_tokens: bool = False
    dump_logits: str | None = None
    dump_logprobs: str | None = None
    logprobs_top_k: int = 20
    decode_consistency: int | None = None
    perplexity_file: str | None = None
    imatrix_dataset: str | None = None
    imatrix_out: str | None = None
    imatrix_max_prompts: int | None = None
    imatrix_max_tokens: int | None = None


def parse(argv: Sequence[str]) -> Options:
    """Read the arguments (without the program's name).

    Exits with status 0 after --help and --version, and with 2 and a message on stderr for what cannot be used.
    """
    parser = build_parser()
    args = parser.parse_args(list(argv))
    if args.prompt is not None and args.prompt_file is not None:
        parser.error("--prompt and --prompt-file are given both; give one")
    if args.raw_prompt and args.system:
        parser.error("--system has no place in a raw prompt; write the system text into the prompt itself")
    jobs = [name for name in _JOBS if getattr(args, name) not in (None, False)]
    if len(jobs) > 1:
        names = " and ".join("--" + name.replace("_", "-") for name in jobs[:2])
        parser.error(f"{names} cannot run together; give one")
    if args.logprobs_top_k is not None and args.dump_logprobs is None:
        parser.error("--logprobs-top-k belongs to --dump-logprobs; give that too")
    if args.cards is not None and not args.plan:
        parser.error("--cards belongs to --plan; give that too")
    _check_imatrix(parser, args)
    if args.perplexity_file is not None and args.ctx is not None and args.ctx < 3:
        parser.error(f"--ctx {args.ctx} is too small for --perplexity-file; a window has at least 3 tokens")
    if args.dump_logits == "-":
        parser.error("--dump-logits writes binary numbers; give the name of a file")
    return Options(
        model=args.model,
        context=args.ctx,
        max_tokens=args.tokens,
        threads=args.threads,
        prefill_chunk=args.prefill_chunk,
        device=args.device,
        sessions=args.sessions,
        quality=args.quality,
        expert_layout=args.expert_layout,
        warmup=not args.no_warmup,
        temperature=args.temp,
        top_p=args.top_p,
        min_p=args.min_p,
        top_k=args.top_k,
        seed=args.seed,
        mode=args.mode,
        system=args.system,
        prompt=args.prompt,
        prompt_file=args.prompt_file,
        raw_prompt=args.raw_prompt,
        template=args.template,
        hide_thinking=args.hide_thinking,
        inspect="" if args.inspect is True else args.inspect,
        plan=args.plan,
        cards=args.cards,
        dump_tokens=args.dump_tokens,
        dump_logits=args.dump_logits,
        dump_logprobs=args.dump_logprobs,
        logprobs_top_k=args.logprobs_top_k or Options.logprobs_top_k,
        decode_consistency=args.decode_consistency,
        perplexity_file=args.perplexity_file,
        imatrix_dataset=args.imatrix_dataset,
        imatrix_out=args.imatrix_out,
        imatrix_max_prompts=args.imatrix_max_prompts,
        imatrix_max_tokens=args.imatrix_max_tokens,
    )


def _check_imatrix(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name in ("dataset", "max_prompts", "max_tokens"):
        if getattr(args, f"imatrix_{name}") is not None and args.imatrix_out is None:
            parser.error(f"--imatrix-{name.replace('_', '-')} belongs to --imatrix-out; give that too")
    if args.imatrix_out is not None and args.imatrix_dataset is None:
        parser.error("--imatrix-out needs the text to evaluate; give --imatrix-dataset FILE")
    if args.imatrix_out == "-":
        parser.error("--imatrix-out writes binary numbers; give the name of a file")
    job = args.imatrix_out or args.perplexity_file
    if job is not None and (args.prompt is not None or args.prompt_file is not None):
        flag = "--imatrix-out" if args.imatrix_out is not None else "--perplexity-file"
        parser.error(f"{flag} takes its text from a file of its own; leave --prompt and --prompt-file away")


class Parser(argparse.ArgumentParser):
    """Errors without the usage text, which is two screens long."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message} (`{self.prog} --help` lists the flags)\n")
        sys.exit(2)


class _NotBuilt(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, flag: str | None = None) -> None:
        parser.error(f"{flag} is not built yet")


class _Moved(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, flag: str | None = None) -> None:
        sys.stderr.write(f"{parser.prog}: {flag} is a command of its own now: ds4-bench (see `ds4-bench --help`)\n")
        parser.exit(2)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, flag: str | None = None) -> None:
        from ds4 import __version__

        print(f"ds4 {__version__}")
        parser.exit()


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, flag: str | None = None) -> None:
        _print_help(parser, values or "all")
        parser.exit()


TOPICS = {
    "runtime": "Model and runtime",
    "sampling": "Sampling",
    "prompt": "Prompt and answer",
    "diagnostics": "Diagnostics",
    "commands": "Commands of the interactive session",
}

COMMANDS = {
    "/help": "show the commands",
    "/think": "think before the next answers",
    "/think-max": "think as hard as possible (needs a context of 393216 tokens)",
    "/nothink": "answer at once",
    "/read FILE": "send the text of a file",
    "/ctx N": "change the context to N tokens; without N: show how much is used",
    "/new": "forget the conversation",
    "/quit, /exit": "leave; so does Ctrl+D. Ctrl+C stops an answer",
}


def _print_help(parser: argparse.ArgumentParser, topic: str) -> None:
    if topic != "all" and topic not in TOPICS:
        parser.error(f"there is no help topic {topic!r}; topics: {', '.join(TOPICS)}, all")
    formatter = parser._get_formatter()
    if topic == "all":
        formatter.add_text("usage: ds4 [flags]           interactive session\n")
        formatter.add_text(parser.description)
    for group in parser._action_groups:
        if group._group_actions and (topic == "all" or group.title == TOPICS[topic]):
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
    print(formatter.format_help(), end="")
    if topic in ("all", "commands"):
        print(f"\n{TOPICS['commands']}:")
        for name, text in COMMANDS.items():
            print(f"  {name:28}{text}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags; those of `NOT_BUILT` are in it, hidden."""
    parser = Parser(
        prog="ds4",
        usage=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=110),
        description="ds4 -p TEXT answers once and ends; without a prompt an interactive session begins.",
    )
    _runtime_flags(parser.add_argument_group(TOPICS["runtime"]))
    _sampling_flags(parser.add_argument_group(TOPICS["sampling"]))
    _prompt_flags(parser.add_argument_group(TOPICS["prompt"]))
    _diagnostic_flags(parser.add_argument_group(TOPICS["diagnostics"]))
    parser.add_argument("--bench", action=_Moved, nargs="*", dest=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for flags in NOT_BUILT.values():
        for flag in flags:
            parser.add_argument(flag, action=_NotBuilt, nargs="*", dest=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _flag(
    group: argparse._ArgumentGroup, names: str, help: str, type: Callable[[str], Any] = str, default: Any = None
) -> None:
    """A flag, written as the help shows it: "-m --model FILE"; without a value it is a switch."""
    *flags, value = names.split()
    if value.startswith("-"):
        group.add_argument(*flags, value, action="store_true", help=help)
    else:
        group.add_argument(*flags, metavar=value, type=type, default=default, help=help)


def _runtime_flags(group: argparse._ArgumentGroup) -> None:
    _flag(group, "-m --model FILE", "model file (GGUF); default: the small model that comes with ds4", file_name)
    _flag(group, "-c --ctx N", "most tokens of a conversation (the model's)", whole(1))
    _flag(group, "-n --tokens N", "most tokens of an answer (what is left of the context)", whole(0))
    _flag(group, "-t --threads N", "CPU threads (one per core; one for small models)", whole(1, MAX_THREADS))
    chunk = "prompt tokens evaluated in one step (512; on a CUDA device 4096, in float32 2048, or what fits)"
    _flag(group, "--prefill-chunk N", chunk, whole(1))
    device = "cpu, cuda, cuda:N (the card of this number), or auto: a CUDA device if it can run the model (auto)"
    _flag(group, "--device NAME", device, device_name, "auto")
    # Names that the C engine has; whichever of them comes last counts.
    group.add_argument("--backend", dest="device", metavar="NAME", type=_backend, help="the same: cpu, cuda or auto")
    for name in ("cpu", "cuda"):
        group.add_argument(
            f"--{name}", dest="device", action="store_const", const=name, help=f"the same as --device {name}"
        )
    _flag(group, "--sessions N", "conversations that a CUDA device has room for (what the command needs)", whole(1))
    quality = "float32 on a CUDA device, nearly the CPU's results, but slow; or not (float32 for models up to 32 MiB)"
    group.add_argument("--quality", action=argparse.BooleanOptionalAction, help=quality)
    layout = "of IQ2_XXS experts on a CUDA device: b, a (larger), or auto: a if everything fits (b)"
    _flag(group, "--expert-layout NAME", layout, expert_layout, "b")
    _flag(group, "--no-warmup", "on a CUDA device compile kernels when they are first needed, not at the start")
    group.add_argument("--version", action=_Version, nargs=0, help="print the version")
    topics = f"this text, or one part: {', '.join(TOPICS)}"
    group.add_argument("-h", "--help", metavar="TOPIC", action=_Help, nargs="?", help=topics)


def _sampling_flags(group: argparse._ArgumentGroup) -> None:
    _flag(group, "--temp F", "temperature; 0 takes the most probable token (1)", _number(0, math.inf), 1.0)
    _flag(group, "--top-p F", "keep the most probable tokens up to this sum (1)", _number(0, 1), 1.0)
    _flag(group, "--min-p F", "drop tokens less probable than this times the best (0.05)", _number(0, 1), 0.05)
    _flag(group, "--top-k N", "keep this many tokens; 0: all (0)", whole(0), 0)
    _flag(group, "--seed N", "same seed, same answer; 0: random (0)", _seed)


def _prompt_flags(group: argparse._ArgumentGroup) -> None:
    _flag(group, "-p --prompt TEXT", "answer this and end")
    _flag(group, "--prompt-file FILE", "take the prompt from a file; -: from standard input", file_name)
    _flag(group, "--raw-prompt", "the prompt is the model's whole input: no template, special tokens as their text")
    _flag(group, "-sys --system TEXT", "system text", default="")
    modes = (
        ("--think", "high", "think before answering (the default)"),
        ("--think-max", "max", "think as hard as possible"),
        ("--nothink", "none", "answer at once"),
    )
    for flag, mode, help in modes:
        group.add_argument(flag, dest="mode", action="store_const", const=mode, default="high", help=help)
    _flag(group, "--hide-thinking", "do not print the thinking")
    _flag(group, "--template NAME", "chat template: official, or ds4 (the C engine's)", template, "official")


def _diagnostic_flags(group: argparse._ArgumentGroup) -> None:
    inspect = "print what a model file holds and what would be refused (default: that of --model)"
    group.add_argument("--inspect", metavar="FILE", nargs="?", const=True, type=file_name, help=inspect)
    _flag(group, "--plan", "print what the model takes on a CUDA device with --ctx, --sessions and the like")
    _flag(group, "--cards LIST", "with --plan: sizes of cards in GB, with commas between (141,96,80,24)", _cards)
    _flag(group, "--dump-tokens", "print the tokens of the prompt")
    _flag(
        group, "--dump-logits FILE", "write the logits after the prompt: .npz (tokens, logits), .npy, else raw float32",
        file_name,
    )  # fmt: skip
    _flag(
        group, "--dump-logprobs FILE", "write a greedy answer's most probable tokens as JSON; -: to stdout", file_name
    )
    _flag(group, "--logprobs-top-k N", "how many of them at each step (20)", whole(1))
    _flag(
        group, "--decode-consistency N", "compare the logits of N decode steps with those of a fresh prefill", whole(1)
    )
    _flag(
        group, "--perplexity-file FILE", "print the perplexity of a text, in windows of --ctx tokens (4096)", file_name
    )
    _flag(group, "--imatrix-out FILE", "collect the importance of the experts' inputs into this file (.dat)", file_name)
    _flag(
        group,
        "--imatrix-dataset FILE",
        "with --imatrix-out: the prompts to evaluate, .jsonl or rendered text",
        file_name,
    )
    _flag(group, "--imatrix-max-prompts N", "with --imatrix-out: end after N prompts", whole(1))
    _flag(group, "--imatrix-max-tokens N", "with --imatrix-out: end after N tokens", whole(1))


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            limits = f"from {low} on" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limits}")
        return value

    return number


def _seed(text: str) -> int | None:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**63 - 1}")
    return value or None


def _number(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and math.isfinite(value)):
            limits = f"from {low} on" if math.isinf(high) else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {limits}")
        return value

    return number


def file_name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name of the file is empty")
    return text


def device_name(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; use auto, cpu, cuda or cuda:N")
    return text


def expert_layout(text: str) -> str:
    if text not in ("auto", "a", "b"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a layout of the experts; use auto, a or b")
    return text


def _backend(text: str) -> str:
    if text in ("metal", "rocm"):
        raise argparse.ArgumentTypeError(f"the backend {text} is not built yet; use cpu or cuda")
    if text not in ("auto", "cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a backend; use cpu, cuda or auto")
    return text


def _cards(text: str) -> tuple[float, ...]:
    try:
        sizes = tuple(float(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or not all(0 < size < math.inf for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes in GB, such as 141,96,24")
    return sizes


def template(text: str) -> str:
    if text not in ("official", "ds4"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a template; use official or ds4")
    return text
