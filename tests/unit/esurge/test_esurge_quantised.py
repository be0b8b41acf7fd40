"""eSurge with quantised weights and a quantised cache: LLM's tokens, also of completions and of
prompts that begin alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

from enginebay import LLM
from enginebay.weights import QuantizedArray
from enginebay_esurge import eSurge
from tests.unit.esurge.small import GREEDY_ON, HOT, PROMPTS, token_ids, with_

if TYPE_CHECKING:
    from tests.pool import EnginePool

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("esurge")]
Make = Callable[..., AbstractContextManager[eSurge]]


@pytest.mark.parametrize(
    "choices",
    [
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "uint4", "quantization": "int4"},
        {"kv_cache_dtype": "fp8", "quantization": "int8", "activation_quantization": "int8"},
    ],
    ids=lambda choices: "-".join(choices.values()),
)
def test_tokens_are_those_of_an_llm(
    choices: dict[str, Any], make_real: Make, engine_pool: EnginePool
) -> None:
    several = with_(HOT, n=3, seed=5)
    with make_real(**choices) as engine:
        config = engine.plan.config
        runner = engine.engine.executor
        assert "k_scales" in runner.state.cache["full"][0]
        is_quantised = isinstance(runner.model_weights["layers.0.mlp.up"], QuantizedArray)
        assert is_quantised == ("quantization" in choices)
        alone = [engine.generate(prompt, GREEDY_ON)[0] for prompt in PROMPTS]
        together = engine.generate(PROMPTS, GREEDY_ON)
        branches = engine.generate(PROMPTS[0], several)[0]
    with engine_pool.leases(), LLM(config=config) as llm:
        expected = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY_ON)]
        expected_branches = llm.generate(PROMPTS[0], several)[0]
    assert token_ids(alone) == token_ids(together) == expected
    assert [(c.index, c.token_ids) for c in branches.outputs] == [
        (c.index, c.token_ids) for c in expected_branches.outputs
    ]
