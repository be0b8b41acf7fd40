"""Shadow mode behind eSurge: what it finds is exported to Prometheus, and without a shadow nothing
is.
"""

from __future__ import annotations

import math
import urllib.request

import pytest

from enginebay.compose.shadowing import choose_shadow
from enginebay.config import make_config
from enginebay.shadow_report import LayerDifference, ShadowPhase, ShadowReport
from enginebay_esurge import eSurge
from enginebay_runtime.shadow import Shadow
from tests.unit.esurge.small import HOT_ON, PROMPT, token_ids

pytest.importorskip("prometheus_client")

pytestmark = pytest.mark.xdist_group("esurge")


@pytest.mark.long
def test_what_a_shadow_finds_is_exported(real_engine: eSurge) -> None:
    expected = token_ids(real_engine.generate(PROMPT, HOT_ON))
    plan, runner = real_engine.plan, real_engine.engine.executor
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


REPORT = ShadowReport(
    "attention",
    "candidate",
    0.5,
    phases=(
        ShadowPhase("decode", "xla", 9, 7, 0.25, 0.5),
        ShadowPhase("prefill", "native", 5, 3, 2.0, 4.0),
        ShadowPhase("mixed", "xla", 2, 0, math.nan, math.nan),
    ),
    layers=(
        LayerDifference("decode", "full", 0, 0.125, 0.1, 11, 0, 7),
        LayerDifference("decode", "full", 1, 0.75, 0.1, 13, 0, 7),
        LayerDifference("prefill", "full", 0, 1.5, 0.1, 2, 0, 30),
    ),
    num_failed=6,
    error="RuntimeError: not written yet",
)


def test_every_figure_of_a_report_is_exported(
    engine: eSurge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of phases that were compared: of all layers the largest difference, and values that are not
    finite together.
    """
    monkeypatch.setattr(type(engine.engine), "shadow_report", REPORT)
    url = engine.start_monitoring(prometheus_port=0, start_grafana=False)["prometheus"]
    text = urllib.request.urlopen(url, timeout=30).read().decode()
    engine.stop_monitoring()
    assert [line for line in text.splitlines() if line.startswith("esurge_shadow_")] == [
        'esurge_shadow_compared_steps{phase="decode"} 7.0',
        'esurge_shadow_compared_steps{phase="prefill"} 3.0',
        'esurge_shadow_difference{phase="decode"} 0.75',
        'esurge_shadow_difference{phase="prefill"} 1.5',
        'esurge_shadow_nonfinite_values{phase="decode"} 24.0',
        'esurge_shadow_nonfinite_values{phase="prefill"} 2.0',
        'esurge_shadow_attention_seconds{kernel="xla",phase="decode"} 0.25',
        'esurge_shadow_attention_seconds{kernel="candidate",phase="decode"} 0.5',
        'esurge_shadow_attention_seconds{kernel="native",phase="prefill"} 2.0',
        'esurge_shadow_attention_seconds{kernel="candidate",phase="prefill"} 4.0',
        "esurge_shadow_failed_programs 6.0",
    ]
