"""The dashboard in a real Grafana, over a real Prometheus and a real `enginebay serve`.

Grafana is no package of Debian or PyPI. The test runs where GRAFANA_BIN names its server, or
`grafana` or `grafana-server` is on PATH.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import write_adapter
from tests.brief import DEMO
from tests.outside.test_dashboard import complete
from tests.ports import free_port
from tests.server.dashboard import FILE
from tests.server.process import ServerProcess

GRAFANA = os.environ.get("GRAFANA_BIN") or shutil.which("grafana") or shutil.which("grafana-server")
NEEDED = ("fastapi", "uvicorn", "orjson", "prometheus_client")
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        GRAFANA is None,
        reason="no Grafana is installed: set GRAFANA_BIN to the path of its server",
    ),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not installed: apt-get install prometheus",
    ),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="the extra serve is not installed: pip install 'enginebay[serve]'",
    ),
]

LIMIT_S = 90
SOURCE = "enginebay-test"


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """The answer of Grafana's API to its administrator."""
    account = base64.b64encode(b"admin:admin").decode()
    headers = {"Authorization": f"Basic {account}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as answer:
        return json.load(answer)


@contextlib.contextmanager
def running_grafana(folder: Path, prometheus: str) -> Iterator[str]:
    """The address of a Grafana that has the dashboard and the data source when it starts."""
    from enginebay_esurge.grafana import running

    assert GRAFANA is not None
    dashboards = folder / "dashboards"
    dashboards.mkdir()
    shutil.copy(FILE, dashboards)
    source = {"name": "test", "uid": SOURCE, "type": "prometheus", "access": "proxy"}
    provider = {"name": "test", "type": "file", "options": {"path": str(dashboards)}}
    for name, content in (
        ("datasources", {"datasources": [{**source, "url": prometheus, "isDefault": True}]}),
        ("dashboards", {"providers": [provider]}),
    ):
        path = folder / "provisioning" / name / "test.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"apiVersion": 1, **content}))
    port = free_port()
    variables = {
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_PATHS_PROVISIONING": str(folder / "provisioning"),
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        **{f"GF_PATHS_{name.upper()}": str(folder / name) for name in ("data", "logs", "plugins")},
    }
    # Grafana finds its files from here: .../bin/grafana
    homes = (Path(GRAFANA).resolve().parent.parent, Path("/usr/share/grafana"))
    home = next((one for one in homes if (one / "conf" / "defaults.ini").is_file()), homes[0])
    word = ["server"] if Path(GRAFANA).name == "grafana" else []
    command = [GRAFANA, *word, "--homepath", str(home)]
    with running("Grafana", command, port, folder / "output.txt", variables=variables):
        yield f"http://127.0.0.1:{port}"


def dashboard_of(grafana: str) -> dict[str, Any]:
    """The dashboard as Grafana has read it, which happens soon after its start."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        try:
            found: dict[str, Any] = ask(f"{grafana}/api/dashboards/uid/enginebay")["dashboard"]
            return found
        except urllib.error.HTTPError:
            assert time.monotonic() < end_s, "Grafana has not read the dashboard"
            time.sleep(0.5)


def has_values(grafana: str, expression: str) -> bool:
    """Whether Grafana's data source answers a query with numbers. The page puts the chosen model
    into it; the source itself knows the rate's interval.
    """
    query = {
        "refId": "A",
        "datasource": {"type": "prometheus", "uid": SOURCE},
        "expr": expression.replace("$model", ".*").replace("$__rate_interval", "1m"),
        "instant": True,
        "range": False,
        "intervalMs": 1000,
        "maxDataPoints": 100,
    }
    answer = ask(f"{grafana}/api/ds/query", {"queries": [query], "from": "now-5m", "to": "now"})
    frames = answer["results"]["A"].get("frames", [])
    return any(column for frame in frames for column in frame["data"]["values"])


def test_every_query_of_every_panel_has_data_in_grafana(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from enginebay_esurge import grafana

    monkeypatch.setattr(grafana, "SCRAPE_S", 1)
    adapter = write_adapter(tmp_path / "adapter", DEMO)
    with (
        ServerProcess("--warmup", "lazy", "--lora", f"tales={adapter}") as server,
        grafana.local_prometheus(f"{server.url}/metrics") as prometheus,
        running_grafana(tmp_path, prometheus) as grafana,
    ):
        panels = dashboard_of(grafana)["panels"]
        missing = [
            (panel["title"], target["expr"]) for panel in panels for target in panel["targets"]
        ]
        assert len(missing) > 40
        end_s = time.monotonic() + LIMIT_S
        while missing:
            assert time.monotonic() < end_s, f"no data: {missing}"
            complete(server)
            missing = [(title, query) for title, query in missing if not has_values(grafana, query)]
