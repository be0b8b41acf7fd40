"""Joins the figures of several replicas: metrics with a label, and the data of the page."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from enginebay_server.replicas.exchange import BrokenError
from enginebay_server.replicas.table import Replica, ReplicaTable

WAIT_S = 5.0
"""Max seconds that a replica has to answer."""

UP, RESTARTS = "enginebay:replica_up", "enginebay:replica_restarts"


async def metrics_of(table: ReplicaTable) -> bytes:
    """Return the metrics of all replicas that listen, with the label `replica`, and two metrics of
    the replicas themselves.
    """
    texts = await asyncio.gather(*(_get(replica, "/metrics") for replica in table.listening))
    by_number = zip((replica.number for replica in table.listening), texts, strict=False)
    joined = join_metrics({number: text.decode() for number, text in by_number if text})
    own = [
        f"# HELP {UP} Whether a replica answers requests.",
        f"# TYPE {UP} gauge",
        *(f'{UP}{{replica="{one.number}"}} {float(one.state == "ready")}' for one in table),
        f"# HELP {RESTARTS}_total Processes of a replica that have ended.",
        f"# TYPE {RESTARTS}_total counter",
        *(f'{RESTARTS}_total{{replica="{one.number}"}} {float(one.num_restarts)}' for one in table),
    ]
    return ("\n".join([*joined, *own]) + "\n").encode()


def join_metrics(texts: Mapping[int, str]) -> Sequence[str]:
    """Return the lines of several texts in Prometheus' format as one text, whose samples have the
    label `replica`. The samples of a metric stand together.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for number, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(labelled(line, number))
    return [line for family in heads for line in (*heads[family], *samples.get(family, []))]


def labelled(sample: str, number: int) -> str:
    """Return a line of a sample with the label `replica`."""
    name, rest = re.fullmatch(r"([^{ ]+)(.*)", sample).groups()  # type: ignore[union-attr]
    label = f'replica="{number}"'
    if rest.startswith("{}"):
        return f"{name}{{{label}}}{rest[2:]}"
    return f"{name}{{{label},{rest[1:]}" if rest.startswith("{") else f"{name}{{{label}}}{rest}"


async def page_data(
    table: ReplicaTable, names: Sequence[str], since: str, *, is_ready: bool
) -> dict[str, Any]:
    """Return what the page draws: each model of each replica, in the order of the replicas.
    `since` has a number for each of these.
    """
    numbers = since.split(",") + [""] * (len(names) * len(table))
    parts = [numbers[place * len(names) :][: len(names)] for place in range(len(table))]
    answers = await asyncio.gather(
        *(
            _get(replica, f"/ui/data?since={','.join(map(digits, part))}")
            for replica, part in zip(table, parts, strict=True)
        )
    )
    models, queued = [], 0
    for replica, answer in zip(table, answers, strict=True):
        absents: dict[str, Any] = {"models": [absent(name) for name in names], "queued": 0}
        found = orjson.loads(answer) if answer else absents
        models += [{**one, "replica": replica.number} for one in found["models"]]
        queued += found["queued"]
    return {"ready": is_ready, "queued": queued, "models": models}


def digits(text: str) -> str:
    """Return a number that is safe in a query."""
    return text if re.fullmatch("[0-9]{1,18}", text) else "0"


def absent(name: str) -> dict[str, Any]:
    """Return the figures of a model whose replica does not answer."""
    numbers = ("max_num_seqs", "running", "waiting", "compiled", "num_stand_ins", "next")
    figures: dict[str, Any] = {**dict.fromkeys(numbers, 0), "coming": []}
    status = {"ready": False, "warmup": "waiting"}
    unknown: dict[str, Any] = {"engine": "", "records": [], "pages": None, "compiling_s": None}
    return {"name": name, "status": status, **unknown, **figures}


async def _get(replica: Replica, target: str) -> bytes:
    """Return the body of a GET; b"" without an answer."""
    try:
        async with asyncio.timeout(WAIT_S):
            status, body = await replica.get(target)
    except (BrokenError, TimeoutError):
        return b""
    return body if status == 200 else b""
