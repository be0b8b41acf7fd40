"""Shadow mode behind eSurge: what it finds is exported to Prometheus, and without a shadow nothing is."""

from __future__ import annotations

import pytest

from enginebay.build.shadowing import choose_shadow
from enginebay.config import make_config
from enginebay.runner.shadow import Shadow
from enginebay_esurge import eSurge
from enginebay_esurge.observing import History
from tests.unit.esurge.small import GREEDY_ON, PROMPT, token_ids

prometheus_client = pytest.importorskip("prometheus_client")

pytestmark = pytest.mark.xdist_group("esurge")


def test_what_a_shadow_finds_is_exported(engine: eSurge) -> None:
    from enginebay_esurge.prometheus import Exporter

    expected = token_ids(engine.generate(PROMPT, GREEDY_ON))
    plan, runner = engine._service.parts.plan, engine._service.parts.engine.runner
    exporter = Exporter(History(engine._service, engine._serving.totals, 10), {})

    def samples() -> str:
        return str(prometheus_client.generate_latest(exporter.registry).decode())

    assert "esurge_shadow" not in samples()
    asked = make_config({"shadow": {"attention": "tests.unit.unregistered:garbage_attention@1"}}).shadow
    config = plan.config.model_copy(update={"shadow": asked})
    chosen = choose_shadow(plan.registry, config, plan.kernels, plan.model.info, plan.placement)
    assert chosen is not None
    runner.shadow = Shadow(chosen.parts(plan.kernels, plan.model.info, plan.placement))
    try:
        assert token_ids(engine.generate(PROMPT, GREEDY_ON)) == expected
        found = samples()
    finally:
        runner.shadow = None
    assert 'esurge_shadow_compared_steps{phase="decode"}' in found
    assert 'esurge_shadow_nonfinite_values{phase="decode"} 0.0' in found
    assert 'kernel="tests.unit.unregistered:garbage_attention",phase="decode"' in found
    assert "esurge_shadow_failed_programs 0.0" in found
