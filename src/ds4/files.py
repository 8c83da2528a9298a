"""Files: writing so that a reader finds the old one or the whole new one; reading text and lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ds4.errors import Ds4Error

MAX_TEXT = 512 << 20
"""Bytes of a text that is read at all."""


def destination(path: str | os.PathLike[str]) -> Path:
    """The path behind all links; a rename onto it would replace whatever is there, a device as well.

    Raises:
        Ds4Error: something else than a file is there, or its folder is missing or cannot be looked into or written.
    """
    try:
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            raise Ds4Error(f"{path}: cannot be written: {target.parent}: no such folder; make it first")
        if not os.access(target.parent, os.W_OK):
            raise Ds4Error(f"{path}: cannot be written: no permission for {target.parent}; check the folder")
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return target
    except OSError as error:
        raise Ds4Error(f"{path}: cannot be written: {error.strerror}; check the folder") from error
    except ValueError as error:
        raise Ds4Error(f"{str(path)!r}: cannot be written: this is not the name of a file") from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a link to itself" if stat.S_ISLNK(mode) else "not a file"
        raise Ds4Error(f"{path}: cannot be written: it is {kind}; give the name of a file")
    return target


def refuse_input(out: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str]]) -> None:
    """Raise `Ds4Error` if the file to write is one of those to read, under whatever name."""
    for path in inputs:
        with contextlib.suppress(OSError, ValueError):
            if os.path.samefile(out, path):
                raise Ds4Error(f"{out}: is read as {path}, which would be replaced; give another file to write")


@contextlib.contextmanager
def temporary(target: Path) -> Iterator[Path]:
    """A new file beside the target, on the same disk so that the final rename is one step; gone at the end."""
    path = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        path.touch(exist_ok=False)
        yield path
    except OSError as error:
        raise Ds4Error(f"{target}: cannot be written: {error.strerror}; check the folder and the disk") from error
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file to write in place of `path`, which it becomes if the block ends without an error.

    Raises:
        Ds4Error: the path cannot be written, or is something else than a file; then what is there stays as it was.
    """
    target = destination(path)
    with temporary(target) as new:
        yield new
        os.replace(new, target)


def read_text(path: str | os.PathLike[str], limit: int = MAX_TEXT) -> str:
    """A file of UTF-8 text, without a byte order mark.

    Raises:
        Ds4Error: it cannot be read, is no UTF-8, or has more than `limit` bytes.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise Ds4Error(f"{path}: cannot be read: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:
        raise Ds4Error(f"{str(path)!r}: cannot be read: this is not the name of a file") from error
    if len(data) > limit:
        raise Ds4Error(f"{path}: more than {limit} bytes; give a smaller file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Ds4Error(f"{path}: not UTF-8 text: byte {error.start} is 0x{data[error.start]:02X}") from error


def json_lines(text: str, path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of each line that is not empty.

    Raises:
        Ds4Error: a line is no JSON object; the text names it.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Ds4Error(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise Ds4Error(f"{path}, line {number}: a JSON object is needed")
        yield number, value
