"""The command `ds4-imatrix-text`: conversations and plain text as rendered prompts for `ds4 --imatrix-dataset`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ds4 import __version__
from ds4.cli.main import OK, complain, run
from ds4.cli.options import Parser, file_name, template, whole

PROGRAM = "ds4-imatrix-text"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status as of `ds4.cli.main.main`."""
    return run(PROGRAM, lambda: _prepare(build_parser().parse_args(sys.argv[1:] if argv is None else list(argv))))


def build_parser() -> Parser:
    """The parser of the command's flags."""
    from ds4.quantize.calibration import MODES

    parser = Parser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Render conversations (.jsonl) and plain text (other files) into one file of prompts, which ds4"
        " --imatrix-dataset and the C engine read.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}", help="print the version")
    parser.add_argument("sources", nargs="+", metavar="FILE", type=file_name, help=".jsonl: conversations; else text")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", type=file_name, help="file to write")
    mode = "render each conversation as given, with thinking, without (nothink), or twice (both) (given)"
    parser.add_argument("--mode", choices=MODES, default="given", help=mode)
    parser.add_argument(
        "--template", type=template, default="official", metavar="NAME", help="official, or ds4 (official)"
    )
    block = "characters of plain text in one prompt (8192)"
    parser.add_argument("--block", type=whole(1), default=8192, metavar="N", help=block)
    return parser


def _prepare(args: Any) -> Callable[[], int]:
    from ds4.quantize.calibration import build

    def job() -> int:
        built = build(args.sources, args.out, mode=args.mode, profile=args.template, block=args.block)
        for reason, count in sorted(built.left_out.items()):
            complain(f"{count} left out: {reason}", PROGRAM)
        print(f"{args.out}: {built.prompts} prompts, {built.characters} characters")
        return OK

    return job


if __name__ == "__main__":
    sys.exit(main())
