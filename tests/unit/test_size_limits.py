"""Sizes are checked before anything of that size is made."""

from __future__ import annotations

import json
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from enginebay import LLM, SamplingParams
from enginebay.compose.composition import build, make_parts, make_plan
from enginebay.config import make_config
from enginebay.errors import CheckpointError, RequestError, UnsupportedError
from enginebay_esurge import eSurge
from enginebay_oengine.opened_model import GenerationConfig, OpenedModel
from enginebay_oengine.page_manager import HBMPageManager
from enginebay_oengine.paged_cache import PagedAttentionCache
from enginebay_paged.pool import PagePool
from enginebay_runtime.account import ACCOUNT
from enginebay_runtime.rows import RowTable
from tests.brief import BRIEF
from tests.unit.esurge.small import OPTIONS
from tests.unit.serving import GREEDY, SIZES, with_

MIB = 2**20
MANY_PAGES = 10**7
"""More than any machine's memory holds; small enough that a list of them does not end the test run.
"""


def peak_bytes(make: Callable[[], object]) -> int:
    """Most memory that Python held while an object was made."""
    tracemalloc.start()
    try:
        make()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def engine(**options: Any) -> dict[str, Any]:
    return {"model": BRIEF, "dtype": "float32", "engine": {"name": "oengine", **options}}


def opened() -> OpenedModel:
    """The small model without its weights, which sizes do not need."""
    plan = make_plan(make_config(engine()))
    return OpenedModel(plan, make_parts(plan), {}, GenerationConfig())


def test_a_pool_takes_memory_for_the_pages_that_were_taken_alone() -> None:
    assert peak_bytes(lambda: PagePool(10**6)) < MIB / 10
    pool = PagePool(10**6)
    taken = [pool.take() for _ in range(3)]
    pool.drop(taken[1], keep=False)
    assert (taken, pool.num_free, pool.num_used) == ([1, 2, 3], 10**6 - 3, 2)
    assert [pool.take(), pool.take()] == [2, 4], "a page that came back is taken before a new one"


@pytest.mark.parametrize("options", [{"num_pages": MANY_PAGES}, {"cache_bytes": 10**13}])
def test_a_cache_that_does_not_fit_is_refused_before_anything_is_made(
    options: dict[str, int],
) -> None:
    plan = make_plan(make_config(engine(**options)))

    def refused() -> None:
        with pytest.raises(
            UnsupportedError, match=r"cache .* do not fit the device.*num_pages or cache_bytes"
        ):
            build(plan)

    assert peak_bytes(refused) < 20 * MIB


def test_metadata_of_a_cache_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="do not fit the device"):
        PagedAttentionCache.create_metadata(opened(), num_pages=MANY_PAGES)


def test_a_page_manager_takes_memory_for_the_sequences_that_it_has_alone() -> None:
    metadata = PagedAttentionCache.create_metadata(
        opened(), num_pages=100_000, page_size=8, max_length=16
    )
    assert peak_bytes(lambda: HBMPageManager(metadata)) < 20 * MIB


def test_a_table_of_rows_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="a table of 4096 rows of 2147483647 tokens"):
        RowTable(4096, 2**31 - 1, 1024, 32000, [64])


def test_layers_are_counted_before_they_are_made(tmp_path: Path) -> None:
    config = json.loads((Path(BRIEF) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**6}))

    def refused() -> None:
        with pytest.raises(
            CheckpointError, match=r"num_hidden_layers = 1000000\. Allowed: 1 to 1000"
        ):
            make_plan(make_config(engine(), {"model": str(tmp_path)}))

    assert peak_bytes(refused) < 20 * MIB


def test_max_tokens_none_takes_what_the_cache_holds(faked: None) -> None:
    sizes = SIZES | engine(page_size=16, num_pages=6)
    with LLM(config=make_config(sizes)) as llm:
        free = with_(GREEDY, max_tokens=None, ignore_eos=True)
        output = llm.generate("Once upon a time", free)[0]
        assert (
            len(output.prompt_token_ids) + output.num_generated_tokens
            == 5 * 16
            < SIZES["max_model_len"]
        )
        with pytest.raises(RequestError, match="80 together, which is the size of the whole cache"):
            llm.generate("Once upon a time", with_(GREEDY, max_tokens=100))
        with pytest.raises(RequestError, match="a prompt of 90 tokens and up to 1 new ones"):
            llm.generate([5] * 90, free)


def test_max_tokens_beyond_the_context_is_reduced_and_ends_with_length(faked: None) -> None:
    with LLM(config=make_config(SIZES)) as llm:
        output = llm.generate("Once", with_(GREEDY, max_tokens=10**6, ignore_eos=True))[0]
        num_tokens = len(output.prompt_token_ids) + output.num_generated_tokens
        assert num_tokens == SIZES["max_model_len"]
        assert output.outputs[0].finish_reason == "length"


def test_max_tokens_none_takes_what_the_cache_holds_in_esurge(faked: None) -> None:
    with eSurge(BRIEF, **OPTIONS | {"engine_options": {"num_pages": 6}}) as one:
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        output = one.generate("Once upon a time", params)[0]
        assert len(output.prompt_token_ids) + output.num_generated_tokens == 5 * 16


def test_an_engine_that_does_not_fit_beside_another_is_refused_until_that_is_closed() -> None:
    num_bytes = int(0.6 * make_plan(make_config(engine())).platform.hardware().memory_bytes)
    config = make_config(engine(cache_bytes=num_bytes))
    with LLM(config=config) as first:
        with pytest.raises(UnsupportedError, match=r"do not fit .* MiB of this process's other"):
            LLM(config=config)
        assert ACCOUNT.promised_bytes(first.plan.placement.device) >= num_bytes
        runner = first.engine.executor
        arrays = [weakref.ref(x) for x in jax.tree.leaves((runner.model_weights, runner.state))]
    assert not [array for array in arrays if array() is not None], (
        "close() leaves the engine's arrays allocated"
    )
    LLM(config=config).close()
