"""Shadow mode behind eSurge: what it finds is exported to Prometheus, and without a shadow nothing
is.
"""

from __future__ import annotations

import urllib.request

import pytest

from enginebay.compose.shadowing import choose_shadow
from enginebay.config import make_config
from enginebay.runner.shadow import Shadow
from enginebay_esurge import eSurge
from tests.unit.esurge.small import HOT_ON, PROMPT, token_ids

pytest.importorskip("prometheus_client")

pytestmark = pytest.mark.xdist_group("esurge")


def test_what_a_shadow_finds_is_exported(real_engine: eSurge) -> None:
    expected = token_ids(real_engine.generate(PROMPT, HOT_ON))
    plan, runner = real_engine.plan, real_engine.engine.runner
    url = real_engine.start_monitoring(prometheus_port=0, start_grafana=False)["prometheus"]

    def samples() -> str:
        return str(urllib.request.urlopen(url, timeout=30).read().decode())

    assert "esurge_shadow" not in samples()
    asked = make_config(
        {"shadow": {"attention": "tests.unit.unregistered:garbage_attention@1"}}
    ).shadow
    config = plan.config.model_copy(update={"shadow": asked})
    chosen = choose_shadow(plan.registry, config, plan.kernels, plan.model.info, plan.placement)
    assert chosen is not None
    runner.shadow = Shadow(chosen.parts(plan.kernels, plan.model.info, plan.placement))
    try:
        assert token_ids(real_engine.generate(PROMPT, HOT_ON)) == expected
        found = samples()
    finally:
        runner.shadow = None
        real_engine.stop_monitoring()
    assert 'esurge_shadow_compared_steps{phase="decode"}' in found
    assert 'esurge_shadow_nonfinite_values{phase="decode"} 0.0' in found
    assert 'kernel="tests.unit.unregistered:garbage_attention",phase="decode"' in found
    assert "esurge_shadow_failed_programs 0.0" in found
