"""The command `ds4-bench`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ds4 import __version__
from ds4.bench.run import Job, Layout, run, wide_console
from ds4.bench.settings import Outputs
from ds4.errors import Ds4Error
from ds4.process import exit_at_interrupt, wait_passively

OK, FAILED, SLOWER, INTERRUPTED = 0, 1, 3, 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

_WALK, _RUN, _OUT, _OTHER = "What is measured", "Model and device", "Results", "Instead of the walk"


def _flag(*names: str, panel: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, help=help, **more)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ds4-bench {__version__}")
        raise typer.Exit


@app.command()
def bench(
    model: Annotated[Path | None, _flag("-m", "--model", panel=_RUN, help="model file (the embedded one)")] = None,
    device: Annotated[str, _flag("--device", panel=_RUN, help="auto, cpu, cuda or cuda:N")] = "auto",
    threads: Annotated[int | None, _flag("-t", "--threads", panel=_RUN, help="CPU threads", min=1, max=1024)] = None,
    chunk: Annotated[int | None, _flag("--prefill-chunk", panel=_RUN, help="tokens of a prefill step", min=1)] = None,
    quality: Annotated[
        bool | None, _flag("--quality/--no-quality", panel=_RUN, help="float32 on a CUDA device (up to 32 MiB)")
    ] = None,
    layout: Annotated[Layout, _flag("--expert-layout", panel=_RUN, help="of IQ2_XXS experts on CUDA devices")] = "b",
    alloc: Annotated[int | None, _flag("--ctx-alloc", panel=_RUN, help="context (what is needed)", min=1)] = None,
    start: Annotated[int | None, _flag("--ctx-start", panel=_WALK, help="first context (2048; small ones 64)")] = None,
    end: Annotated[int | None, _flag("-c", "--ctx-max", "--ctx", panel=_WALK, help="last one (32768; 256)")] = None,
    multiply: Annotated[
        int | None, _flag("--step-mul", panel=_WALK, help="each is so many times the one before (1; 2)")
    ] = None,
    increment: Annotated[int | None, _flag("--step-incr", panel=_WALK, help="or so many tokens more (2048)")] = None,
    decode: Annotated[int | None, _flag("-n", "--gen-tokens", panel=_WALK, help="decoded at each (128; 16)")] = None,
    sessions: Annotated[int, _flag("--sessions", panel=_WALK, help="sessions that decode together")] = 1,
    repeats: Annotated[int, _flag("--repeat", "--repeats", panel=_WALK, help="runs whose median counts")] = 3,
    first_token: Annotated[
        int | None,
        _flag("--first-token", panel=_WALK, help="prompt for the time to first token; 0: no (4096; 64)"),
    ] = None,
    seed: Annotated[int, _flag("--seed", panel=_WALK, help="of the random tokens")] = 1,
    prompt: Annotated[Path | None, _flag("--prompt-file", panel=_WALK, help="a text instead of random tokens")] = None,
    chat: Annotated[
        Path | None, _flag("--chat-prompt-file", panel=_WALK, help="the same as a question, in the chat template")
    ] = None,
    system: Annotated[str, _flag("-sys", "--system", panel=_WALK, help="system text of --chat-prompt-file")] = "",
    fill: Annotated[
        list[int] | None,
        _flag("--fill-context", panel=_OTHER, help="measure at this context, filled with random state; repeatable"),
    ] = None,
    fill_prefill: Annotated[
        int | None, _flag("--fill-prefill", panel=_OTHER, help="prefill the last N tokens of it, and measure that")
    ] = None,
    growth: Annotated[bool, _flag("--growth", panel=_OTHER, help="whether memory grows by tokens or requests")] = False,
    growth_tokens: Annotated[int, _flag("--growth-tokens", panel=_OTHER, help="tokens to decode", min=0)] = 20_000,
    growth_requests: Annotated[int, _flag("--growth-requests", panel=_OTHER, help="requests to serve", min=0)] = 500,
    compare: Annotated[
        tuple[Path, Path] | None,
        _flag("--compare", panel=_OTHER, help="compare two files of --json", metavar="OLD NEW"),
    ] = None,
    threshold: Annotated[
        float | None, _flag("--threshold", panel=_OTHER, help="with --compare: status 3 if a ratio is below", min=0.0)
    ] = None,
    csv: Annotated[Path | None, _flag("--csv", panel=_OUT, help="write the rows as CSV")] = None,
    json: Annotated[Path | None, _flag("--json", panel=_OUT, help="write everything as JSON")] = None,
    plot: Annotated[Path | None, _flag("--plot", panel=_OUT, help="draw both speeds: .png, .svg or .pdf")] = None,
    profile: Annotated[Path | None, _flag("--profile", panel=_OUT, help="profile steps into this JSON")] = None,
    logits: Annotated[
        Path | None, _flag("--dump-frontier-logits-dir", panel=_OUT, help="write the logits at each context, .npy")
    ] = None,
    note: Annotated[str, _flag("--note", panel=_OUT, help="a remark to keep with the results")] = "",
    version: Annotated[
        bool, _flag("--version", panel=_OTHER, help="print the version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Measure prefill and decode at growing contexts, and what limits them (docs/performance.md)."""
    if threshold is not None and compare is None:
        raise typer.BadParameter("--threshold belongs to --compare; give that too")
    if compare is not None:
        raise typer.Exit(_compare(*compare, threshold))
    if prompt is not None and chat is not None:
        raise typer.BadParameter("--prompt-file and --chat-prompt-file are given both; give one")
    if system and chat is None:
        raise typer.BadParameter("--system belongs to --chat-prompt-file; give that too")
    if growth and (fill or profile or csv or plot or logits):
        raise typer.BadParameter("--growth measures memory alone; of the files it writes only --json")
    wanted: dict[str, Any] = {
        "start": start, "end": end, "multiply": multiply, "increment": increment, "decode": decode,
        "sessions": sessions, "repeats": repeats, "first_token": first_token, "seed": seed,
        "fill": tuple(fill) if fill else None, "fill_prefill": fill_prefill,
    }  # fmt: skip
    run(
        Job(
            model=model, device=device, threads=threads, chunk=chunk, quality=quality, layout=layout, alloc=alloc,
            wanted={name: value for name, value in wanted.items() if value is not None},
            prompt=prompt, chat=chat, system=system, note=note,
            growth=(growth_tokens, growth_requests) if growth else None,
            outputs=Outputs(csv, json, plot, profile, logits),
        )
    )  # fmt: skip


def _compare(old: Path, new: Path, threshold: float | None) -> int:
    from ds4.bench.compare import compare

    found, console = compare(old, new), wide_console()
    console.print(found.table())
    for line in (*found.differences, *found.only):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if threshold is None or found.worst() >= threshold:
        return OK
    console.print(f"slower: the lowest ratio is {found.worst():.3f}, below {threshold:g}", highlight=False)
    return SLOWER


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status: 0, 1 for an error, 2 for wrong flags, 3 for slower than the threshold."""
    wait_passively()
    try:
        with exit_at_interrupt():
            app(args=list(sys.argv[1:] if argv is None else argv), prog_name="ds4-bench")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED if end.code else OK
    except Ds4Error as error:
        print(f"ds4-bench: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return OK


if __name__ == "__main__":
    sys.exit(main())
