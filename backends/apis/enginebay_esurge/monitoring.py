"""Monitoring: the exporter, console, log file and Grafana of one engine, started and stopped
together.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import jax

from enginebay.compose.plan import Plan
from enginebay.serving.observer import Observer
from enginebay_esurge.grafana import HERE, Grafana, check_grafana, local_prometheus
from enginebay_esurge.monitoring_settings import MonitoringSettings
from enginebay_esurge.observing import History
from enginebay_esurge.outputs import RequestOutput
from enginebay_esurge.service import Service
from enginebay_esurge.totals import Totals

log = logging.getLogger("enginebay.esurge")


class Monitoring:
    """All monitors of one engine. Thread-safe. They continue when the service stops and starts
    again.
    """

    def __init__(self, service: Service, totals: Totals, name: str) -> None:
        self._service = service
        self._totals = totals
        self._name = name
        self._lock = threading.RLock()
        self._running: contextlib.ExitStack | None = None
        self._urls: dict[str, str] = {}

    @property
    def is_active(self) -> bool:
        """Whether monitoring is running."""
        return self._running is not None

    def start(self, settings: MonitoringSettings) -> dict[str, str]:
        """Start the requested monitors, and return their URLs; if they run already, return the
        URLs.

        Missing packages are skipped with a warning in the log. A wrong value, a used
        port or an unwritable log file raises InputError, and no new monitor is left running.
        """
        settings.check()
        with self._lock:
            if self._running is None:
                with contextlib.ExitStack() as stack:
                    self._urls = self._start(settings, stack)
                    self._running = stack.pop_all()
            return dict(self._urls)

    def stop(self) -> None:
        """Stop every thread, server and process, and remove their files. Does nothing when
        stopped.
        """
        with self._lock:
            running, self._running, self._urls = self._running, None, {}
            if running is not None:
                running.close()

    def _start(self, settings: MonitoringSettings, stack: contextlib.ExitStack) -> dict[str, str]:
        urls: dict[str, str] = {}
        history = History(self._service, self._totals, settings.history_size)
        self._attach(stack, history, history.completed)
        if settings.enable_prometheus:
            url = self._start_prometheus(settings.prometheus_port, history, stack)
            if url is not None:
                urls["prometheus"] = url
        if settings.log_file is not None:
            from enginebay_esurge.logfile import LogFile

            logs = LogFile(
                settings.log_file,
                history.figures,
                settings.log_interval,
                is_detailed=settings.enable_detailed_logging,
            )
            stack.callback(logs.close)
            self._attach(stack, None, logs.completed)
        if settings.enable_console:
            from enginebay_esurge.console import ConsoleMonitor

            stack.callback(ConsoleMonitor(self._name, history.figures).close)
        if settings.start_grafana:
            url = start_grafana(
                settings, urls.get("prometheus"), stack, speculates=history.speculates
            )
            if url is not None:
                urls["grafana"] = url
        return urls

    def _start_prometheus(
        self, port: int, history: History, stack: contextlib.ExitStack
    ) -> str | None:
        try:
            from enginebay_esurge.prometheus import Exporter, MetricsServer
        except ImportError as error:
            if error.name is None or error.name.split(".")[0] != "prometheus_client":
                raise
            log.warning("no Prometheus metrics: run pip install 'enginebay[metrics]'")
            return None
        exporter = Exporter(history, about(self._service.parts.plan, self._name))
        server = MetricsServer(exporter.registry, HERE, port)
        stack.callback(server.close)
        self._attach(stack, exporter, exporter.completed)
        return server.url

    def _attach(
        self,
        stack: contextlib.ExitStack,
        observer: Observer | None,
        listener: Callable[[RequestOutput], Any],
    ) -> None:
        """Add an observer of the engine and a listener for completed requests, until the stack
        closes.
        """
        totals, audience = self._totals, self._service.audience
        totals.listeners = (*totals.listeners, listener)
        stack.callback(_remove_listener, totals, listener)
        if observer is not None:
            audience.add(observer)
            stack.callback(audience.remove, observer)


def about(plan: Plan, name: str) -> dict[str, str]:
    """Return labels that describe the server, for the system metric."""
    config = plan.config
    return {
        "name": name,
        "model": config.model,
        "engine": config.engine.name,
        "scheduler": config.scheduler.name,
        "platform": plan.platform.name,
        "devices": str(len(plan.platform.devices())),
        "dtype": config.dtype,
        "max_model_len": str(config.max_model_len),
        "max_num_seqs": str(config.max_num_seqs),
        "jax": jax.__version__,
    }


def _remove_listener(totals: Totals, listener: Callable[[RequestOutput], Any]) -> None:
    totals.listeners = tuple(one for one in totals.listeners if one != listener)


def start_grafana(
    settings: MonitoringSettings,
    metrics_url: str | None,
    stack: contextlib.ExitStack,
    *,
    speculates: bool = False,
) -> str | None:
    """Return the URL of a Grafana that reads from the configured data source, or else from a
    Prometheus server of its own that scrapes the exporter. None without a source, or when Grafana
    does not start.

    The dashboard has an additional panel for an engine that `speculates`. Without a Prometheus
    server the data source is the exporter, which answers no queries.
    """
    source, trouble = settings.grafana_datasource_url, ""
    if source is None and metrics_url is None:
        log.warning(
            "no Grafana: it has no data source. Enable Prometheus, or pass grafana_datasource_url"
        )
        return None
    with contextlib.ExitStack() as own:
        try:
            check_grafana(settings)
            if source is None:
                assert metrics_url is not None, "checked above"
                try:
                    source = own.enter_context(local_prometheus(metrics_url))
                except (RuntimeError, OSError) as error:
                    source, trouble = metrics_url.removesuffix("/metrics"), str(error)
            grafana = Grafana(settings, source, speculates=speculates)
        except (RuntimeError, OSError) as error:
            log.warning("no Grafana: %s", error)
            return None
        own.callback(grafana.close)
        if trouble:
            log.warning(
                "Grafana has no data: %s. Install Prometheus, or pass grafana_datasource_url, the "
                "address of a Prometheus server that scrapes the exporter",
                trouble,
            )
        stack.enter_context(own.pop_all())
        return grafana.url
