"""The command `ds4-server`."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence

from ds4.errors import Ds4Error
from ds4.openmp import wait_passively
from ds4.server.config import parse_args

log = logging.getLogger("ds4.server")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it is told to stop; the exit status."""
    wait_passively()
    config = parse_args(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING, stream=sys.stderr)
    log.setLevel(logging.INFO)
    try:
        if config.chdir is not None:
            os.chdir(config.chdir)
        listener = listen(config.host, config.port)
    except OSError as error:
        log.error("cannot start: %s", error)
        return 1
    try:
        # The libraries behind it take a second to import; a busy port is told before.
        from ds4.server.serve import run

        return run(config, listener)
    except Ds4Error as error:
        log.error("cannot start: %s", error)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        listener.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError that names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise OSError(f"{host}:{port}: {error.strerror or error}; is another server running there?") from None
    return listener


if __name__ == "__main__":
    sys.exit(main())
