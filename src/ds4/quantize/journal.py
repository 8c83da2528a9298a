"""Which units of a file are done, so that an interrupted conversion goes on instead of starting over.

Beside `model.gguf` lie `model.gguf.part`, which has the final size from the start, and `model.gguf.journal`: a line of
JSON with the fingerprint of the whole conversion, then one line per finished unit with the CRC-32 of its bytes. A line
is written only after the bytes it speaks of have been synchronised, and believed only if they have that sum.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ds4.errors import Ds4Error
from ds4.quantize.plan import Unit

FORMAT = "ds4-quantize journal 1"

_LINE = re.compile(r"(\d+) ([0-9a-f]{8})")
_VERIFY = 1 << 24


def part_path(out: Path) -> Path:
    """The unfinished file of an output."""
    return out.with_name(out.name + ".part")


def journal_path(out: Path) -> Path:
    """The journal of an output."""
    return out.with_name(out.name + ".journal")


def checksum(data: memoryview) -> int:
    """CRC-32 of bytes."""
    return zlib.crc32(data)


class Workfile:
    """The unfinished file and its journal, locked against a second process.

    Args:
        out: the name that the file will have.
        size: its size in bytes.
        fingerprint: of everything that the bytes depend on; another one starts the file over.

    Raises:
        Ds4Error: not enough room, no permission, or another process writes the same file.
    """

    def __init__(self, out: Path, size: int, fingerprint: str) -> None:
        self.out, self.size, self.fingerprint = out, size, fingerprint
        self.part, self.journal = part_path(out), journal_path(out)
        self._waiting: list[tuple[int, int]] = []
        self._data = self._log = -1
        self.started_over = False
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        existed = self.part.exists()
        try:
            self._log = os.open(self.journal, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._still_there():
                raise BlockingIOError
        except BlockingIOError as error:
            raise Ds4Error(f"{self.out}: another ds4-quantize is writing this file; wait for it") from error
        except OSError as error:
            raise Ds4Error(f"{self.journal}: cannot be written: {error.strerror}; check the folder") from error
        head = self._lines()[:1]
        if not self._is_ours(head) and (existed or head):
            what = self.part if not head else self.journal
            raise Ds4Error(f"{what}: is not of ds4-quantize, which would write it; move it away, or give another --out")
        self.known = existed and head == [self._head()] and self.part.stat().st_size == self.size
        if not self.known:
            self.started_over = existed
            self._start()
        self._data = os.open(self.part, os.O_RDWR | os.O_CLOEXEC)

    def _still_there(self) -> bool:
        """The locked journal has its name; a process that ended between opening and locking has taken it away."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._log), self.journal.stat())
        return False

    @staticmethod
    def _is_ours(head: list[str]) -> bool:
        try:
            return bool(head) and json.loads(head[0])["format"] == FORMAT
        except (ValueError, TypeError, KeyError):
            return False

    def _head(self) -> str:
        return json.dumps({"format": FORMAT, "fingerprint": self.fingerprint})

    def _lines(self) -> list[str]:
        """The journal's whole lines; a crash may have cut the last one."""
        os.lseek(self._log, 0, os.SEEK_SET)
        text = b"".join(iter(lambda: os.read(self._log, 1 << 20), b"")).decode(errors="replace")
        return text.split("\n")[:-1]

    def _start(self) -> None:
        """A journal without units and a file that has all the room it needs; at no moment a file without journal."""
        try:
            self.part.unlink(missing_ok=True)
            os.ftruncate(self._log, 0)
            _append(self._log, self._head() + "\n")
            os.fsync(self._log)
            room = os.statvfs(self.part.parent)
            free = room.f_bavail * room.f_frsize
            if free < self.size:
                raise OSError(errno.ENOSPC, f"needs {self.size:,} bytes, {free:,} are free")
            data = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                # Reserved now, or the disk might fill after hours of work.
                os.posix_fallocate(data, 0, self.size)
            finally:
                os.close(data)
        except OSError as error:
            self.discard()
            raise Ds4Error(
                f"{self.out}: cannot be written: {error.strerror}; give --out on a disk with room"
            ) from error

    def finished(self, units: Sequence[Unit], progress: Callable[[Unit], None]) -> set[int]:
        """Numbers of the units whose bytes are there and have the sum that the journal has for them."""
        if not self.known:
            return set()
        sums: dict[int, int] = {}
        for line in self._lines()[1:]:
            match = _LINE.fullmatch(line)
            if match and int(match[1]) < len(units):
                sums[int(match[1])] = int(match[2], 16)  # of two for one unit the later counts
        _append(self._log, "\n")  # in case that the last line was cut off
        done = set()
        for number, sum in sums.items():
            if self._sum(units[number]) == sum:
                done.add(number)
                progress(units[number])
        return done

    def _sum(self, unit: Unit) -> int:
        total = 0
        for start in range(0, unit.nbytes, _VERIFY):
            total = zlib.crc32(os.pread(self._data, min(_VERIFY, unit.nbytes - start), unit.offset + start), total)
        return total

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes at a place of the file; may be called from several threads."""
        with _named(self.part):
            while data:
                written = os.pwrite(self._data, data, offset)
                data, offset = data[written:], offset + written

    def note(self, number: int, sum: int) -> None:
        """A unit has been written; the next `commit` makes that last."""
        self._waiting.append((number, sum))

    def commit(self) -> None:
        """Put the noted units on disk, bytes first."""
        if self._waiting:
            with _named(self.part):
                os.fdatasync(self._data)
            lines = "".join(f"{number} {sum:08x}\n" for number, sum in self._waiting)
            with _named(self.journal):
                _append(self._log, lines)
                os.fdatasync(self._log)
            self._waiting.clear()

    def sync(self) -> None:
        """Everything that was written is on disk when this returns."""
        with _named(self.part):
            os.fsync(self._data)

    def publish(self) -> None:
        """Give the file its name; the journal stays until `forget`."""
        os.replace(self.part, self.out)
        _sync_folder(self.out.parent)

    def discard(self) -> None:
        """Take the unfinished file and its journal away."""
        self.part.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)

    @staticmethod
    def forget(out: Path) -> None:
        """All files have their names: the journal has done its work."""
        journal_path(out).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the files; they stay."""
        for descriptor in (self._data, self._log):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._data = self._log = -1


def was_published(out: Path, fingerprint: str) -> bool:
    """Whether an interrupted run had already given this file its name (it has a journal left, and no part)."""
    journal = journal_path(out)
    if not out.is_file() or part_path(out).exists() or not journal.is_file():
        return False
    with journal.open(encoding="utf-8", errors="replace") as file:
        return file.readline() == json.dumps({"format": FORMAT, "fingerprint": fingerprint}) + "\n"


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of a descriptor, which name no file, name this one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _append(descriptor: int, text: str) -> None:
    os.lseek(descriptor, 0, os.SEEK_END)
    data = text.encode()
    while data:
        data = data[os.write(descriptor, data) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
