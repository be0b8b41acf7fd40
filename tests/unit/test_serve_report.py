"""bench serve: the page of results needs no script and no other host, and the record repeats the
run.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from enginebay.errors import InputError
from enginebay_bench.cli.serve_results import make_record, show_results
from enginebay_bench.serve.bounds import parse_bounds
from enginebay_bench.serve.figures import ClientCost, make_figures
from enginebay_bench.serve.files import write_results
from enginebay_bench.serve.find_rate import FoundRate
from enginebay_bench.serve.plots import Axis, Line, cumulative_line, line_plot, thinned, ticks
from enginebay_bench.serve.run import Measurement
from enginebay_bench.serve.target import ServerTarget
from enginebay_bench.serve.timeline import RequestTimeline

FLAGS = {"model": "<m>", "url": "http://h:1", "rates": "1,2", "find_rate": True, "slo_share": 0.9}
BOUNDS = parse_bounds("ttft=60ms", 0.9)


def measured(rate: float) -> Measurement:
    timelines = []
    for i in range(30):
        due_s = i / rate
        chunks = [due_s + 0.05 + 0.001 * i + 0.02 * k for k in range(5)]
        one = RequestTimeline(i, due_s, due_s, chunks[-1], chunks, num_tokens=10)
        one.token_source = "usage"
        timelines.append(one)
    timelines[3].error = "HTTP 500: <script>alert(1)</script>"
    cost = ClientCost(0.01, [0.0])
    return Measurement(make_figures(timelines, cost, rate=rate, bounds=BOUNDS), timelines)


def test_the_files_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ServerTarget("http://h:1", "<m>", api_key="secret")
    loads = [measured(1.0), measured(2.0)]
    record = make_record(
        FLAGS, target, {"version": "9"}, "random words", BOUNDS, loads, FoundRate(1.0, 2.0)
    )
    show_results(record, loads, json_only=True, folder=str(tmp_path / "out"))
    assert json.loads(capsys.readouterr().out) == record
    texts = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert sorted(texts) == ["loads.csv", "report.html", "requests.csv", "result.json"]
    assert json.loads(texts["result.json"]) == record
    assert len(texts["requests.csv"].splitlines()) == 61
    assert not [name for name, text in texts.items() if "secret" in text]
    wanted = "enginebay bench serve '--model=<m>' --url=http://h:1 --rates=1,2 --find-rate"
    assert record["command"] == f"{wanted} --slo-share=0.9"
    assert record["environment"]["devices"] == []
    assert "1 requests/s; 2 requests/s is not" in record["found_rate"]["text"]
    assert record["warnings"][::2] == [f"{n}/s: 1 of 30 requests failed." for n in (1, 2)]
    assert all("a chunk has 2.0 tokens" in one for one in record["warnings"][1::2])


def test_the_page_stands_alone(tmp_path: Path) -> None:
    loads = [measured(1.0), measured(2.0)]
    record = make_record(FLAGS, ServerTarget("http://h:1", "<m>"), None, "<b>", BOUNDS, loads, None)
    show_results(record, loads, json_only=True, folder=str(tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert not re.search(r"""(src|href|url\()\s*=?["']?\s*(https?:)?//""", page)
    assert "&lt;m&gt;" in page
    assert "&lt;script&gt;alert" in page
    drawn = re.findall(r"<svg viewBox=\"0 0 520.*?</svg>", page, re.DOTALL)
    assert len(drawn) == 5 + 4 + 3  # by load, distributions, over time
    for one in drawn:
        numbers = re.findall(r"\b(?:nan|inf)\b", one)
        assert not numbers
        assert list(ET.fromstring(one).iter("path"))
    assert page.count('class="limit"') == 1  # of the bound on ttft


class Ancestors(HTMLParser):
    """Of each table, the elements that it lies in, as (tag, class)."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, str | None]] = []
        self.of_tables: list[list[tuple[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.of_tables.append(self.open[:])
        if tag != "meta":  # which has no end
            self.open.append((tag, dict(attrs).get("class")))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag


def test_each_table_lies_in_an_element_that_scrolls(tmp_path: Path) -> None:
    """So a narrow window cuts no column off."""
    loads = [measured(1.0), measured(2.0)]
    record = make_record(FLAGS, ServerTarget("http://h:1", "<m>"), None, "r", BOUNDS, loads, None)
    show_results(record, loads, json_only=True, folder=str(tmp_path))
    page = (tmp_path / "report.html").read_text()
    ancestors = Ancestors()
    ancestors.feed(page)
    assert len(ancestors.of_tables) == page.count("<table") == 2  # of loads, and of failures
    assert all(("div", "wide") in one for one in ancestors.of_tables)
    rules = dict(re.findall(r"([^{}]+)\{([^{}]*)\}", page[: page.index("</style>")]))
    scrolling = {name.strip(): rule.split(";") for name, rule in rules.items()}
    assert "overflow-x:auto" in scrolling["div.wide"]


def test_a_line_has_its_points_where_the_axes_say() -> None:
    plot = ET.fromstring(line_plot("t", Axis("x"), Axis("y"), [Line("l", [(0, 0), (10, 5)])]))
    (path,) = [one for one in plot.iter("path") if one.get("class") == "line c0"]
    assert path.get("d") == "M58.0 220.0L506.0 30.0"  # from the origin to the other corner
    assert line_plot("t", Axis("x"), Axis("y"), [Line("l", [])]) == ""


def test_ticks_are_round_and_cover_the_axis() -> None:
    assert ticks(10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.7) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert ticks(5) == [0, 1, 2, 3, 4, 5]
    for end in (1e-6, 0.013, 3.3, 999, 1.2e7):
        found = ticks(end)
        assert found[-1] >= end * 0.999999
        assert 4 <= len(found) <= 7


def test_distributions_and_long_lines() -> None:
    line = cumulative_line("d", [3.0, 1.0, float("nan"), 2.0])
    assert line.points == [(1.0, pytest.approx(1 / 3)), (2.0, pytest.approx(2 / 3)), (3.0, 1.0)]
    many = [(float(n), float(n)) for n in range(10_000)]
    assert len(thinned(many)) <= 240
    assert (thinned(many)[0], thinned(many)[-1]) == (many[0], many[-1])


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--out"):
        write_results(str(tmp_path / "file" / "out"), {}, [], "")
