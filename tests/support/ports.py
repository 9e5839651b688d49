"""Ports that a test has to itself. One that was found free and given back is anybody's: Ray takes dozens at a time."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved() -> Iterator[int]:
    """A port at which nobody listens: who connects is refused. Within the block no other process is given it; one that
    asks for it by its number, and sets ``SO_REUSEADDR`` as servers do, may have it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
