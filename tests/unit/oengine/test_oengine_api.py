"""The API of oEngine: its constructor, properties and collaborators."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import enginebay_oengine
from enginebay import LLM
from enginebay.contracts.compilations import Compilations
from enginebay.errors import CompilationError, ConfigError
from enginebay_oengine import (
    AbstractInferenceEngine,
    ActiveSequenceBatch,
    GenerationConfig,
    HBMPageManager,
    InferenceScheduler,
    ModelInputBatch,
    NextIterationPlan,
    OpenedModel,
    PagedAttentionCache,
    cjit,
    execute_forward,
    oEngine,
    open_model,
)
from enginebay_oengine.continuous_forward import GraphDef
from enginebay_paged.page_steps import PageSteps
from tests.unit.oengine.small import MODEL, NUM_SLOTS, PAGE_SIZE, make_engine, prefill

pytestmark = pytest.mark.xdist_group("oengine_api")

DOCUMENTED = {
    "max_concurrent_decodes": None,
    "max_concurrent_prefill": None,
    "prefill_lengths": None,
    "max_prefill_length": None,
    "max_length": None,
    "batch_size": None,
    "seed": 894,
}


def parts_of(model: OpenedModel, num_pages: int = 3) -> tuple[PagedAttentionCache, HBMPageManager]:
    metadata = PagedAttentionCache.create_metadata(model, page_size=8, num_pages=num_pages)
    return PagedAttentionCache.init_cache(metadata), HBMPageManager(metadata)


def test_constructor_has_the_documented_signature_and_defaults(
    model: OpenedModel,
) -> None:  # holds O01
    parameters = list(inspect.signature(oEngine).parameters.values())
    assert [p.name for p in parameters[:4]] == ["model", "processor", "storage", "manager"]
    assert {p.name: p.default for p in parameters[4:]} == DOCUMENTED
    engine = oEngine(model, None, *parts_of(model))
    assert engine.max_concurrent_decodes == jax.device_count()
    assert engine.max_concurrent_prefill == jax.device_count()
    assert engine.prefill_lengths == [2**power for power in range(9, 24)]
    assert (engine.max_prefill_length, engine.max_length, engine.batch_size) == (4096, 8192, None)
    assert engine.samples_per_slot == 1
    assert isinstance(engine.scheduler, InferenceScheduler)
    assert engine.scheduler.manager is engine.manager
    assert engine.metadata is engine.manager.metadata
    assert engine.quantizer.quantization_method is None
    assert set(engine.graphstate) == set(model.plan.model.weight_specs())
    assert engine.graphothers == {}


def test_properties_are_what_was_given(model: OpenedModel) -> None:  # holds O02
    given: dict[str, Any] = {
        "max_concurrent_decodes": 3,
        "max_concurrent_prefill": 2,
        "prefill_lengths": [16, 24],
        "max_prefill_length": 20,
        "max_length": 40,
        "batch_size": 8,
    }
    engine = oEngine(model, None, *parts_of(model), **given)
    assert {name: getattr(engine, name) for name in given} == given
    state = engine.init_decode_state()
    assert state.token_ids.shape == (3,)
    sizes = state.sizes.geometry.sizes
    assert (sizes.decode_rows, sizes.prefill_tokens) == ((8,), (16,))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_concurrent_decodes": 0},
        {"max_concurrent_prefill": -1},
        {"max_concurrent_decodes": True},
        {"prefill_lengths": []},
        {"prefill_lengths": [32, 16]},
        {"prefill_lengths": [0]},
        {"prefill_lengths": [1.5]},
        {"max_prefill_length": 0},
        {"max_length": 1},
        {"batch_size": 2, "max_concurrent_decodes": 3},
        {"seed": -1},
        {"seed": "a"},
    ],
)
def test_wrong_values_are_refused(model: OpenedModel, wrong: dict[str, Any]) -> None:  # holds O01
    with pytest.raises(ConfigError, match="Allowed"):
        oEngine(model, None, *parts_of(model), **wrong)


@pytest.mark.long
def test_storage_is_donated_to_every_step(
    model: OpenedModel, engine: oEngine, prompts: Any
) -> None:  # holds O01
    before = jax.tree.leaves(engine.storage)
    state = engine.init_decode_state()
    rows = state.rows
    prefix, _ = prefill(engine, prompts[0])
    assert all(array.is_deleted() for array in before)
    engine.insert(prefix, state, 0)
    before = jax.tree.leaves(engine.storage)
    engine.decode(engine.graphstate, engine.graphothers, state)
    assert all(array.is_deleted() for array in before)
    assert rows.length.is_deleted()
    assert not any(array.is_deleted() for array in jax.tree.leaves(engine.storage))
    used = PagedAttentionCache(jax.tree.unflatten(jax.tree.structure(engine.storage), before).views)
    with pytest.raises(ConfigError, match="taken over"):
        oEngine(model, None, used, engine.manager)
    storage, _ = parts_of(model)
    with pytest.raises(ConfigError, match="the same metadata"):
        oEngine(model, None, storage, engine.manager)
    storage = PagedAttentionCache.init_cache(engine.metadata)
    with pytest.raises(ConfigError, match="manager of another engine"):
        oEngine(model, None, storage, engine.manager)


def test_models_are_opened_by_name_configuration_or_llm(model: OpenedModel) -> None:
    with LLM(engine={"name": "oengine", "num_pages": 3, "page_size": 8}, **MODEL) as llm:
        shared = open_model(llm)
        assert shared.weights is llm.engine.executor.weights()
        assert oEngine(llm, None, *parts_of(shared)).graphstate is shared.weights
    for wrong in ({"model": "demo", "engine": "vinference"}, MODEL | {"engine": "vinference"}):
        with pytest.raises(ConfigError, match="oengine"):
            open_model(wrong)
    assert oEngine("demo", None, *parts_of(open_model("demo"))).eos_token_ids == [0, 2]


@dataclasses.dataclass
class Special:
    """A tokenizer as far as special tokens go."""

    pad_token_id: int | None = None
    eos_token_id: Any = None


@dataclasses.dataclass
class Processor:
    """A processor with a tokenizer, as models with several kinds of input have."""

    tokenizer: Special


@pytest.mark.parametrize(
    ("processor", "ends", "expected"),
    [
        (Special(7, 5), None, (7, [5])),
        (Special(7, [5, 6]), 5, (7, [5, 6])),
        (Special(0, None), [4, 4, 9], (0, [4, 9])),
        (Special(None, None), None, (3, [])),
        (Processor(Special(8, 1)), [2, 1], (8, [1, 2])),
    ],
)
def test_special_tokens_are_the_processors_and_the_models(
    model: OpenedModel, processor: Any, ends: Any, expected: Any
) -> None:  # holds O03
    named = dataclasses.replace(model, generation_config=GenerationConfig(ends))
    engine = oEngine(named, processor, *parts_of(model))
    assert (engine.pad_token_id, engine.eos_token_ids) == expected


def test_wrong_special_tokens_are_refused(model: OpenedModel) -> None:  # holds O03
    for ends in ("</s>", list(range(17))):
        with pytest.raises(ConfigError, match="Allowed"):
            oEngine(model, Special(0, ends), *parts_of(model))


def test_keys_never_repeat_and_follow_from_the_seed(model: OpenedModel) -> None:  # holds O04
    def keys(seed: int) -> list[tuple[int, ...]]:
        engine = oEngine(model, None, *parts_of(model), seed=seed)
        return [tuple(np.asarray(engine.prng_key).tolist()) for _ in range(50)]

    first = keys(894)
    assert len(set(first)) == 50
    assert first == keys(894)
    assert not set(first) & set(keys(895))


def test_keys_do_not_repeat_among_threads(engine: oEngine) -> None:  # holds O04
    found: list[bytes] = []
    threads = [
        threading.Thread(
            target=lambda: found.extend(np.asarray(engine.prng_key).tobytes() for _ in range(20))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 80


def test_a_new_state_is_empty_and_has_its_own_lock(engine: oEngine) -> None:  # holds O06
    state, other = engine.init_decode_state(), engine.init_decode_state()
    assert isinstance(state, ActiveSequenceBatch)
    assert not np.asarray(state.token_ids).any()
    assert (np.asarray(state.positions) == -1).all()
    table = np.asarray(state.page_table)
    assert table.shape == (NUM_SLOTS, 160 // PAGE_SIZE)
    assert not table.any()
    assert [state.available_slots.get_nowait() for _ in range(NUM_SLOTS)] == [0, 1, 2, 3]
    assert state.available_slots.empty()
    assert state.active_slot_requests_map == {}
    assert state.context_lock is not other.context_lock
    with state.context_lock:
        free = threading.Thread(target=other.context_lock.acquire)
        free.start()
        free.join(10)
        assert not free.is_alive(), "another state's lock is held too"
    assert other.available_slots.qsize() == NUM_SLOTS


def test_colocated_cpus_are_this_processes(
    engine: oEngine, monkeypatch: pytest.MonkeyPatch
) -> None:  # holds O08
    cpus = engine.colocated_cpus
    assert cpus == jax.local_devices(backend="cpu")
    assert all(device.platform == "cpu" for device in cpus or [])

    def nowhere(**_: Any) -> list[jax.Device]:
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", nowhere)
    assert engine.colocated_cpus is None


def test_other_weights_can_be_given_to_every_call(engine: oEngine, prompts: Any) -> None:
    prefix, first = prefill(engine, prompts[3])
    changed = {path: weight * 0.5 for path, weight in engine.graphstate.items() if "mlp" in path}
    arguments = (np.asarray(prompts[3]), None, len(prompts[3]))
    programs = engine.continuous_forward.num_programs
    _, result = engine.prefill(engine.graphstate, changed, *arguments)
    _, same = engine.prefill(changed, None, *arguments)
    assert np.asarray(result.data).tolist() == np.asarray(same.data).tolist() != [[first, 1, 1]]
    assert engine.continuous_forward.num_programs == programs, "other weights compile nothing"
    with pytest.raises(ValueError, match="weight 'nonsense'"):
        engine.prefill({"nonsense": jnp.zeros(1)}, None, *arguments)
    assert prefix.lengths == (37,)


def test_the_contract_has_seventeen_abstract_members() -> None:  # holds O09
    members = AbstractInferenceEngine.__abstractmethods__
    assert len(members) == 17
    assert issubclass(oEngine, AbstractInferenceEngine)
    assert not oEngine.__abstractmethods__
    assert {
        "prefill",
        "decode",
        "insert",
        "bulk_insert",
        "free_resource",
        "colocated_cpus",
    } <= members


def test_cjit_compiles_once_for_each_kind_of_arguments() -> None:  # holds O09
    compilations = Compilations()
    traced: list[Any] = []

    def scale(factor: int, array: jax.Array) -> jax.Array:
        traced.append(array.shape)
        return array * factor

    function = cjit(
        jax.jit(scale, static_argnums=0), static_argnums=(0,), compilations=compilations
    )
    for factor, size in ((2, 3), (2, 3), (3, 3), (2, 4), (2, 3)):
        assert np.asarray(function(factor, np.ones(size, np.float32))).tolist() == [factor] * size
    assert len(traced) == function.num_programs == compilations.count == 3
    compilations.forbidden = True
    function(2, np.ones(3, np.float32))
    with pytest.raises(CompilationError, match="forbidden"):
        function(2, np.ones(5, np.float32))


def test_execute_forward_of_nothing_changes_nothing(model: OpenedModel, engine: oEngine) -> None:
    storage, _ = parts_of(model)
    rows = engine.init_decode_state().rows
    graphdef = GraphDef(PageSteps.of(model.parts, engine.metadata.layouts), NUM_SLOTS, 0)
    output, after, same = execute_forward(
        graphdef, model.weights, {}, ModelInputBatch(), storage, rows, None
    )
    assert jax.tree.leaves(output) == []
    assert jax.tree.leaves(after)[0] is jax.tree.leaves(storage)[0]
    assert same.length is rows.length


def test_a_plan_has_the_documented_fields() -> None:  # holds O09
    names = [field.name for field in dataclasses.fields(NextIterationPlan)]
    assert names[:6] == [
        "prefill_request",
        "schedule_prefill",
        "schedule_decodes",
        "prefill_pages_update",
        "new_decodes_requests",
        "decodes_state_page_updates",
    ]


def test_every_public_name_is_there_and_the_package_imports_no_jax() -> None:
    assert all(getattr(enginebay_oengine, name) is not None for name in enginebay_oengine.__all__)
    code = "import sys, enginebay_oengine, enginebay_paged.plugin; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_sampling_with_a_greedy_sampler_is_refused(model: OpenedModel) -> None:
    engine = make_engine(open_model(MODEL | {"sampler": "greedy"}), num_pages=3)
    with pytest.raises(ValueError, match="greedy sampler"):
        engine.prefill(engine.graphstate, engine.graphothers, [5], None, 1, 1.0)
