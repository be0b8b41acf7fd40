"""Ports for servers of tests."""

from __future__ import annotations

import random
import socket

FIRST, LAST = 20_000, 30_000
"""Below the ports that Linux gives to clients. A client that connects to a closed port among those
may be given the same port, and then talks to itself.
"""


def free_port(following: int = 0) -> int:
    """Return a port at which nobody listens, nor at the `following` ones after it."""
    while True:
        port = random.randrange(FIRST, LAST)  # no secret
        try:
            for each in range(port, port + 1 + following):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        return port
