"""The documented arguments of start_monitoring, checked."""

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
        """InputError for a wrong value, DeprecationWarning for a value that nothing looks at."""
        for name, value in (
            ("dashboard_port", self.dashboard_port),
            ("dashboard_host", self.dashboard_host),
            ("enable_dashboard", self.enable_dashboard),
        ):
            if value is not None:
                text = f"{name} does nothing any more: Grafana shows the dashboard. Leave it out."
                warnings.warn(text, DeprecationWarning, stacklevel=4)
        wrong = [
            (
                f"log_interval = {self.log_interval}",
                "seconds, more than 0",
                not self.log_interval > 0,
            ),
            (f"history_size = {self.history_size}", "1 or more", self.history_size < 1),
            *(
                (f"{name} = {port}", f"{least} to 65535", not least <= port <= 65535)
                for name, port, least in (
                    ("prometheus_port", self.prometheus_port, 0),
                    ("grafana_port", self.grafana_port, 1),
                )
            ),
        ]
        for given, allowed, is_wrong in wrong:
            if is_wrong:
                raise InputError(given, allowed, "Correct it, or leave it out.")
