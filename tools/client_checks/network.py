"""A network in which only this machine exists, and a name server that knows no name but remembers what was asked."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_INSIDE = "--inside"
_SIOCSIFFLAGS = 0x8914
_UP_AND_RUNNING = 0x41


def enter(arguments: list[str]) -> None:
    """Start this program again in a network of its own, if the machine lets us; else return."""
    unshare = shutil.which("unshare")
    if unshare and not subprocess.run([unshare, "-rnm", "true"], capture_output=True, check=False).returncode:
        os.execv(unshare, [unshare, "-rnm", sys.executable, *sys.argv[:1], _INSIDE, *arguments])


def inside(arguments: list[str]) -> bool:
    """Whether this program was started by `enter`; takes the mark out of its arguments."""
    if _INSIDE not in arguments:
        return False
    arguments.remove(_INSIDE)
    return True


def set_up(folder: Path) -> None:
    """Switch the loopback device on, and make this machine the name server of the new network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        fcntl.ioctl(device, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _UP_AND_RUNNING))
    names = folder / "resolv.conf"
    names.write_text("nameserver 127.0.0.1\n", encoding="ascii")
    subprocess.run(["mount", "--bind", str(names), "/etc/resolv.conf"], check=True)


@contextlib.contextmanager
def recorded_names() -> Iterator[set[str]]:
    """Names that are asked for while this runs, by any program of the network; all of them are unknown."""
    asked: set[str] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 53))
        thread = threading.Thread(target=_answer, args=(server, asked), daemon=True)
        thread.start()
        try:
            yield asked
        finally:
            # A datagram of no bytes is no question; it ends the thread.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                client.sendto(b"", server.getsockname())
            thread.join()


def _answer(server: socket.socket, asked: set[str]) -> None:
    while True:
        question, client = server.recvfrom(4096)
        if not question:
            return
        with contextlib.suppress(IndexError, OSError):
            name, end = _name(question)
            asked.add(name)
            server.sendto(unknown(question, end), client)


def _name(question: bytes) -> tuple[str, int]:
    """The first name of a question, and where its type and class end. Raises IndexError."""
    labels, at = [], 12
    while question[at]:
        labels.append(question[at + 1 : at + 1 + question[at]].decode("latin-1"))
        at += question[at] + 1
    return ".".join(labels), at + 5


def unknown(question: bytes, end: int) -> bytes:
    """The answer that there is no such name (RFC 1035: a response, recursion available, code 3)."""
    return question[:2] + b"\x81\x83" + b"\0\1" + bytes(6) + question[12:end]
