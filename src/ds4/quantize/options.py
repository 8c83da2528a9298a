"""The command line of `ds4-quantize`, read without loading anything heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds4 import __version__

MAX_JOBS = 1024

_EPILOG = """\
examples:
  ds4-quantize DeepSeek-V4-Flash --dry-run
  ds4-quantize DeepSeek-V4-Flash --out flash-q2.gguf --recipe q2 --imatrix flash.dat
  ds4-quantize DeepSeek-V4-Flash --out flash-q2.gguf --compare-tensor 'blk.3.ffn_*_exps.weight'
"""


@dataclass(frozen=True)
class Options:
    """The command line as values. `out` may be None for a dry run only; `jobs` None is what suits the device."""

    checkpoint: Path
    out: Path | None = None
    recipe: str = "q2"
    last_layers: int | None = None
    overrides: tuple[str, ...] = ()
    imatrix: Path | None = None
    jobs: int | None = None
    memory_gib: float = 8.0
    device: str = "auto"
    name: str | None = None
    drafts: bool = True
    skip: tuple[str, ...] = ()
    dry_run: bool = False
    compare: str | None = None
    force: bool = False


def parse(argv: Sequence[str]) -> Options:
    """Read the arguments; exits with 0 after --help and with 2 and a message for what cannot be used."""
    parser = build_parser()
    args = parser.parse_args(list(argv))
    if args.out is None and not args.dry_run:
        parser.error("--out is missing: the name of the file to write (or to compare)")
    if args.dry_run and args.compare is not None:
        parser.error("--dry-run and --compare-tensor cannot run together; give one")
    if args.last_layers is not None and args.recipe != "q2-q4":
        parser.error("--last-layers belongs to --recipe q2-q4; give that too")
    return Options(
        checkpoint=args.checkpoint,
        out=args.out,
        recipe=args.recipe,
        last_layers=args.last_layers,
        overrides=tuple(args.override),
        imatrix=args.imatrix,
        jobs=args.jobs,
        memory_gib=args.memory_gib,
        device=args.device,
        name=args.name,
        drafts=not args.no_drafts,
        skip=tuple(args.skip),
        dry_run=args.dry_run,
        compare=args.compare,
        force=args.force,
    )


def build_parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    parser = argparse.ArgumentParser(
        prog="ds4-quantize",
        description="Makes a GGUF file of a DeepSeek V4 checkpoint (Hugging Face folder: official or transformers' "
        "names; FP8, FP4, bf16). A run that was stopped goes on when it is started again with the same arguments.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"%(prog)s {__version__}", help="print the version")
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="folder with config.json, tokenizer.json, *.safetensors")
    add("-o", "--out", type=Path, metavar="FILE", help="file to write; drafts go to FILE-mtp.gguf or FILE-dspark.gguf")
    add(
        "-r", "--recipe", choices=("q2", "q2-q4", "q4", "mxfp4", "q8"), default="q2", help="routed experts (default q2)"
    )
    add("--last-layers", type=_whole(0, 1024), metavar="N", help="q2-q4: layers at the end with Q4_K (default 6)")
    add("--override", action="append", default=[], metavar="FAMILY=TYPE", help="another type for a family of tensors")
    add("--imatrix", type=Path, metavar="FILE", help="importance of the experts' inputs, from ds4 --imatrix-out")
    add(
        "-j",
        "--jobs",
        type=_whole(1, MAX_JOBS),
        metavar="N",
        help="pieces in work at once (default: processors; 4 on a GPU)",
    )
    add("--memory-gib", type=_positive, default=8.0, metavar="X", help="limit of the pieces in work (default 8)")
    add("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:N (default auto)")
    add("--name", type=_text, metavar="TEXT", help="name recorded in the file (default: that of the folder)")
    add("--no-drafts", action="store_true", help="leave MTP and DSpark blocks out")
    add("--skip", action="append", default=[], metavar="PATTERN", help="leave out tensors of the checkpoint")
    add("--dry-run", action="store_true", help="print the tensors by family, types and sizes, and write nothing")
    add("--compare-tensor", dest="compare", metavar="NAME", help="error of a tensor (or pattern) of the finished FILE")
    add("--force", action="store_true", help="replace a file that exists")
    return parser


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return read


def _text(text: str) -> str:
    if any("\ud800" <= char <= "\udfff" for char in text):  # how Python shows bytes that are no UTF-8
        raise argparse.ArgumentTypeError("this is not UTF-8 text")
    return text


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0.01 on")
    return value
