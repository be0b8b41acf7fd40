"""The DashInfer API over engines that compute."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay_dashinfer.allspark import (
    ASGenerationConfigBuilder,
    AsStatus,
    DashInferModel,
    Engine,
    MultiMediaInfo,
    ResultQueue,
)
from enginebay_paged.sizing import free_bytes
from tests.pool import few_sizes
from tests.unit.dashinfer.conftest import MAX_LENGTH, SUCCESS, Settings, greedy

pytestmark = pytest.mark.slow


@pytest.fixture
def serving(settings: Settings) -> Iterator[Engine]:
    """An engine with the running model "one"."""
    engine = Engine()
    with few_sizes():
        assert engine.install_model(settings()) is SUCCESS, engine.last_error
        assert engine.start_model("one") is SUCCESS, engine.last_error
        yield engine
    engine.close()


def device_bytes() -> int:
    """Bytes of all live arrays."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def generated(engine: Engine, ids: list[int], builder: ASGenerationConfigBuilder) -> list[int]:
    """The tokens of a request."""
    status, handle, results = engine.start_request_ids("one", None, ids, builder)
    assert status is SUCCESS, engine.last_error
    results.wait()
    taken = results.GetNoWait()
    assert engine.release_request("one", handle) is SUCCESS
    return list(taken.ids_from_generate)


# holds D02, D05
def test_logits_are_those_of_the_checkpoint_and_memory_stays_flat(serving: Engine) -> None:
    from tests.brief import BRIEF

    prompts = [[5 + i] * (10 + 7 * i) for i in range(6)]
    sizes: dict[str, Any] = {
        "max_model_len": MAX_LENGTH,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "engine": {"name": "esurge", "options": {"page_size": 16}},
    }

    def begin(ids: list[int]) -> ResultQueue:
        builder = greedy(max_length=len(ids) + 20, logprobs=True, top_logprobs=4)
        status, _, results = serving.start_request_ids("one", None, ids, builder)
        assert status is SUCCESS, serving.last_error
        return results

    with LLM(BRIEF, dtype="float32", **sizes) as llm:
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=4)
        expected = [llm.generate([ids], params)[0].outputs[0] for ids in prompts]
    before = device_bytes()
    for ids, one in zip(prompts, expected, strict=True):  # alone, so that the steps are equal too
        results = begin(ids)
        results.wait()
        elements = results.Get()
        assert elements is not None
        assert elements.ids_from_generate == list(one.token_ids)
        assert one.logprobs is not None
        for best, values in zip(elements.log_probs_list, one.logprobs, strict=True):
            assert all(values[token] == value for token, value in best), "bit by bit"
    for results, one in zip([begin(ids) for ids in prompts], expected, strict=True):
        results.wait()
        elements = results.Get()
        assert elements is not None
        assert elements.ids_from_generate == list(one.token_ids)
    assert device_bytes() <= before


# holds D09
def test_seeds_stop_words_and_log_probabilities(serving: Engine) -> None:
    def hot(seed: int) -> list[int]:
        builder = ASGenerationConfigBuilder(seed=seed).temperature(1.5).top_k(0)
        return generated(serving, [5, 6, 7], builder.early_stopping(False).max_length(40))

    first = hot(11)
    mates = [
        serving.start_request_ids("one", None, [9, i], greedy(max_length=60))[2] for i in range(3)
    ]
    assert hot(11) == first, "whatever runs beside it"
    assert hot(12) != first
    for results in mates:
        results.wait()
    words = first[4:6]
    builder = ASGenerationConfigBuilder(seed=11).temperature(1.5).top_k(0).early_stopping(False)
    stopped = generated(serving, [5, 6, 7], builder.stop_words_ids([words]).max_length(40))
    assert stopped[: len(first[:6])] == first[: len(stopped)]
    assert stopped[-2:] == words or stopped == first[:4]
    _, _, results = serving.start_request_ids(
        "one", None, [5, 6, 7], greedy(max_length=12, logprobs=True, top_logprobs=3)
    )
    results.wait()
    elements = results.Get()
    assert len(elements.log_probs_list) == len(elements.ids_from_generate) == 9
    for token, own, best in zip(
        elements.ids_from_generate,
        elements.token_logprobs_list,
        elements.log_probs_list,
        strict=True,
    ):
        assert len(best) == 3
        assert best[0] == (token, own)


# holds D18
def test_embeddings_take_the_places_of_token_ids(serving: Engine, loader: DashInferModel) -> None:
    plan = serving._models["one"].plan
    weights = loader.checkpoint.load_weights(
        plan.model, form=plan.weight_format, place=lambda *_: None
    )
    table = next(np.asarray(w) for path, w in weights.items() if "embed" in path)

    def logprobs(ids: list[int], *rows: int) -> np.ndarray:
        builder = greedy(max_length=12, logprobs=True, top_logprobs=5)
        if rows:
            media = MultiMediaInfo()
            assert media.add_multimedia_content("9", [table[list(rows)]]) is SUCCESS
            builder.with_mm_info(media)
        _, _, results = serving.start_request_ids("one", None, ids, builder)
        results.wait()
        assert results.error is None
        best = results.Get().log_probs_list[0]
        return np.asarray([value for _, value in best])

    of_ids = logprobs([5, 6, 7, 8])
    np.testing.assert_allclose(logprobs([5, 9, 9, 8], 6, 7), of_ids, atol=1e-4)
    assert np.abs(logprobs([5, 9, 9, 8], 600, 7) - of_ids).max() > 1e-2
    assert np.abs(logprobs([5, 9, 9, 8]) - of_ids).max() > 1e-2


# holds D12
def test_a_consumer_wakes_within_a_millisecond_of_a_token(serving: Engine) -> None:

    delays, put = [], ResultQueue.put
    times: list[float] = []

    def timed(self: ResultQueue, event: object) -> None:
        times.append(time.perf_counter())
        put(self, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResultQueue, "put", timed)
        _, _, results = serving.start_request_ids("one", None, [5], greedy(max_length=100))
        while results.Get() is not None:
            delays.append(time.perf_counter() - times[-1])
    assert statistics.median(delays) < 0.001


# holds D06
def test_a_larger_ratio_is_a_larger_pool(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, spans = Engine(), []
    free = free_bytes(jax.devices()[0], 2**40)
    for ratio in (36e6 / free, 52e6 / free, 0.9):
        monkeypatch.setenv("BFC_MEM_RATIO", f"{ratio:.9f}")
        assert engine.install_model(settings(engine_max_batch=256)) is SUCCESS
        with few_sizes():
            assert engine.load_device_mem("one") is SUCCESS, engine.last_error
        spans.append(engine.get_as_engine_stat("one").total_span)
        assert engine.release_model("one") is SUCCESS
    assert spans[0] < spans[1] < spans[2] == 256 * MAX_LENGTH // 16
    for name, wrong in (("BFC_MEM_RATIO", "1.5"), ("BFC_LEFTOVER_MB", "x")):
        with monkeypatch.context() as patch:
            patch.setenv(name, wrong)
            assert engine.install_model(settings()) is AsStatus.ALLSPARK_PARAM_ERROR
            assert name in engine.last_error
    monkeypatch.setenv("BFC_MEM_RATIO", "1e-6")
    assert engine.install_model(settings()) is SUCCESS
    assert engine.start_model("one") is AsStatus.ALLSPARK_PARAM_ERROR
    assert "bytes are missing" in engine.last_error


# holds D15
def test_quantised_caches_hold_more_tokens_in_fewer_bytes(settings: Settings) -> None:
    engine, bytes_per_token, tokens = Engine(), {}, {}
    for mode in ("AsCacheDefault", "AsCacheQuantI8", "AsCacheQuantU4"):
        with few_sizes():
            assert engine.install_model(settings(kv_cache_mode=mode)) is SUCCESS
            assert engine.start_model("one") is SUCCESS, engine.last_error
            stat = engine.get_as_engine_stat("one")
            bytes_per_token[mode] = stat.total_device_memory_pool_size / stat.total_token
            tokens[mode] = generated(engine, [5, 6, 7] * 12, greedy(max_length=48))
        assert engine.stop_model("one") is SUCCESS
        assert engine.release_model("one") is SUCCESS
    plain = bytes_per_token["AsCacheDefault"]  # float32, with heads of 32
    assert plain / bytes_per_token["AsCacheQuantI8"] > 3.6
    assert plain / bytes_per_token["AsCacheQuantU4"] > 5.9
    assert tokens["AsCacheQuantI8"] == tokens["AsCacheDefault"]
