"""The command `ds4-kv`: look into a directory of stored conversations, check it, make room, move entries.

What its commands do is in `ds4.cli.kv_entries`, which loads torch: flags and mistakes in them answer at once.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ds4 import __version__
from ds4.cli.main import run

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status: 0, 1 if something is wrong with the directory, 2 for a mistake."""
    return run("ds4-kv", lambda: partial(_run, build_parser().parse_args(sys.argv[1:] if argv is None else argv)))


def _run(options: argparse.Namespace) -> int:
    from ds4.cli.kv_entries import run_command

    return run_command(options)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="ds4-kv",
        description="Look after the conversations that a server keeps with --kv-disk-dir.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}", help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        one.add_argument("directory", type=Path, metavar="DIR", help="the directory of --kv-disk-dir")
        return one

    listing = command("list", "list all entries, those used last first")
    listing.add_argument("--no-text", action="store_true", help="do not show how their text begins")
    showing = command("show", "say all about one entry")
    showing.add_argument("entry", metavar="KEY", help="its key, or how that begins")
    showing.add_argument("--text", action="store_true", help="print all of its text")
    checking = command("verify", "read every byte and check it")
    checking.add_argument("entry", nargs="*", metavar="KEY", help="only these; default: all")
    checking.add_argument("--delete", action="store_true", help="delete what is damaged or cannot be used")
    pruning = command("prune", "delete the entries that are worth least until the rest fits a size")
    pruning.add_argument("--size", type=_size, required=True, metavar="SIZE", help="bytes; K, M, G behind them count")
    exporting = command("export", "write one entry, with all it builds on, to one file")
    exporting.add_argument("entry", metavar="KEY", help="its key, or how that begins")
    exporting.add_argument("file", type=Path, metavar="FILE", help="the new file")
    importing = command("import", "take in a file that export wrote")
    importing.add_argument("file", type=Path, metavar="FILE", help="the file")
    return parser


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)([kmg]?)i?b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or a number with K, M or G")
    return int(match[1]) * _UNITS[match[2]]


if __name__ == "__main__":
    sys.exit(main())
