"""What the store does to its directory: every call that changes something on the disk is here, and nothing else.

All names are resolved relative to an open directory and are names of the store, so no path leads out of it; links are
not followed. Directory and files are the owner's only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ds4.errors import Ds4Error
from ds4.kvstore.container import is_file_name

LOCK_NAME = "lock"
INDEX_NAME = "index.sqlite"
_TEMPORARY = re.compile(r"[0-9a-f]{40}\.kv\.tmp\.[0-9]+\.[0-9]+")
_MAX_WRITE = 8 << 20


class Found(NamedTuple):
    """A file of the directory: its name, bytes, and when it was changed (ns)."""

    name: str
    size: int
    mtime_ns: int


class Files:
    """A directory of the store.

    Args:
        create: make it if it is not there; else it must be one that a store has used.

    Raises:
        Ds4Error: it cannot be made or used, belongs to another user, or is used for something else.
    """

    def __init__(self, directory: str | os.PathLike[str], create: bool = True) -> None:
        self.path = Path(directory)
        try:
            if create:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            what = "it is no directory" if isinstance(error, FileExistsError) else error.strerror or error
            raise Ds4Error(f"the directory {self.path} cannot be used: {what}") from None
        try:
            self._check_own(self._fd, used=not create)
        except BaseException:
            self.close()
            raise
        self._count = 0

    def _check_own(self, fd: int, used: bool = False) -> None:
        """That nobody else may look into it, and nothing else is kept in it."""
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise Ds4Error(
                f"the directory {self.path} belongs to another user (number {status.st_uid}); prompts would not be safe"
                " there: give another one, or run this as that user"
            )
        names = os.listdir(fd)
        ours = any(name == LOCK_NAME or is_file_name(name) or _TEMPORARY.fullmatch(name) for name in names)
        ours = ours or set(names) == {INDEX_NAME}
        if used and not ours:
            raise Ds4Error(f"the directory {self.path} cannot be used: no conversations are stored there")
        if names and not ours:
            raise Ds4Error(
                f"the directory {self.path} holds other files; give one of its own, as all files in it count for the"
                " space that stored conversations may take"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(fd, 0o700)

    def close(self) -> None:
        """Forget the directory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep all others, threads and processes, from changing which files there are."""
        fd = self._locked()
        try:
            yield
        finally:
            os.close(fd)

    def _locked(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            try:
                fd = os.open(LOCK_NAME, flags, 0o600, dir_fd=self._fd)
            except FileNotFoundError:
                self._make_again()
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if self._is(LOCK_NAME, fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # somebody deleted it meanwhile, so that others lock another one

    def _make_again(self) -> None:
        """Somebody deleted the directory: begin anew under the same name."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._check_own(fd)
            os.dup2(fd, self._fd, inheritable=False)
        finally:
            os.close(fd)

    def _is(self, name: str, fd: int) -> bool:
        try:
            there, here = os.stat(name, dir_fd=self._fd, follow_symlinks=False), os.fstat(fd)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def changed(self) -> int:
        """When the directory got or lost a file (ns)."""
        return os.fstat(self._fd).st_mtime_ns

    def scan(self) -> list[Found]:
        """All regular files."""
        found = []
        with os.scandir(self._fd) as listing:
            for entry in listing:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.append(Found(entry.name, status.st_size, status.st_mtime_ns))
        return found

    def open(self, name: str, write: bool = False) -> int:
        """Open an entry. Raises OSError."""
        _check(name)
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(name, flags, dir_fd=self._fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", name)
        return fd

    def create(self, name: str, size: int) -> tuple[int, str]:
        """A temporary file that becomes `name` later, with its space on the disk. Call it with the lock held.

        It is locked as long as it is open: one that is not was left behind by a process that ended.
        """
        _check(name)
        self._count += 1
        temporary = f"{name}.tmp.{os.getpid()}.{self._count}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self._fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                os.ftruncate(fd, size)
        except Exception:
            os.close(fd)
            self.discard(temporary)
            raise
        return fd, temporary

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data` at an offset."""
        view = memoryview(data)
        while view:
            done = os.pwrite(fd, view[:_MAX_WRITE], offset)
            view, offset = view[done:], offset + done

    def sync(self, fd: int) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(fd)

    def commit(self, temporary: str, name: str) -> None:
        """Make a temporary file an entry. Call it with the lock held."""
        _check(name)
        os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        os.fsync(self._fd)

    def write_header(self, name: str, data: bytes) -> None:
        """Overwrite the header of an entry; the file keeps its time, by which the index knows it."""
        fd = self.open(name, write=True)
        try:
            status = os.fstat(fd)
            os.pwrite(fd, data, 0)
            os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Delete an entry, if it is there. Call it with the lock held."""
        _check(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def is_open(self, name: str, fd: int) -> bool:
        """Whether the entry of this name is the file that is open; another one may have taken its place."""
        _check(name)
        return self._is(name, fd)

    def discard(self, temporary: str) -> None:
        """Delete a temporary file, if it is there."""
        if _TEMPORARY.fullmatch(temporary):
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._fd)

    def remove_stale(self, found: list[Found]) -> list[str]:
        """Delete the temporary files whose writers have ended; their names. Call it with the lock held."""
        gone = []
        for name in (file.name for file in found if _TEMPORARY.fullmatch(file.name)):
            try:
                fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
            except OSError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.discard(name)
                gone.append(name)
            except OSError:
                pass
            finally:
                os.close(fd)
        return gone


def _check(name: str) -> None:
    if not is_file_name(name):
        raise Ds4Error(f"{name!r} is no name of an entry: it has 40 lower-case hex digits and .kv")


def read_exactly(fd: int, size: int, offset: int) -> bytes:
    """Bytes of a file; fewer only at its end."""
    out = bytearray()
    while len(out) < size:
        piece = os.pread(fd, size - len(out), offset + len(out))
        if not piece:
            break
        out += piece
    return bytes(out)


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from a file; how many bytes there were."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done : done + (64 << 20)]], offset + done)
        if not count:
            break
        done += count
    return done
