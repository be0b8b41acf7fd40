"""What benchmarks need around a server in another process: a free port, and a wait for it."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request


def free_port() -> int:
    """A port that no program listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for(url: str, timeout_s: float = 300.0) -> None:
    """Return when the address answers 200; TimeoutError when it does not."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError(f"{url} does not answer")
