"""What the server reports about itself: when it compiles, and metrics without their library."""

from __future__ import annotations

import sys

import pytest

from tests.server.in_process_client import Asker, error_of


def test_a_lazy_server_says_when_it_compiles(asker: Asker) -> None:
    assert asker.get("/explain").json()["demo"]["compiling"].endswith("when a request needs it")
    status = asker.get("/readiness").json()["models"]["demo"]
    assert (status["ready"], status["warmup"]) == (True, "lazy")
    asker.model.warmup = "ready"
    assert "before requests are answered" in asker.get("/explain").json()["demo"]["compiling"]


def test_metrics_without_their_library_are_not_there(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    error = error_of(asker.get("/metrics"), 501)
    assert "pip install 'enginebay[serve]'" in error["message"]
