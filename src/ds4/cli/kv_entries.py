"""What the commands of `ds4-kv` do; each takes the store and the flags and gives the exit status."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

from ds4.errors import Ds4Error, FileFormatError
from ds4.kvstore.container import HEADER_BYTES
from ds4.kvstore.disk import Files
from ds4.kvstore.reading import Entry, opened, verify
from ds4.kvstore.store import Store
from ds4.kvstore.transfer import check_exported, export_entry, import_entry

_SHOWN_BYTES = 60
_MODELS = {0: "flash", 1: "pro"}


def run_command(options: argparse.Namespace) -> int:
    """Run what the flags of `ds4.cli.kv` name. Raises Ds4Error."""
    if options.command == "import" and not options.directory.exists():
        check_exported(options.file)  # no directory is made for what is damaged
    files = Files(options.directory, create=options.command == "import")
    try:
        # What cannot be read is told by `verify` and, once, by `list`.
        return _COMMANDS[options.command](Store(files, ignored=lambda name, error: None), options)
    finally:
        files.close()


def _list(store: Store, options: argparse.Namespace) -> int:
    entries = sorted(store.entries(), key=lambda entry: entry.used, reverse=True)
    print(f"{'key':12} {'tokens':>8} {'from':>8} {'bytes':>8} {'hits':>5} {'age':>5} {'unused':>6} reason     text")
    for entry in entries:
        mark = "" if store.usable(entry) else " [what it builds on is gone]"
        try:
            text = "" if options.no_text else _text(store, entry, _SHOWN_BYTES)
        except (FileFormatError, OSError) as error:  # a server may have let it go meanwhile
            text = f"[{error.strerror if isinstance(error, OSError) else error}]"
        print(
            f"{entry.name[:12]} {entry.tokens:8} {entry.start:8} {_bytes(entry.size):>8} {entry.hits:5} "
            f"{_age(entry.created):>5} {_age(entry.used):>6} {entry.reason.name.lower():10} {text}{mark}"
        )
    for name in store.broken():
        print(f"{name[:12]} cannot be read; verify says why")
    print(f"{len(entries)} entries, {_bytes(store.total())} in all files")
    return 0


def _show(store: Store, options: argparse.Namespace) -> int:
    entry = _find(store, options.entry)
    if options.text:
        text = _text(store, entry, None)
        # A text from elsewhere must not steer a terminal.
        sys.stdout.write(_printable(text, "\n\t") if sys.stdout.isatty() else text)
        return 0
    rows = {
        "key": entry.name[:40],
        "tokens": entry.tokens,
        "builds on": "nothing" if entry.parent is None else f"{entry.parent[:40]} ({entry.start} tokens)",
        "usable": "yes" if store.usable(entry) else "no, what it builds on is gone",
        "bytes": entry.size,
        "key bytes": entry.key_bytes,
        "reason": entry.reason.name.lower(),
        "model": f"{_MODELS.get(entry.model, 'other')}, {_experts(entry)}, fingerprint {entry.fingerprint}",
        "context": entry.context,
        "hits": entry.hits,
        "created": _date(entry.created),
        "last used": _date(entry.used),
        "tool calls": sum(len(turn.calls) for turn in store.turns(entry)),
        "text": _text(store, entry, 400),
    }
    for name, value in rows.items():
        print(f"{name + ':':12} {value}")
    return 0


def _verify(store: Store, options: argparse.Namespace) -> int:
    names = [_name(store, key) for key in options.entry] or [*(e.name for e in store.entries()), *store.broken()]
    starts = {entry.name: entry.start for entry in store.entries()}
    wrong = 0
    # What others build on comes first: if it is deleted, they are of no use either.
    for name in sorted(set(names), key=lambda name: (starts.get(name, 0), name)):
        problem = None
        try:
            entry = verify(store.files, name)
            if not store.usable(entry):
                problem = f"what it builds on ({entry.parent}) is gone"
        except FileNotFoundError:
            print(f"{name[:40]}: was deleted meanwhile")
        except (FileFormatError, OSError) as error:
            problem = str(error)
        if problem is not None:
            wrong += 1
            print(f"{name[:40]}: {problem}")
            if options.delete:
                store.remove(name)
    print(f"{len(names)} entries checked, {wrong} wrong{' and deleted' if wrong and options.delete else ''}")
    return 1 if wrong and not options.delete else 0


def _prune(store: Store, options: argparse.Namespace) -> int:
    gone, left = store.prune(options.size), store.total()
    rest = "" if left <= options.size else " in the index and files that are no entries"
    print(f"{len(gone)} entries deleted, {_bytes(left)} left{rest}")
    return 0


def _export(store: Store, options: argparse.Namespace) -> int:
    size = export_entry(store, _find(store, options.entry), options.file)
    print(f"{options.file}: {_bytes(size)}")
    return 0


def _import(store: Store, options: argparse.Namespace) -> int:
    entry = import_entry(store, options.file)
    print(f"{entry.name[:40]}: {entry.tokens} tokens, {_bytes(entry.size)}")
    return 0


def _find(store: Store, key: str) -> Entry:
    """The entry whose key begins so. Raises Ds4Error."""
    name = _name(store, key)
    entry = store.get(name)
    if entry is None:
        raise Ds4Error(f"{name[:40]} cannot be read; verify says why")
    return entry


def _name(store: Store, key: str) -> str:
    """The name of the entry, or of the damaged file, whose key begins so. Raises Ds4Error."""
    key = key.removesuffix(".kv")
    names = [*(entry.name for entry in store.entries()), *store.broken()]
    found = [name for name in names if key and name.startswith(key)]
    if len(found) != 1:
        raise Ds4Error(f"{'more than one entry has' if found else 'no entry has'} a key that begins with {key!r}")
    return found[0]


def _text(store: Store, entry: Entry, limit: int | None) -> str:
    """How the text of an entry begins; with a limit on one line and without characters that steer a terminal."""
    with _reading(store, entry) as fd:
        data = os.pread(fd, entry.key_bytes if limit is None else min(limit, entry.key_bytes), HEADER_BYTES + 4)
    text = data.replace(b"\xff", b"").decode(errors="replace")
    if limit is None:
        return text
    return _printable(text)


def _printable(text: str, others: str = "") -> str:
    return "".join(char if char.isprintable() or char in others else " " for char in text)


@contextlib.contextmanager
def _reading(store: Store, entry: Entry) -> Iterator[int]:
    with opened(store.files, entry.name) as found:
        yield found.fd


def _experts(entry: Entry) -> str:
    return f"experts of {entry.quant_bits} bits" if entry.quant_bits else "experts of unknown bits"


def _bytes(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "K", "M", "G", "T"):
        if value < 1024 or unit == "T":
            break
        value /= 1024
    return f"{value:.0f}{unit}" if unit == "B" or value >= 100 else f"{value:.1f}{unit}"


def _date(moment: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (OverflowError, ValueError, OSError):
        return f"{moment} seconds after 1970"


def _age(moment: int) -> str:
    seconds = max(0, int(time.time()) - moment)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


_COMMANDS: dict[str, Callable[[Store, argparse.Namespace], int]] = {
    "list": _list,
    "show": _show,
    "verify": _verify,
    "prune": _prune,
    "export": _export,
    "import": _import,
}
