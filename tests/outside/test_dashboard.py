"""The Grafana dashboard against a real Prometheus (of Debian's package of this name), which reads
the metrics of a real `enginebay serve`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import write_adapter
from tests.brief import DEMO
from tests.ports import free_port
from tests.server.dashboard import queries
from tests.server.process import ServerProcess

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
NEEDED = ("fastapi", "uvicorn", "orjson", "prometheus_client")
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        PROMETHEUS is None, reason="prometheus is not installed: apt-get install prometheus"
    ),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="the extra serve is not installed: pip install 'enginebay[serve]'",
    ),
]

LIMIT_S = 60
KEPT = {
    "enginebay_iteration_tokens_total",
    "enginebay_decode_achieved_gigabytes_per_second",
    "enginebay_memory_roofline_gigabytes_per_second",
}
"""A histogram whose name, which dashboards know, ends like a counter's; and two rates in the unit
in which people compare them.
"""
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: enginebay
    static_configs: [{{targets: ["{address}"]}}]
"""


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def complete(server: ServerProcess) -> None:
    """Stream a completion."""
    body = {"model": "demo", "prompt": "w1 w2 w3", "max_tokens": 8, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert b"[DONE]" in answer.read()


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait until something is so."""
    until_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < until_s, what
        time.sleep(0.2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    adapter = write_adapter(tmp_path_factory.mktemp("adapter"), DEMO)
    with ServerProcess("--warmup", "lazy", "--lora", f"tales={adapter}") as started:
        complete(started)
        yield started


@pytest.fixture(scope="module")
def ask(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Ask a query of a Prometheus that has read the server's metrics before and after requests."""
    folder: Path = tmp_path_factory.mktemp("prometheus")
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(address=urllib.parse.urlsplit(server.url).netloc))
    address = f"127.0.0.1:{free_port()}"
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [
            str(PROMETHEUS),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
    )

    def answer(query: str) -> list[dict[str, Any]]:
        quoted = urllib.parse.urlencode({"query": query})
        try:
            found = get(f"http://{address}/api/v1/query?{quoted}")
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from None
        assert found["status"] == "success"
        samples: list[dict[str, Any]] = found["data"]["result"]
        return samples

    def count() -> int:
        """The completions of the latest scrape."""
        try:
            found = answer("sum(enginebay:request_success_total)")
        except OSError:  # it is starting
            return 0
        return int(found[0]["value"][1]) if found else 0

    try:
        until(lambda: count() == 1, (folder / "log").read_text())
        complete(server)
        complete(server)
        until(lambda: count() == 3, "Prometheus does not read the later requests")
        yield answer
    finally:
        process.terminate()
        process.wait(LIMIT_S)
        log.close()


@pytest.mark.parametrize("query", queries())
def test_each_query_returns_samples(ask: Callable[[str], list[dict[str, Any]]], query: str) -> None:
    samples = ask(query)
    assert samples
    values = [float(sample["value"][1]) for sample in samples]
    assert not any(map(math.isnan, values)), "requests ran, so each figure is a number"


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_complains_about_nothing_but_the_prefix(server: ServerProcess) -> None:
    """The colon of the prefix `enginebay:` is reserved, but dashboards know it from `vllm:`."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        metrics = answer.read().replace(b"enginebay:", b"enginebay_")
    command = [str(PROMTOOL), "check", "metrics"]
    checked = subprocess.run(command, input=metrics, capture_output=True, check=False, timeout=60)
    complaints = checked.stderr.decode().splitlines()
    assert {line.split()[0] for line in complaints} == KEPT, complaints
