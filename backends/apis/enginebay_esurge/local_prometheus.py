"""A Prometheus server that stores an exporter's values over time, as Grafana's data source."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from enginebay_esurge.grafana import HERE, running

SCRAPE_S = 5


@contextlib.contextmanager
def local_prometheus(metrics_url: str) -> Iterator[str]:
    """Run the `prometheus` that is on PATH until the block ends, and yield its URL. It reads
    `metrics_url` every 5 s and keeps the values of a day.

    RuntimeError, and nothing is left, when it is not installed or does not start.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise RuntimeError("prometheus is not on PATH")
    folder = Path(tempfile.mkdtemp(prefix="esurge-prometheus-"))
    try:
        address = urllib.parse.urlsplit(metrics_url)
        target = {"targets": [address.netloc]}
        job = {"job_name": "esurge", "metrics_path": address.path, "static_configs": [target]}
        config = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": [job]}
        (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        with socket.socket() as probe:
            probe.bind((HERE, 0))
            port = probe.getsockname()[1]
        command = [
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--storage.tsdb.retention.time=1d",
            f"--web.listen-address={HERE}:{port}",
        ]
        with running("Prometheus", command, port, folder / "output.txt"):
            yield f"http://{HERE}:{port}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
