"""What benchmarks need around a server in another process: a free port, and a wait for it."""

from __future__ import annotations

import time
import urllib.error
import urllib.request


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
