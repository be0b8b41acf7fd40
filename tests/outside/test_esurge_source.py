"""The default data source of an eSurge's Grafana: a real Prometheus (of Debian's package of this
name), which answers every query of the dashboard.
"""

from __future__ import annotations

import json
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import pytest

from enginebay import SamplingParams
from enginebay_esurge import eSurge, grafana
from enginebay_esurge.dashboard import make_dashboard

pytest.importorskip("prometheus_client")
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not installed: apt-get install prometheus",
    ),
]

LIMIT_S = 60


def ask(source: str, query: str) -> list[dict[str, Any]]:
    """The samples of a query."""
    quoted = urllib.parse.urlencode({"query": query.replace("[1m]", "[30s]")})
    with urllib.request.urlopen(f"{source}/api/v1/query?{quoted}", timeout=30) as answer:
        samples: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return samples


def test_the_source_answers_every_query_of_the_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grafana, "SCRAPE_S", 1)
    queries = [
        target["expr"] for panel in make_dashboard("x")["panels"] for target in panel["targets"]
    ]
    with eSurge("demo", max_model_len=256, max_num_seqs=2, compile_runner=False) as engine:
        url = engine.start_monitoring(prometheus_port=0, start_grafana=False)["prometheus"]
        with grafana.local_prometheus(url) as source:
            end_s, empty = time.monotonic() + LIMIT_S, queries
            while empty:
                assert time.monotonic() < end_s, f"no samples of {empty}"
                engine.generate("Once upon a time", SamplingParams(max_tokens=8, ignore_eos=True))
                time.sleep(0.5)
                try:
                    empty = [query for query in empty if not ask(source, query)]
                except urllib.error.HTTPError:  # it is starting
                    continue
        engine.stop_monitoring()
    with pytest.raises(urllib.error.URLError):
        ask(source, "up")
