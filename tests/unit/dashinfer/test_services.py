"""Whole services over the DashInfer API: several models that compute, and the memory that they
leave.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jsonschema
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from enginebay import LLM, SamplingParams
from enginebay_dashinfer.allspark import (
    ASGenerationConfigBuilder,
    AsStatus,
    DashInferModel,
    Engine,
    GenerateRequestStatus,
    HuggingFaceModel,
    MultiMediaInfo,
    ResultQueue,
    TargetDevice,
)
from tests.adapters import write_adapter, write_merged
from tests.brief import BRIEF, LATE
from tests.pool import few_sizes
from tests.unit.dashinfer.conftest import MAX_LENGTH, SUCCESS, Settings, greedy

pytestmark = pytest.mark.slow

MIB = 2**20
NUM_ROUNDS = 20
GOING_ON = (
    GenerateRequestStatus.Init,
    GenerateRequestStatus.ContextFinished,
    GenerateRequestStatus.Generating,
)


def array_bytes() -> int:
    """Bytes of all live arrays."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def process_bytes() -> int:
    """Resident bytes of this process, after free memory went back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """Each engine compiles a few programs only."""
    with few_sizes():
        yield


@pytest.fixture
def service() -> Iterator[Engine]:
    """An engine, closed afterwards."""
    engine = Engine()
    yield engine
    engine.close()


def start(engine: Engine, settings: Settings, name: str = "one", **changes: object) -> None:
    """Install and start a model."""
    assert engine.install_model(settings(name, **changes)) is SUCCESS, engine.last_error
    assert engine.start_model(name) is SUCCESS, engine.last_error


def end(engine: Engine, name: str = "one") -> None:
    """Stop and release a model."""
    assert engine.stop_model(name) is SUCCESS, engine.last_error
    assert engine.release_model(name) is SUCCESS, engine.last_error


def generated(
    engine: Engine, ids: list[int], builder: ASGenerationConfigBuilder, name: str = "one"
) -> list[int]:
    """The tokens of a request."""
    status, handle, results = engine.start_request_ids(name, None, ids, builder)
    assert status is SUCCESS, engine.last_error
    tokens: list[int] = []
    while (elements := results.Get()) is not None:
        tokens += elements.ids_from_generate
    assert results.error is None
    assert engine.release_request(name, handle) is SUCCESS
    return tokens


def polled(queue: ResultQueue) -> list[int]:
    """The tokens of a request, read by the documented loop over its status."""
    tokens: list[int] = []
    progress = queue.GenerateStatus()
    while progress in GOING_ON:
        elements = queue.Get()
        tokens += [] if elements is None else elements.ids_from_generate
        progress = queue.GenerateStatus()
    assert progress is GenerateRequestStatus.GenerateFinished
    return tokens


# holds D07
def test_twenty_rounds_of_a_service_end_with_the_memory_of_the_begin(tmp_path: Path) -> None:
    """Eight threads use three models by the documented calls alone. After that, one model is
    stopped and started, and another one is replaced.
    """
    loaders, expected, lock = [], {}, threading.Lock()
    for name, checkpoint in (("first", BRIEF), ("second", LATE), ("third", BRIEF)):
        loader = HuggingFaceModel(checkpoint, name, user_set_data_type="float32")
        loader.load_model().read_model_config().serialize_to_path(None, tmp_path).free_model()
        loaders.append(DashInferModel(tmp_path, name).load_model())
    engine = Engine()

    def install(place: int, file: int) -> None:
        builder = loaders[file].create_reference_runtime_config_builder(
            f"model {place}", TargetDevice.CPU, [0], 4, MAX_LENGTH
        )
        builder.max_prefill_length(16).kv_cache_span_size(16).lora_max_num(0)
        assert engine.install_model(builder.build()) is SUCCESS, engine.last_error
        assert engine.start_model(f"model {place}") is SUCCESS, engine.last_error

    def serve(number: int, place: int, file: int) -> None:
        name, builder = f"model {place}", greedy(max_length=40 + number)
        status, handle, queue = engine.start_request_text(
            name, loaders[file], f"Once upon a time {number}", builder
        )
        assert status is SUCCESS, engine.last_error
        tokens = polled(queue)
        assert engine.release_request(name, handle) is SUCCESS
        with lock:
            assert expected.setdefault((number, file), tokens) == tokens
            served.append(number)

    arrays, process = [], []
    for _ in range(NUM_ROUNDS):
        served: list[int] = []
        for place in range(3):
            install(place, place)
        threads = [
            threading.Thread(target=serve, args=(number, number % 3, number % 3))
            for number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(served) == 8
        assert engine.stop_model("model 0") is SUCCESS
        assert engine.start_model("model 0") is SUCCESS
        serve(0, 0, 0)
        assert engine.stop_model("model 1") is SUCCESS
        assert engine.release_model("model 1") is SUCCESS
        install(1, 0)  # another model under the same name
        serve(1, 1, 0)
        for place in range(3):
            end(engine, f"model {place}")
        arrays.append(array_bytes())
        process.append(process_bytes())
    print(f"MiB after each round: {[round(one / MIB, 1) for one in process]}")
    assert max(arrays[1:]) <= arrays[0], f"bytes of arrays by round: {arrays}"
    last, first = min(process[-5:]), max(process[1:6])
    assert last <= first + 8 * MIB, f"bytes of the process by round: {process}"


# holds D07
def test_releasing_one_of_two_models_frees_its_memory(service: Engine, settings: Settings) -> None:
    large = {"engine_max_batch": 256, "engine_max_prefill_length": 1024}
    start(service, settings, "small")
    expected = generated(service, [5, 6, 7], greedy(max_length=40), "small")
    start(service, settings, "large", **large)
    end(service, "large")  # whatever is allocated once is allocated now
    before = array_bytes(), process_bytes()
    start(service, settings, "large", **large)
    stat = service.get_as_engine_stat("large")
    beside = [
        service.start_request_ids("large", None, [9, i], greedy(max_length=100))[2]
        for i in range(8)
    ]
    assert generated(service, [5, 6, 7], greedy(max_length=40), "small") == expected
    for results in beside:
        results.wait()
        assert results.error is None
    held = array_bytes() - before[0], process_bytes() - before[1]
    pool = stat.total_device_memory_pool_size
    assert pool > 40 * MIB
    assert held[0] > pool
    assert held[1] > 0.8 * pool
    del results, beside
    end(service, "large")
    assert array_bytes() == before[0]
    left = process_bytes() - before[1]
    assert left < 0.1 * held[1], f"{left / MIB:.1f} MiB of {held[1] / MIB:.1f} stay"
    assert generated(service, [5, 6, 7], greedy(max_length=40), "small") == expected


# holds D15, D17
@pytest.mark.parametrize("mode", ["AsCacheDefault", "AsCacheQuantI8", "AsCacheQuantU4"])
def test_adapters_share_a_batch_over_each_kind_of_cache(
    service: Engine, settings: Settings, tmp_path: Path, mode: str
) -> None:
    prompt = [5, 6, 7, 8] * 5
    folders = [write_adapter(tmp_path / f"adapter-{i}", BRIEF, seed=i) for i in range(2)]
    kinds = {"AsCacheDefault": "auto", "AsCacheQuantI8": "int8", "AsCacheQuantU4": "uint4"}
    expected = []
    for i, model in enumerate([BRIEF, *map(str, folders)]):
        merged = BRIEF if i == 0 else write_merged(tmp_path / f"merged-{i}", BRIEF, Path(model))
        with LLM(
            str(merged),
            dtype="float32",
            max_model_len=MAX_LENGTH,
            max_num_seqs=4,
            engine={"name": "esurge", "options": {"page_size": 16}},
            kv_cache_dtype=kinds[mode],
        ) as llm:
            weights = llm.engine.executor.weights()
            if i == 0:
                centers = {p: np.asarray(w) for p, w in weights.items() if "key_centers" in p}
            with_base_centers = functools.partial(llm.engine.set_weights, centers)
            llm.run_on_engine(with_base_centers)  # as rows of adapters have them
            params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            expected.append(list(llm.generate([prompt], params)[0].outputs[0].token_ids))
    start(service, settings, lora_max_num=2, lora_max_rank=8, kv_cache_mode=mode)
    for name, folder in zip("ab", folders, strict=True):
        assert service.load_lora("one", name, str(folder)) is SUCCESS, service.last_error
    queues = [
        service.start_request_ids(
            "one", None, prompt, greedy(max_length=len(prompt) + 8, lora_name=name)
        )[2]
        for name in ("", "a", "b")
    ]
    found = []
    for results in queues:
        results.wait()
        found.append(results.Get().ids_from_generate)
    assert found == expected
    assert len({tuple(one) for one in found}) == 3, "the adapters change the tokens"
    assert service.stop_model("one") is SUCCESS
    assert service.unload_device_mem("one") is SUCCESS
    assert service.start_model("one") is SUCCESS
    again = generated(service, prompt, greedy(max_length=len(prompt) + 8, lora_name="b"))
    assert again == expected[2], "adapters come back with the memory of the model"


# holds D18
def test_embeddings_at_the_same_placeholders_share_no_prefix(
    service: Engine, settings: Settings
) -> None:
    start(service, settings)
    ids, width = [9] * 40 + [5], service._models["one"].plan.model.info.hidden_size
    rng = np.random.default_rng(0)
    contents = [rng.normal(size=(40, width)).astype(np.float32) for _ in range(2)]

    def run(content: np.ndarray) -> tuple[int, list[float]]:
        media = MultiMediaInfo()
        assert media.add_multimedia_content("9", [jax.numpy.asarray(content)]) is SUCCESS
        builder = greedy(max_length=42, logprobs=True, top_logprobs=4).mm_info(media)
        status, _, results = service.start_request_ids("one", None, ids, builder)
        assert status is SUCCESS, service.last_error
        results.wait()
        best = results.Get().log_probs_list[0]
        return results.RequestStatInfo()["context_cached_length"], [value for _, value in best]

    (none, first), (shared, again) = run(contents[0]), run(contents[0])
    (other_shared, other) = run(contents[1])
    assert (none, shared, other_shared) == (0, 32, 0)
    np.testing.assert_allclose(again, first, atol=1e-5)
    assert np.abs(np.subtract(other, first)).max() > 1e-2
    fresh = Engine()
    start(fresh, settings)
    alone = service
    service = fresh
    np.testing.assert_allclose(run(contents[1])[1], other, atol=1e-5)
    service = alone
    fresh.close()


# holds D19
def test_random_weights_write_json_beside_free_requests(service: Engine, tmp_path: Path) -> None:
    checkpoint = tmp_path / "random"
    checkpoint.mkdir()
    rng, source = np.random.default_rng(1), Path(BRIEF)
    for file in source.glob("*.json"):
        (checkpoint / file.name).write_bytes(file.read_bytes())
    tensors = {
        name: rng.normal(size=one.shape).astype(one.dtype) * (0.5 if one.ndim > 1 else 1)
        for name, one in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    loader = HuggingFaceModel(checkpoint, "random", user_set_data_type="float32").load_model()
    loader.serialize_to_path(service, tmp_path)
    builder = loader.create_reference_runtime_config_builder("one", "cpu", [0], 4, 400)
    builder.lora_max_num(0).kv_cache_span_size(16)
    assert service.install_model(builder.build()) is SUCCESS, service.last_error
    assert service.start_model("one") is SUCCESS, service.last_error
    free_builder = greedy(max_length=60)
    free = generated(service, [5, 6, 7], free_builder)
    schemas: list[dict[str, object]] = [
        {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}, "b": {"type": "boolean"}},
            "required": ["n", "b"],
            "additionalProperties": False,
        },
        {"type": "array", "items": {"type": "null"}, "maxItems": 3},
        {"type": "string", "maxLength": 5},
    ]
    started = []
    for seed in range(12):
        schema = schemas[seed % 3]
        wanted = {"type": "json_object", "json_schema": json.dumps(schema)}
        guided = ASGenerationConfigBuilder(seed=seed).response_format(wanted).temperature(1.0)
        guided.max_length(400).top_k(0)
        started.append((schema, service.start_request_text("one", loader, "Once", guided)))
        started.append((None, service.start_request_ids("one", None, [5, 6, 7], free_builder)))
    tokenizer = loader.init_tokenizer().get_tokenizer()
    for schema, (status, handle, results) in started:
        assert status is SUCCESS, service.last_error
        assert service.sync_request("one", handle) is SUCCESS
        assert results.error is None
        ids = results.Get().ids_from_generate
        if schema is None:
            assert ids == free
            continue
        text = tokenizer.decode(ids, skip_special_tokens=True)
        jsonschema.validate(json.loads(text), schema)


# holds D11, D13
def test_requests_that_end_early_leave_their_memory_to_others(
    service: Engine, settings: Settings
) -> None:
    start(service, settings)
    expected = generated(service, [5, 6, 7], greedy(max_length=40))
    total = service.get_as_engine_stat("one").free_span
    for number in range(10):
        started = [
            service.start_request_ids("one", None, [9 + i] * 30, greedy())[1:] for i in range(8)
        ]
        time.sleep(0.005 * number)
        for i, (handle, _) in enumerate(started):
            call = service.stop_request if i % 2 else service.release_request
            assert call("one", handle) is SUCCESS
        assert generated(service, [5, 6, 7], greedy(max_length=40)) == expected
        for i, (handle, results) in enumerate(started):
            results.wait()
            results.GetNoWait()
            assert results.GenerateStatus() is GenerateRequestStatus.GenerateFinished
            wanted = SUCCESS if i % 2 else AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID
            assert service.release_request("one", handle) is wanted
    stat = service.get_as_engine_stat("one")
    assert (stat.free_span, stat.running_request, stat.pendding_request) == (total, 0, 0)
    assert not service._requests


# holds D13
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_interrupted_request_goes_on_as_if_it_had_not_been(
    service: Engine, settings: Settings, temperature: float
) -> None:
    start(service, settings)
    prompt = [5, 6, 7]

    def builder() -> ASGenerationConfigBuilder:
        made = ASGenerationConfigBuilder(seed=11).temperature(temperature).top_k(0)
        return made.early_stopping(False).max_length(MAX_LENGTH)

    whole = generated(service, prompt, builder())
    _, _, results = service.start_request_ids("one", None, prompt, builder())
    tokens = list(results.Get().ids_from_generate)
    assert service.stop_model("one") is SUCCESS
    rest = results.GetNoWait()
    tokens += rest.ids_from_generate if rest else []
    assert results.GenerateStatus() is GenerateRequestStatus.GenerateInterrupted
    assert 0 < len(tokens) < len(whole)
    assert service.start_model("one") is SUCCESS
    assert tokens + generated(service, prompt + tokens, builder()) == whole
