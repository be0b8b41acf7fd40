"""eSurge over the executor of a plugin keeps what it does over its own: prefixes in files, other
weights, and profiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay import SamplingParams
from enginebay.contracts.model import Weights
from enginebay_esurge import eSurge
from tests.brief import LATE
from tests.plugins import test_third_party_in_apis as third_party
from tests.pool import few_sizes

pytestmark = [pytest.mark.xdist_group("third_party_in_apis"), pytest.mark.long]

OPTIONS: dict[str, Any] = third_party.SIZES | {
    "page_size": 16,
    "compile_runner": False,
    "use_aot_forward": False,
    "executor": f"{__name__}:Lending",
}
PROMPT = [list(range(5, 45))]
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


class Lending(third_party.Forwarding):
    """An executor of a plugin that runs in this process, and so lends its weights."""

    def weights(self) -> Weights:
        return self._inner.weights()


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with few_sizes():
        yield


def tokens(engine: eSurge) -> list[int]:
    """What the engine writes; its executor is the plugin's."""
    assert isinstance(engine.engine.executor, Lending)
    return list(engine.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids)


def test_prefixes_are_found_in_the_files_of_an_engine_before(tmp_path: Path) -> None:
    kept = {"prefix_host_bytes": 2**24, "prefix_disk_dir": str(tmp_path)}
    found = []
    for _ in range(2):
        with eSurge(LATE, **OPTIONS, engine_options=kept) as engine:
            output = engine.generate(PROMPT, PARAMS, use_tqdm=False)[0]
        assert output.metrics is not None
        found.append((output.metrics["cached_tokens"], output.outputs[0].token_ids))
    assert [cached for cached, _ in found] == [0, 32]
    assert found[0][1] == found[1][1]


def test_other_weights_give_the_tokens_of_an_engine_that_has_them() -> None:
    with eSurge(LATE, **OPTIONS) as engine:
        old = tokens(engine)
        weights = engine.engine.executor.weights()
        halves = {p: np.asarray(w) * np.float32(0.5) for p, w in weights.items() if "mlp" in p}
        whole = {path: np.asarray(weights[path]) for path in halves}
        engine.update_model_weights(graphstate=halves)
        assert tokens(engine) != old
        engine.update_model_weights(graphstate=whole)
        assert tokens(engine) == old


def test_a_profile_ends_after_its_updates_and_leaves_one_trace(tmp_path: Path) -> None:
    with eSurge(LATE, **OPTIONS) as engine:
        engine.start_profiling(tmp_path, num_batches=2)
        tokens(engine)
        assert not engine.profiling_active
    [trace] = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 1000
