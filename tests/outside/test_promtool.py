"""Metrics of an eSurge as Prometheus' own checker reads them: `promtool`, of Debian's package
prometheus.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import urllib.request

import pytest

from enginebay import SamplingParams
from enginebay_esurge import eSurge
from tests.brief import TINY

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus"
)

KEPT = {"esurge_cache_pages_total"}
"""A gauge whose documented name ends like a counter's."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.mark.usefixtures("faked")
def test_promtool_finds_nothing_wrong_with_the_metrics() -> None:
    sizes = {"max_model_len": 128, "max_num_seqs": 2, "page_size": 8, "dtype": "float32"}
    with eSurge(
        TINY, sharding_axis_dims=(1, 1, 1, 1, 1), engine_options={"num_pages": 40}, **sizes
    ) as engine:
        where = engine.start_monitoring(prometheus_port=free_port(), start_grafana=False)
        engine.generate("w1 w2 w3", SamplingParams(max_tokens=8), use_tqdm=False)
        with urllib.request.urlopen(where["prometheus"], timeout=30) as answer:
            metrics = answer.read()
    assert b"esurge_" in metrics
    assert PROMTOOL is not None
    command = [PROMTOOL, "check", "metrics"]
    checked = subprocess.run(command, input=metrics, capture_output=True, check=False, timeout=60)
    complaints = checked.stderr.decode().splitlines()
    ours = {line.split()[0] for line in complaints if line.startswith("esurge_")}
    assert (ours, checked.returncode in (0, 3)) == (KEPT, True), (
        complaints
    )  # 3: complaints, all of them named
