"""The arguments of start_monitoring, and their checks."""

from __future__ import annotations

import dataclasses
import warnings

from enginebay.errors import InputError


@dataclasses.dataclass(frozen=True, slots=True)
class MonitoringSettings:
    """The arguments of eSurge.start_monitoring, in their order."""

    dashboard_port: int | None
    prometheus_port: int
    dashboard_host: str | None
    enable_prometheus: bool
    enable_dashboard: bool | None
    enable_console: bool
    log_file: str | None
    log_interval: float
    history_size: int
    enable_detailed_logging: bool
    start_grafana: bool
    grafana_port: int
    grafana_host: str | None
    grafana_image: str
    grafana_use_docker: bool
    grafana_admin_user: str
    grafana_admin_password: str
    grafana_allow_anonymous: bool
    grafana_datasource_name: str
    grafana_datasource_uid: str | None
    grafana_datasource_url: str | None

    def check(self) -> None:
        """Raise InputError for a wrong value, and warn about deprecated arguments."""
        for name in ("dashboard_port", "dashboard_host", "enable_dashboard"):
            if getattr(self, name) is not None:
                text = f"{name} has no effect: Grafana shows the dashboard. Omit {name}."
                warnings.warn(text, DeprecationWarning, stacklevel=4)
        for name, allowed, is_right in (
            ("log_interval", "seconds, more than 0", self.log_interval > 0),
            ("history_size", "1 or more", self.history_size >= 1),
            ("prometheus_port", "0 to 65535", 0 <= self.prometheus_port <= 65535),
            ("grafana_port", "1 to 65535", 1 <= self.grafana_port <= 65535),
        ):
            if not is_right:
                given = f"{name} = {getattr(self, name)}"
                raise InputError(given, allowed, f"Omit {name} to use its default.")
