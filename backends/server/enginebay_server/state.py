"""AppState: the models, settings, limits and state of one application."""

from __future__ import annotations

import dataclasses

from enginebay_server.lanes import Lanes
from enginebay_server.limits import ConcurrencyLimit
from enginebay_server.metrics import Metrics
from enginebay_server.response_store import ResponseStore
from enginebay_server.served import ServedModels
from enginebay_server.settings import ServerSettings
from enginebay_server.tracer import Tracer


@dataclasses.dataclass(slots=True)
class AppState:
    """The state of one application. Two applications of a process share nothing."""

    models: ServedModels
    settings: ServerSettings
    limit: ConcurrencyLimit
    metrics: Metrics
    responses: ResponseStore
    tracer: Tracer | None = None
    lanes: Lanes = dataclasses.field(default_factory=Lanes)
    is_draining: bool = False
    """Whether the server drains: it answers accepted requests and refuses new ones."""
    num_open: int = 0
    """Number of HTTP requests that were accepted and not yet answered."""
    body_bytes: int = 0
    """Bytes of the bodies of these requests."""

    def close(self) -> None:
        """Close the stored responses, and send the last spans."""
        self.responses.close()
        self.lanes.close()
        if self.tracer is not None:
            self.tracer.close()

    @property
    def is_alive(self) -> bool:
        """Whether all engines are alive."""
        return all(model.is_alive for model in self.models)

    @property
    def is_ready(self) -> bool:
        """Whether requests to every model are answered."""
        return not self.is_draining and all(model.is_ready for model in self.models)

    async def end_all(self) -> None:
        """Close the engines, so that the accepted requests end with an error."""
        for model in self.models:
            await self.lanes.ending.run(model.llm.close)
