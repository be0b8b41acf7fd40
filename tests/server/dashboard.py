"""The Grafana dashboard in docs/assets: its queries, and the metrics that they name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "docs" / "assets" / "grafana.json"
NAME = re.compile(r"enginebay:\w+")


def panels() -> list[dict[str, Any]]:
    """The panels of the dashboard."""
    found: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["panels"]
    return found


def queries() -> list[str]:
    """Every query of the dashboard, as Grafana sends it: for all models, with rates of a minute."""
    written = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [query.replace("$model", ".*").replace("$__rate_interval", "1m") for query in written]


def names(query: str) -> set[str]:
    """The samples that a query reads."""
    return set(NAME.findall(query))
