"""AppState: what one application has: its models, settings, limits and whether it is ending."""

from __future__ import annotations

import dataclasses

from enginebay_server.limits import ConcurrencyLimit
from enginebay_server.metrics import Metrics
from enginebay_server.response_store import ResponseStore
from enginebay_server.served import ServedModels
from enginebay_server.settings import ServerSettings


@dataclasses.dataclass(slots=True)
class AppState:
    """Of one application; two applications of a process share none of it."""

    models: ServedModels
    settings: ServerSettings
    limit: ConcurrencyLimit
    metrics: Metrics
    responses: ResponseStore
    is_draining: bool = False
    """The server ends: it answers what it has accepted, and refuses everything else."""
    num_open: int = 0
    """HTTP requests that were accepted and are not answered yet."""

    @property
    def is_alive(self) -> bool:
        """Whether all engines live."""
        return all(model.is_alive for model in self.models)

    @property
    def is_ready(self) -> bool:
        """Whether requests to every model are answered."""
        return not self.is_draining and all(model.is_ready for model in self.models)
