"""Monitoring of eSurge: metrics that are really scraped, console, log, and a clean end."""

from __future__ import annotations

import gc
import inspect
import io
import json
import logging
import re
import socket
import sys
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from enginebay.errors import InputError
from enginebay.outputs import CompletionOutput
from enginebay.serving.observer import Execution, Update
from enginebay_esurge import RequestOutput, eSurge
from enginebay_esurge.console import ConsoleMonitor
from enginebay_esurge.logfile import LogFile
from enginebay_esurge.monitoring import Monitoring, MonitoringSettings
from enginebay_esurge.observing import History
from enginebay_esurge.service import Service
from enginebay_esurge.totals import Totals
from tests.brief import BRIEF
from tests.fakes import compose_fake
from tests.unit.esurge.small import GREEDY_ON, LONG, OPTIONS, PROMPT, PROMPTS, pool_of, until

prometheus_client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")

pytestmark = pytest.mark.xdist_group("esurge")

PROMISED = [
    *(
        "requests_total",
        "request_duration_seconds",
        "time_to_first_token_seconds",
        "tokens_generated_total",
    ),
    *("tokens_per_second", "waiting_requests", "running_requests", "scheduled_tokens"),
    *("preempted_requests_total", "schedule_duration_seconds", "model_execution_duration_seconds"),
    *("batch_size", "cache_pages_total", "cache_pages_used", "cache_hit_rate", "system_info"),
]
DEFAULTS: dict[str, Any] = {
    "dashboard_port": None,
    "prometheus_port": 11184,
    "dashboard_host": None,
    "enable_prometheus": True,
    "enable_dashboard": None,
    "enable_console": False,
    "log_file": None,
    "log_interval": 10.0,
    "history_size": 1000,
    "enable_detailed_logging": True,
    "start_grafana": True,
    "grafana_port": 3000,
    "grafana_host": None,
    "grafana_image": "grafana/grafana-oss:latest",
    "grafana_use_docker": False,
    "grafana_admin_user": "admin",
    "grafana_admin_password": "admin",
    "grafana_allow_anonymous": True,
    "grafana_datasource_name": "eSurge Prometheus",
    "grafana_datasource_uid": None,
    "grafana_datasource_url": None,
}
ONLY_METRICS: dict[str, Any] = {"prometheus_port": 0, "start_grafana": False}


@pytest.fixture
def monitored(engine: eSurge) -> Iterator[eSurge]:
    before = threading.active_count()
    yield engine
    engine.stop_monitoring()
    assert not engine.monitoring_active
    until(
        lambda: threading.active_count() <= before
    )  # requests to the server have threads of their own
    assert len(engine.audience) == 0


def fetch(url: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


def scrape(url: str) -> dict[str, float]:
    """Samples by name, and by name and status."""
    found: dict[str, float] = {}
    for family in parser.text_string_to_metric_families(fetch(url)):
        for sample in family.samples:
            status = sample.labels.get("status")
            found[f"{sample.name}/{status}" if status else sample.name] = sample.value
    return found


def test_arguments_and_defaults_are_the_documented_ones() -> None:  # holds S14
    parameters = inspect.signature(eSurge.start_monitoring).parameters
    assert {name: p.default for name, p in parameters.items() if name != "self"} == DEFAULTS


def test_metrics_are_scraped_with_the_values_of_real_requests(
    real_engine: eSurge,
) -> None:  # holds S14, S11
    monitored = real_engine
    assert not monitored.monitoring_active
    urls = monitored.start_monitoring(**ONLY_METRICS)
    assert monitored.monitoring_active
    assert list(urls) == ["prometheus"]
    assert urls["prometheus"].startswith("http://127.0.0.1:")
    assert scrape(urls["prometheus"])["esurge_tokens_generated_total"] == 0
    outputs = monitored.generate(PROMPTS, GREEDY_ON)
    again = monitored.generate(
        [list(range(500, 560))] * 2, GREEDY_ON
    )  # the second may find the first's pages
    stream = monitored.stream(PROMPT, LONG)
    next(stream)
    stream.close()
    monitored.run_on_engine(lambda: None)
    seen = scrape(urls["prometheus"])
    assert seen["esurge_requests_total/completed"] == 6
    assert seen["esurge_requests_total/failed"] == 1
    assert seen["esurge_tokens_generated_total"] >= 6 * 16 + 1
    everything: list[RequestOutput] = [*outputs, *again]
    for name, values in {
        "request_duration_seconds": [output.processing_time for output in everything],
        "time_to_first_token_seconds": [output.first_token_time or 0 for output in everything],
        "tokens_per_second": [output.tokens_per_second for output in everything],
    }.items():
        assert seen[f"esurge_{name}_count"] == 6
        assert seen[f"esurge_{name}_sum"] == pytest.approx(sum(values))
    steps = seen["esurge_model_execution_duration_seconds_count"]
    assert (
        steps
        >= seen["esurge_schedule_duration_seconds_count"]
        == seen["esurge_batch_size_count"]
        > 0
    )
    assert seen["esurge_model_execution_duration_seconds_sum"] > 0
    assert seen["esurge_batch_size_sum"] >= steps
    assert seen["esurge_scheduled_tokens"] > 0
    assert (seen["esurge_waiting_requests"], seen["esurge_running_requests"]) == (0, 0)
    assert (seen["esurge_cache_pages_total"], seen["esurge_cache_pages_used"]) == (24, 0)
    assert 0 <= seen["esurge_cache_hit_rate"] < 1
    monitored.stop_monitoring()


def test_every_metric_is_shown_in_both_formats_and_nowhere_else(
    monitored: eSurge,
) -> None:  # holds S14
    url = monitored.start_monitoring(**ONLY_METRICS)["prometheus"]
    for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
        text = fetch(url, accept)
        samples = {
            re.split(r"[ {]", line)[0] for line in text.splitlines() if not line.startswith("#")
        }
        shown = {
            re.sub(r"_(bucket|count|sum)$", "", name) for name in samples if "_created" not in name
        }
        assert shown == {f"esurge_{name}" for name in PROMISED}
        assert len(shown) == 16
    [line] = [line for line in fetch(url).splitlines() if line.startswith("esurge_system_info{")]
    assert f'name="{monitored.esurge_name}"' in line
    assert f'model="{BRIEF}"' in line
    ours = [
        one.name for one in prometheus_client.REGISTRY.collect() if one.name.startswith("esurge")
    ]
    assert not ours, "the registry of the process is not ours to fill"


def test_known_beginnings_and_preemptions_are_counted(monitored: eSurge) -> None:  # holds S14
    ids = list(range(700, 764))
    monitored.generate([ids], GREEDY_ON)
    url = monitored.start_monitoring(**ONLY_METRICS)["prometheus"]
    [known] = monitored.generate([ids], GREEDY_ON)
    assert known.metrics is not None
    assert scrape(url)["esurge_cache_hit_rate"] == known.metrics["cached_tokens"] / 64 > 0
    monitored.generate([[i] * 30 for i in range(10, 14)], LONG)
    seen = scrape(url)
    assert seen["esurge_preempted_requests_total"] > 0, "four of the longest do not fit 24 pages"
    assert seen["esurge_tokens_generated_total"] == 16 + 4 * (144 - 30)


def test_gauges_tell_what_waits_and_runs_now(
    slow_engine: eSurge, monitored: eSurge
) -> None:  # holds S14, S11
    url = slow_engine.start_monitoring(**ONLY_METRICS)["prometheus"]
    streams = [slow_engine.stream(PROMPT, LONG) for _ in range(6)]
    until(lambda: slow_engine.num_running_requests)
    slow_engine.pause()
    seen = scrape(url)
    assert seen["esurge_running_requests"] == slow_engine.num_running_requests > 0
    assert seen["esurge_waiting_requests"] == slow_engine.num_pending_requests
    assert seen["esurge_running_requests"] + seen["esurge_waiting_requests"] == 6
    assert seen["esurge_cache_pages_used"] == pool_of(slow_engine).num_used > 0
    slow_engine.resume()
    for stream in streams:
        stream.close()


def test_a_second_call_changes_nothing_and_two_engines_do_not_collide(
    monitored: eSurge, make_faked: Callable[..., eSurge], tmp_path: Path
) -> None:  # holds S14
    urls = monitored.start_monitoring(**ONLY_METRICS)
    num_threads = threading.active_count()
    assert monitored.start_monitoring(**ONLY_METRICS, log_file=str(tmp_path / "second")) == urls
    assert threading.active_count() == num_threads
    assert not (tmp_path / "second").exists()
    other = make_faked()
    port = int(urls["prometheus"].split(":")[2].split("/")[0])
    with pytest.raises(ValueError, match=f"prometheus_port = {port}"):
        other.start_monitoring(prometheus_port=port, start_grafana=False)
    assert not other.monitoring_active
    assert len(other.audience) == 0
    others = other.start_monitoring(**ONLY_METRICS)
    monitored.generate(PROMPT, GREEDY_ON)
    assert scrape(urls["prometheus"])["esurge_tokens_generated_total"] == 16
    assert scrape(others["prometheus"])["esurge_tokens_generated_total"] == 0
    other.stop_monitoring()
    other.stop_monitoring()
    with pytest.raises(OSError, match="refused"):
        fetch(others["prometheus"])
    assert scrape(urls["prometheus"])["esurge_requests_total/completed"] == 1


def test_monitoring_stays_while_the_service_stops_and_starts(
    monitored: eSurge,
) -> None:  # holds S14
    url = monitored.start_monitoring(**ONLY_METRICS)["prometheus"]
    monitored.terminate()
    assert monitored.monitoring_active
    assert scrape(url)["esurge_running_requests"] == 0
    monitored.initiate()
    monitored.generate(PROMPT, GREEDY_ON)
    assert scrape(url)["esurge_tokens_generated_total"] == 16


def test_wrong_values_are_refused_and_old_ones_are_deprecated(
    monitored: eSurge, tmp_path: Path
) -> None:  # holds S14
    for name, value in {
        "prometheus_port": 70000,
        "grafana_port": 0,
        "log_interval": 0.0,
        "history_size": 0,
        "log_file": str(tmp_path),
    }.items():
        with pytest.raises(ValueError, match=f"{name} = "):
            monitored.start_monitoring(**(ONLY_METRICS | {name: value}))
        assert not monitored.monitoring_active
        assert len(monitored.audience) == 0
    for old in ({"dashboard_port": 8080}, {"dashboard_host": "x"}, {"enable_dashboard": True}):
        with pytest.warns(DeprecationWarning, match=next(iter(old))) as caught:
            monitored.start_monitoring(enable_prometheus=False, start_grafana=False, **old)
        assert caught[0].filename == __file__
        monitored.stop_monitoring()


def test_without_the_package_there_is_no_exporter_and_one_warning(
    monitored: eSurge, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # holds S14
    monkeypatch.delitem(sys.modules, "enginebay_esurge.prometheus", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with caplog.at_level(logging.WARNING, "enginebay.esurge"):
        assert monitored.start_monitoring(**ONLY_METRICS) == {}
    assert monitored.monitoring_active
    assert [record.message for record in caplog.records] == [
        "no Prometheus metrics: run pip install 'enginebay[metrics]'"
    ]
    monitored.generate(PROMPT, GREEDY_ON)


def test_the_log_has_figures_and_every_request(
    monitored: eSurge, tmp_path: Path
) -> None:  # holds S14
    for detailed in (True, False):
        path = tmp_path / "logs" / f"{detailed}.jsonl"
        monitored.start_monitoring(
            enable_prometheus=False,
            start_grafana=False,
            log_file=str(path),
            log_interval=0.05,
            history_size=2,
            enable_detailed_logging=detailed,
        )
        monitored.generate(PROMPTS, GREEDY_ON, request_id=[f"logged {i}" for i in range(4)])
        until(lambda: '"num_completed": 4' in path.read_text())  # noqa: B023
        monitored.stop_monitoring()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        requests = [line for line in lines if line["event"] == "request"]
        assert {line["request_id"] for line in requests} == (
            {f"logged {i}" for i in range(4)} if detailed else set()
        )
        assert all(
            line["num_generated_tokens"] == 16 and line["latency_s"] > 0 for line in requests
        )
        last = lines[-1]
        assert (last["event"], last["num_completed"], last["num_tokens"]) == ("figures", 4, 64)
        assert last["tokens_per_second"] > 0
        assert last["mean_execute_s"] > 0 < last["mean_latency_s"]
        assert last["num_pages"] == 24


@pytest.fixture
def service() -> Service:
    """One that was not started, over a fake engine."""
    return Service(compose_fake(options={"page_size": 16, "num_pages": 25}), drops_cache=True)


def test_what_has_ended_since_the_last_interval_is_in_the_log_when_it_is_closed(
    service: Service, tmp_path: Path
) -> None:  # holds S14
    path, figures = tmp_path / "late.jsonl", History(service, Totals(), 2).figures
    kept = LogFile(str(path), figures, 3600.0, is_detailed=True)
    kept.completed(RequestOutput("late", "", [], [CompletionOutput(0, "", [])], finished=True))
    kept.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["request", "figures"]
    assert lines[0]["request_id"] == "late"


def test_only_so_much_history_is_kept(service: Service) -> None:  # holds S14
    history = History(service, Totals(), 2)
    for i in range(1, 5):
        history.updated(Update(i, i / 100, 0.0, i, 10 * i, 1, 0, 0, 0))
        history.executed(Execution(time.monotonic(), i / 10, i, 16))
        history.completed(RequestOutput("", "", [], [], processing_time=i, first_token_time=i / 2))
    figures = history.figures()
    assert (figures.mean_batch_size, figures.mean_latency_s, figures.mean_first_token_s) == (
        3.5,
        3.5,
        1.75,
    )
    means = (figures.mean_schedule_s, figures.mean_execute_s)
    assert means == (pytest.approx(0.035), pytest.approx(0.35))
    assert (figures.num_tokens, figures.num_preempted, figures.num_scheduled_tokens) == (64, 4, 40)
    assert figures.tokens_per_second > 0


@pytest.mark.parametrize("wrong", [{}, {"log_file": "/"}, {"prometheus_port": -1}])
def test_nobody_is_told_any_more_when_monitoring_has_ended_or_failed(
    service: Service, tmp_path: Path, wrong: dict[str, Any]
) -> None:  # holds S14
    totals = Totals()
    monitoring = Monitoring(service, totals, "my engine")
    chosen = {"log_file": str(tmp_path / "log"), "enable_console": True} | ONLY_METRICS | wrong
    settings = MonitoringSettings(**DEFAULTS | chosen)
    if wrong:
        with pytest.raises(InputError, match=next(iter(wrong))):
            monitoring.start(settings)
    else:
        monitoring.start(settings)
        assert (len(service.audience), len(totals.listeners)) == (2, 3)
        monitoring.stop()
    assert (len(service.audience), totals.listeners, monitoring.is_active) == (0, (), False)


def test_the_console_shows_figures_and_ends_cleanly(service: Service) -> None:  # holds S14
    history = History(service, Totals(), 100)
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=100)
    threads = set(threading.enumerate())
    monitor = ConsoleMonitor("my engine", history.figures, console)
    [thread] = set(threading.enumerate()) - threads
    assert thread.daemon
    shown = len(terminal.getvalue())
    until(lambda: len(terminal.getvalue()) > shown)
    monitor.close()
    assert set(threading.enumerate()) == threads
    text = terminal.getvalue()
    assert "my engine" in text
    assert "0 of 24 pages" in text
    assert text.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_the_console_runs_beside_requests(monitored: eSurge) -> None:  # holds S14
    monitored.start_monitoring(enable_prometheus=False, start_grafana=False, enable_console=True)
    assert "esurge-console" in {thread.name for thread in threading.enumerate()}
    monitored.generate(PROMPT, GREEDY_ON)
    monitored.stop_monitoring()
    assert "esurge-console" not in {thread.name for thread in threading.enumerate()}


def test_an_engine_that_is_collected_leaves_no_thread_and_no_port(
    faked: None, tmp_path: Path
) -> None:  # holds S14
    before = set(threading.enumerate())
    engine = eSurge(BRIEF, **OPTIONS)
    engine.initiate()
    log_file = str(tmp_path / "log.jsonl")
    url = engine.start_monitoring(**ONLY_METRICS, log_file=log_file, enable_console=True)[
        "prometheus"
    ]
    engine.start_profiling(tmp_path / "profile")
    fetch(url)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    until(lambda: set(threading.enumerate()) <= before)
    with socket.socket() as probe, pytest.raises(OSError, match="refused"):
        probe.connect(("127.0.0.1", int(url.split(":")[2].split("/")[0])))
    assert list((tmp_path / "profile").glob("plugins/profile/*/*.xplane.pb"))
