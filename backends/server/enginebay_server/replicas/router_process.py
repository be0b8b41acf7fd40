"""The process of the router: runs smg with the options that arrive on stdin.

Options on the command line would show smg's key to every user of the machine.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys

PR_SET_PDEATHSIG = 1

FLAGS = (
    "--policy=cache_aware",
    "--disable-health-check",  # the ports of the replicas belong to the process that asks
    "--disable-circuit-breaker",
    "--disable-load-monitoring",
    "--disable-worker-overload-protection",
    "--disable-tokenizer-autoload",
    "--worker-warmup-secs=0",
    "--sse-keepalive-secs=0",
    "--stream-body-stall-timeout-secs=0",
    "--request-timeout-secs=86400",
    "--max-concurrent-requests=0",
    "--retry-initial-backoff-ms=1",  # a port answers 503 while its replica is not ready
    "--retry-max-backoff-ms=10",
    "--log-level=error",
)


def main() -> None:
    """Run smg until the process is killed, or its parent ends. It has no part in a stop: the front
    kills it after the last answer.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    options = json.loads(sys.stdin.readline())
    from smg.launch_router import launch_router, parse_router_args

    workers = [f"http://127.0.0.1:{port}" for port in options["workers"]]
    flags = [
        *FLAGS,
        "--host=127.0.0.1",
        f"--port={options['port']}",
        "--prometheus-host=127.0.0.1",
        f"--prometheus-port={options['metrics_port']}",
        f"--retry-max-retries={len(workers) + 1}",
        f"--balance-abs-threshold={options['spill']}",
        f"--api-key={options['secret']}",
        "--worker-urls",
        *workers,
    ]
    launch_router(parse_router_args(flags))


if __name__ == "__main__":
    main()
