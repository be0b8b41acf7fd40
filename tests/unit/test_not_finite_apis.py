"""Logits with NaN in the documented APIs of oEngine and vInference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from enginebay.errors import NonFiniteError
from enginebay_oengine import InitialSequenceRequest, open_model
from enginebay_vinference import vInference, vInferenceConfig
from tests.unit.oengine.small import make_engine, serve
from tests.unit.serving import SIZES_OF_APIS
from tests.unit.test_not_finite import BAD, BROKEN, GOOD, broken_copy

_CONFIG = vInferenceConfig(max_new_tokens=4, streaming_chunks=2, pad_token_id=0, eos_token_id=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("nan") / "m"
    broken_copy(folder, "model.embed_tokens.weight", BROKEN, float("nan"))
    return {"model": str(folder), "processors": ()} | SIZES_OF_APIS


@pytest.mark.long
def test_oengine_ends_the_broken_request_and_goes_on_with_others(model: dict[str, Any]) -> None:
    engine = make_engine(open_model(model))
    requests = [
        InitialSequenceRequest(name, np.array(prompt), max_tokens=4, ignore_eos=True)
        for name, prompt in (("good", GOOD), ("bad", BAD), ("more", GOOD))
    ]
    tokens = serve(engine, requests, set())
    assert len(tokens["good"]) == 4
    assert tokens["good"] == tokens["more"]
    assert tokens["bad"] == [-1]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:nothing is precompiled")
def test_vinference_raises(model: dict[str, Any]) -> None:
    inference = vInference(model, None, _CONFIG)
    ids = np.array([GOOD, BAD], np.int32)
    with pytest.raises(NonFiniteError, match="logits of row 1 in a prefill step"):
        list(inference.generate(ids, np.ones_like(ids)))
