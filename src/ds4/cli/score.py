"""The command `ds4-score`: how probable a model finds given continuations, and which of two models more so."""

from __future__ import annotations

import sys
from argparse import BooleanOptionalAction
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ds4 import __version__
from ds4.cli.main import INTERRUPTED, OK, complain, load_engine, run
from ds4.cli.options import MAX_THREADS, Options, Parser, device_name, expert_layout, file_name, template, whole

if TYPE_CHECKING:
    from ds4.evals.score import Comparison, Results

PROGRAM = "ds4-score"
CONTEXT = 32_768
"""Tokens of prompt and continuation, if --ctx says nothing else."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status as of `ds4.cli.main.main`."""
    return run(PROGRAM, lambda: _prepare(sys.argv[1:] if argv is None else list(argv)))


def build_parser() -> Parser:
    """The parser of the command's flags."""
    parser = Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Score given continuations with a model, or compare two results.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}", help="print the version")
    cases = "continuations: a .jsonl file, a manifest.tsv, or a folder with one"
    parser.add_argument("cases", nargs="?", metavar="CASES", type=file_name, help=cases)
    parser.add_argument("-o", "--out", metavar="FILE", type=file_name, help="file for the result (JSON)")
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), type=file_name, help="compare the results in these two files"
    )
    parser.add_argument("-m", "--model", metavar="FILE", type=file_name, help="model file (the model of ds4)")
    parser.add_argument("-c", "--ctx", metavar="N", type=whole(2), help=f"tokens of a case ({CONTEXT})")
    parser.add_argument("-t", "--threads", metavar="N", type=whole(1, MAX_THREADS), help="CPU threads")
    parser.add_argument("--prefill-chunk", metavar="N", type=whole(1), help="tokens evaluated in one step")
    parser.add_argument("--device", metavar="NAME", type=device_name, default="auto", help="cpu, cuda, cuda:N or auto")
    quality = "float32 on a CUDA device, or not (float32 for models up to 32 MiB)"
    parser.add_argument("--quality", action=BooleanOptionalAction, help=quality)
    layout = "of IQ2_XXS experts on a CUDA device: auto, a or b (b)"
    parser.add_argument("--expert-layout", metavar="NAME", type=expert_layout, default="b", help=layout)
    parser.add_argument("--max-cases", metavar="N", type=whole(1), help="score the first N cases only")
    parser.add_argument(
        "--template", type=template, default="official", metavar="NAME", help="official, or ds4 (official)"
    )
    return parser


def _prepare(argv: list[str]) -> Callable[[], int]:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.compare is not None:
        if args.cases is not None or args.out is not None:
            parser.error("--compare needs two results only; leave CASES and --out away")
        a, b = args.compare
        return lambda: _compare(a, b, sys.stdout)
    if args.cases is None or args.out is None:
        parser.error("give the continuations and --out FILE, or --compare A B")
    return _score(args)


def _score(args: Any) -> Callable[[], int]:
    from ds4.cli.terminal import Bar, interrupts
    from ds4.evals.cases import read_cases
    from ds4.evals.score import Results, score_all
    from ds4.files import destination, refuse_input

    destination(args.out)
    refuse_input(args.out, [args.cases, *([] if args.model is None else [args.model])])
    options = Options(
        model=args.model,
        context=args.ctx,
        threads=args.threads,
        prefill_chunk=args.prefill_chunk,
        device=args.device,
        quality=args.quality,
        expert_layout=args.expert_layout,
    )
    engine = load_engine(options, context=CONTEXT, history=False)
    cases = read_cases(args.cases, engine.tokenizer, args.template)[: args.max_cases]
    results = Results(Path(args.model).name if args.model else "embedded", Path(args.cases).name)

    def job() -> int:
        with interrupts() as stopped, Bar("scoring, cases", sys.stderr) as bar:
            done = score_all(engine, cases, results, bar, stopped)
        if results.scores:
            results.save(args.out)
            _print_summary(results, sys.stdout)
        if not done:
            complain(f"stopped after {len(results.scores)} of {len(cases)} cases", PROGRAM)
        return OK if done else INTERRUPTED

    return job


def _print_summary(results: Results, out: TextIO) -> None:
    s = results.summary()
    out.write(f"{s['cases']} cases, {s['tokens']} tokens: NLL {s['nll_per_token']:.5f} nats a token\n")
    out.write(
        f"first token right in {s['first_matches']}, greedy prefix {s['mean_greedy_prefix']:.2f} tokens on average,"
        f" whole continuation in {s['whole_greedy']}\n"
    )
    if "reference_logprob_difference" in s:
        out.write(f"logprobs differ from the reference's by {s['reference_logprob_difference']:.5f} on average\n")
    if "reference_first_same" in s:
        out.write(
            f"the reference's alternatives: same most probable token {100 * s['reference_first_same']:.1f} %,"
            f" {100 * s['reference_top_found']:.1f} % among as many of the model's, logprobs differ by"
            f" {s['reference_top_difference']:.5f}\n"
        )


def _compare(a: str, b: str, out: TextIO) -> int:
    from ds4.evals.score import Results, compare

    _print_comparison(compare(Results.load(a), Results.load(b)), out)
    return OK


def _print_comparison(c: Comparison, out: TextIO) -> None:
    low, high = c.interval
    out.write(f"{c.cases} cases, {c.tokens} tokens; B against A\n")
    out.write(f"NLL a token: A {c.nll[0]:.5f}, B {c.nll[1]:.5f}\n")
    out.write(f"difference {c.difference:+.5f} (95 %: {low:+.5f} to {high:+.5f}); below 0 B is better\n")
    out.write(f"B wins {c.wins}, loses {c.losses}, ties {c.ties}\n")
    out.write(f"first token right: A {c.first_matches[0]}, B {c.first_matches[1]}\n")
    out.write(f"greedy prefix: A {c.greedy_prefix[0]:.2f}, B {c.greedy_prefix[1]:.2f} tokens\n")
    if c.only_a or c.only_b:
        out.write(f"not compared: {c.only_a} cases that only A has, {c.only_b} that only B has\n")
    for title, some in (("B is best in", c.best), ("B is worst in", c.worst)):
        if some:
            out.write(f"{title}: {', '.join(f'{id} ({value:+.4f})' for id, value in some)}\n")


if __name__ == "__main__":
    sys.exit(main())
