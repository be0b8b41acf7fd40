"""The Grafana dashboard reads what an application exports, and all of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import write_adapter
from tests.brief import TINY
from tests.server.dashboard import names, panels, queries
from tests.server.in_process_client import HELLO, Asker


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[Asker]:
    """A server with an adapter, and without requests."""
    from enginebay import LLM

    fields: dict[str, Any] = {"lora": {"tales": str(write_adapter(tmp_path, TINY))}}
    with LLM(TINY, **fields, max_model_len=64, max_num_seqs=2) as llm:
        yield Asker(llm)


def exported_by(asker: Asker) -> set[str]:
    text = asker.get("/metrics").text
    return {re.split(r"[ {]", line)[0] for line in text.splitlines() if line[0] != "#"}


def test_queries_and_exported_metrics_are_the_same(asker: Asker, idle: Asker) -> None:
    body = {"messages": HELLO, "max_tokens": 4, "ignore_eos": True}
    asker.ok("/v1/chat/completions", **body)
    asker.events("/v1/chat/completions", **body)
    exported = exported_by(asker) | exported_by(idle)
    read = {name for query in queries() for name in names(query)}
    assert read <= exported
    left_out = {name for name in exported if not name.endswith(("_sum", "_count", "_created"))}
    assert left_out <= read, "the dashboard has a panel for each metric"


def test_panels_do_not_overlap_and_read_the_chosen_data_source() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])
        }
        assert not own & cells, panel["title"]
        cells |= own
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}
    assert len({panel["id"] for panel in panels()}) == len(panels())
