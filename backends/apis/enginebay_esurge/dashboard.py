"""The files that provision a Grafana: a data source, and a dashboard of an engine's metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from enginebay_esurge import metric_names as names

DATASOURCE_UID = "esurge-prometheus"
DASHBOARD_UID = "esurge"

QUANTILES = (0.5, 0.95)


def write_provisioning(
    folder: Path, *, name: str, uid: str, url: str, speculates: bool = False
) -> Path:
    """Write data source and dashboard under `folder`. Returns Grafana's provisioning folder.

    The files are JSON, which is valid YAML. They are world-readable, because Grafana may run as
    another user; they contain no secret.
    """
    dashboards = folder / "dashboards"
    provisioning = folder / "provisioning"
    source = {
        "name": name,
        "uid": uid,
        "type": "prometheus",
        "access": "proxy",
        "url": url,
        "isDefault": True,
        "editable": True,
    }
    provider = {"name": "eSurge", "type": "file", "options": {"path": str(dashboards)}}
    _write(provisioning / "datasources" / "esurge.yaml", {"apiVersion": 1, "datasources": [source]})
    _write(provisioning / "dashboards" / "esurge.yaml", {"apiVersion": 1, "providers": [provider]})
    _write(dashboards / "esurge.json", make_dashboard(uid, speculates=speculates))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return provisioning


def make_dashboard(datasource_uid: str, *, speculates: bool = False) -> dict[str, Any]:
    """Return a dashboard that reads from the data source `datasource_uid`, with an additional panel
    for an engine that `speculates`.
    """
    source = {"type": "prometheus", "uid": datasource_uid}
    panels: list[dict[str, Any]] = []
    for number, (title, unit, queries) in enumerate(_panels(speculates=speculates)):
        targets = [
            {
                "refId": chr(ord("A") + i),
                "expr": expression,
                "legendFormat": legend,
                "datasource": source,
            }
            for i, (legend, expression) in enumerate(queries.items())
        ]
        panels.append(
            {
                "id": number + 1,
                "title": title,
                "type": "timeseries",
                "datasource": source,
                "gridPos": {"x": 8 * (number % 3), "y": 8 * (number // 3), "w": 8, "h": 8},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": targets,
            }
        )
    return {
        "uid": DASHBOARD_UID,
        "title": "eSurge",
        "tags": ["esurge"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "panels": panels,
    }


def _panels(*, speculates: bool) -> list[tuple[str, str, dict[str, str]]]:
    """Title, unit, and expressions by legend."""
    drafts = {
        "rows a second": f"rate({names.DRAFTS}[1m])",
        "tokens drafted a second": f"rate({names.DRAFT_TOKENS}[1m])",
        "tokens accepted a second": f"rate({names.ACCEPTED_TOKENS}[1m])",
    }
    return [
        ("Requests that ended", "reqps", {"{{status}}": f"rate({names.REQUESTS}[1m])"}),
        ("Requests", "short", {"running": names.RUNNING, "waiting": names.WAITING}),
        ("Tokens generated", "short", {"a second": f"rate({names.TOKENS_GENERATED}[1m])"}),
        ("Time of a request", "s", _quantiles(names.REQUEST_DURATION)),
        ("Time to the first token", "s", _quantiles(names.FIRST_TOKEN)),
        ("Tokens per second of a request", "short", _quantiles(names.TOKENS_PER_SECOND)),
        ("Time of a step", "s", _quantiles(names.EXECUTION_DURATION)),
        ("Time of scheduling", "s", _quantiles(names.SCHEDULE_DURATION)),
        ("Rows of an update", "short", _quantiles(names.BATCH_SIZE)),
        ("Tokens scheduled", "short", {"last update": names.SCHEDULED_TOKENS}),
        ("Preemptions", "short", {"a second": f"rate({names.PREEMPTED}[1m])"}),
        ("Pages of the cache", "short", {"used": names.PAGES_USED, "all": names.PAGES}),
        ("Prompt tokens found in the cache", "percentunit", {"part": names.HIT_RATE}),
        ("Engine", "short", {"{{name}} {{model}}": names.SYSTEM}),
        *([("Drafts", "short", drafts)] if speculates else []),
    ]


def _quantiles(histogram: str) -> dict[str, str]:
    return {
        f"{quantile:.0%}": (
            f"histogram_quantile({quantile}, sum by (le) (rate({histogram}_bucket[1m])))"
        )
        for quantile in QUANTILES
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
