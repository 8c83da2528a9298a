"""The command `ds4-server`."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from collections.abc import Sequence

from ds4.errors import Ds4Error
from ds4.process import exit_at_interrupt, wait_passively
from ds4.server.config import ServerConfig, parse_args
from ds4.server.logs import end_log, start_log

log = logging.getLogger("ds4.server")

_HINTS = {
    errno.EADDRINUSE: "; is another server running there? Give another --port",
    errno.EACCES: "; ports below 1024 are for the administrator: give another --port",
    errno.EADDRNOTAVAIL: "; --host takes an address or a name of this machine",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it is told to stop; the exit status."""
    wait_passively()
    _fill_standard_streams()
    config = parse_args(sys.argv[1:] if argv is None else argv, os.environ.get("DS4_API_KEY"))
    handler = start_log()
    try:
        return _serve(config)
    except Ds4Error as error:
        log.error("cannot start: %s", error)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        end_log(handler)


def _serve(config: ServerConfig) -> int:
    if config.chdir is not None:
        try:
            os.chdir(config.chdir)
        except OSError as error:
            raise Ds4Error(f"--chdir {config.chdir}: {error.strerror}; give a directory that exists") from None
    with listen(config.host, config.port) as listener:
        # The libraries behind it take a second to import; a busy port is told before.
        with exit_at_interrupt():
            from ds4.server.serve import run

        return run(config, listener)


def _fill_standard_streams() -> None:
    """A socket must not become the standard error of libraries, as it would if that is closed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on an address or on the first address of a name, IPv4 first.

    Raises Ds4Error that names the address.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise Ds4Error(f"--host {host}: {error.strerror}; give an address or a name of this machine") from None
    except ValueError:
        raise Ds4Error(f"--host {host!r} is neither an address nor the name of a machine") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    reason = "the name has no address"
    for family, _, _, _, address in found:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it: small pieces go out at once, else each waits 40 ms for the one before.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.bind(address)
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            reason = f"{error.strerror or error}{_HINTS.get(error.errno or 0, '')}"
            # Only an address that this machine does not have sends us to the next one of the name.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    raise Ds4Error(f"{host}:{port}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
