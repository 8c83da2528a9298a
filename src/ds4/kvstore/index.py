"""What is known of each file, kept in SQLite so that a start need not read thousands of files again.

The index is a copy: it says nothing that the files do not say, a row counts only for a file of the same size and time,
and a lost or damaged index is made anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("ds4.kvstore")

_SCHEMA = 2
_TIMEOUT = 5.0
_SELECT = "SELECT name, size, mtime, version, value FROM entry"


class Index:
    """Rows name -> (size, time of change, description). Failures are logged once, and then nothing is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lost = False

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        # SQLite makes the file with the permissions of others; the directory is the owner's, and so is this.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self._path, timeout=_TIMEOUT)
        try:
            with connection:
                connection.execute("PRAGMA synchronous = OFF")
                connection.execute("PRAGMA auto_vacuum = FULL")  # of a new file: it shrinks with what it says
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS entry"
                    " (name TEXT PRIMARY KEY, size INTEGER, mtime INTEGER, version INTEGER, value TEXT)"
                )
                yield connection
        finally:
            connection.close()

    def load(self) -> dict[str, tuple[int, int, dict[str, Any]]]:
        """All rows that make sense. A damaged index is deleted."""
        found = {}
        try:
            with self._open() as connection:
                for name, size, mtime, version, value in connection.execute(_SELECT):
                    with contextlib.suppress(ValueError, TypeError):
                        row = json.loads(value)
                        if version == _SCHEMA and isinstance(row, dict):
                            found[str(name)] = (int(size), int(mtime), row)
        except sqlite3.OperationalError as error:
            log.warning("the index %s cannot be read now, files are read instead: %s", self._path, error)
            return {}
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            log.warning("the index %s is made anew: %s", self._path, error)
            for suffix in ("", "-journal"):
                with contextlib.suppress(OSError):
                    os.unlink(str(self._path) + suffix)
            return {}
        return found

    def update(self, rows: Mapping[str, tuple[int, int, Mapping[str, Any]]], gone: Iterable[str] = ()) -> None:
        """Keep rows, and forget others."""
        gone = list(gone)
        if self._lost or not (rows or gone):
            return
        try:
            with self._open() as connection:
                connection.executemany(
                    "INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?, ?)",
                    [(name, size, mtime, _SCHEMA, json.dumps(value)) for name, (size, mtime, value) in rows.items()],
                )
                connection.executemany("DELETE FROM entry WHERE name = ?", [(name,) for name in gone])
        except (sqlite3.Error, OSError) as error:
            self._lost = True
            log.warning("the index %s is not kept from now on, files are read instead: %s", self._path, error)
