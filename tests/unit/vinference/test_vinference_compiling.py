"""vInference before it generates: inputs fitted to what is compiled, and compiling ahead."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay_vinference import InferenceWarning, vInference, vInferencePreCompileConfig
from tests.unit.serving import DEADLOCK_S
from tests.unit.vinference.numpy_inference import Compiler
from tests.unit.vinference.small import (
    BUCKETS,
    CONFIG,
    MODEL,
    SIXTEEN,
    TEXTS,
    encode,
    last,
    like,
    new_tokens,
    padded,
)

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("vinference")]

PreCompile = vInferencePreCompileConfig


# holds V32


def test_inputs_are_padded_on_the_left_to_the_smallest_bucket_that_fits(
    on_host: vInference,
) -> None:
    inputs, config = on_host.adjust_kwargs(np.array([[5, 6, 7]]), foo="kept")
    assert (config.batch_size, config.prefill_length) == (1, 16)
    assert inputs["input_ids"].tolist() == [[3] * 13 + [5, 6, 7]]
    assert inputs["attention_mask"].tolist() == [[0] * 13 + [1] * 3]
    assert inputs["foo"] == "kept"
    inputs, config = on_host.adjust_kwargs(np.array([[5] * 17]), position_ids=np.arange(17)[None])
    assert (config.batch_size, config.prefill_length) == (4, 48)
    assert inputs["position_ids"][0].tolist() == [0] * 31 + list(range(17))
    types, embeds = np.ones((2, 3), int), np.ones((2, 3, 5), np.float32)
    inputs, _ = on_host.adjust_kwargs(
        np.ones((2, 3), int), token_type_ids=types, inputs_embeds=embeds
    )
    assert inputs["token_type_ids"].tolist() == [[0] * 45 + [1] * 3] * 2 + [[0] * 48] * 2
    assert inputs["inputs_embeds"].shape == (4, 48, 5)
    assert inputs["inputs_embeds"].sum(axis=2).tolist() == (inputs["token_type_ids"] * 5).tolist()
    ids, mask = padded([[5, 6], [7]])
    inputs, config = on_host.adjust_kwargs(jnp.asarray(ids), jnp.asarray(mask))
    assert inputs["input_ids"][:2, -2:].tolist() == [[5, 6], [7, 3]], "rows stay where they were"
    assert inputs["attention_mask"].sum(axis=1).tolist() == [2, 1, 0, 0]


def test_a_prompt_that_is_too_long_keeps_its_end(on_host: vInference) -> None:
    row = list(range(10, 70))
    with pytest.warns(InferenceWarning, match="truncated to its last 48"):
        inputs, config = on_host.adjust_kwargs(np.array([row]))
    assert inputs["input_ids"][0].tolist() == row[-48:]
    ids, mask = padded([row, row[:30]])
    with pytest.warns(InferenceWarning, match="truncated"):
        inputs, config = on_host.adjust_kwargs(ids, mask)
    assert inputs["input_ids"][1, -30:].tolist() == row[:30], "padding on the right is cut first"
    assert config.batch_size == 4


def test_without_a_bucket_the_shape_stays_as_it_is(on_host: vInference) -> None:
    with pytest.warns(InferenceWarning, match="nothing is precompiled"):
        inputs, config = on_host.adjust_kwargs(np.full((5, 9), 4))
    assert (config.batch_size, config.prefill_length) == inputs["input_ids"].shape == (5, 9)


@pytest.mark.parametrize(
    "wrong", [np.zeros((0, 3), int), np.zeros((1, 0), int), np.zeros(3, int), np.zeros((1, 2))]
)
def test_inputs_without_rows_or_tokens_are_refused(on_host: vInference, wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match="input_ids of"):
        on_host.adjust_kwargs(wrong)
    with pytest.raises(ValueError, match="attention_mask"):
        on_host.adjust_kwargs(np.ones((1, 3), int), np.ones((1, 2), int))


def test_pixel_values_fill_the_vision_fields_and_are_refused_when_used(on_host: vInference) -> None:
    ids = np.ones((1, 3), int)
    names = ("vision_batch_size", "vision_channels", "vision_height", "vision_width")
    for shape, sizes in (
        ((2, 3, 8, 9), (2, 3, 8, 9)),
        ((3, 8, 9), (1, 3, 8, 9)),
        ((8, 9), (1, 1, 8, 9)),
    ):
        with pytest.warns(InferenceWarning):
            inputs, config = on_host.adjust_kwargs(ids, pixel_values=np.zeros(shape))
        assert config.vision_included is True
        assert tuple(config.extract()[name] for name in names) == sizes
        assert inputs["pixel_values"].shape == shape
    with pytest.raises(ValueError, match="2, 3 or 4"):
        on_host.adjust_kwargs(ids, pixel_values=np.zeros(3))
    with pytest.raises(Exception, match="no model has vision yet"):
        on_host.precompile(config)
    with pytest.raises(Exception, match="model inputs pixel_values"):
        on_host.generate(ids, pixel_values=np.zeros((8, 9)))


def test_a_prompt_whose_tokens_fit_without_its_padding_is_not_said_to_be_cut(
    on_host: vInference, recwarn: pytest.WarningsRecorder
) -> None:
    ids, mask = np.full((1, 60), 3), np.zeros((1, 60), int)
    ids[0, :20], mask[0, :20] = np.arange(20, 40), 1
    inputs, config = on_host.adjust_kwargs(ids, mask)
    assert config.prefill_length == 48
    assert inputs["input_ids"][0, -20:].tolist() == list(range(20, 40))
    assert not recwarn.list


def test_ids_that_do_not_fit_are_refused_instead_of_wrapped(on_host: vInference) -> None:
    for wrong in (2**32 + 5, -(2**31) - 1):
        with pytest.raises(ValueError, match="32-bit"):
            on_host.adjust_kwargs(np.array([[5, wrong]]))
    with pytest.raises(ValueError, match="unequal lengths"):
        on_host.adjust_kwargs([[1, 2], [3]])


@pytest.mark.long
def test_holes_in_a_mask_are_left_out(inference: vInference) -> None:
    ids, mask = encode(inference, TEXTS[0])
    holed = np.insert(ids, [0, 2, 2], 7, axis=1)
    where = np.insert(mask, [0, 2, 2], 0, axis=1)
    assert new_tokens(last(inference.generate(holed, where))) == new_tokens(
        last(inference.generate(ids, mask))
    )


# holds V34


def test_precompiling_compiles_every_standalone_once(compiler: Compiler) -> None:
    made = vInference(MODEL, None, CONFIG)
    assert made.num_compilations == 0
    assert made.precompile(BUCKETS)
    assert made.num_compilations == 4
    assert [(c.batch_size, c.prefill_length) for c in made.precompiled.values()] == [
        (1, 16),
        (4, 48),
    ]
    assert made.precompile(BUCKETS)
    assert made.precompile(PreCompile([4, 1], [48, 16]))
    assert made.num_compilations == 4
    assert compiler.num_pairs == 2


def test_what_is_no_configuration_is_refused(on_host: vInference) -> None:
    with pytest.raises(ValueError, match="a configuration of type dict"):
        on_host.precompile({"batch_size": 1})  # type: ignore[arg-type]


@pytest.mark.long
def test_no_prefill_length_means_the_longest(inference: vInference) -> None:
    counts = {
        PreCompile(1).get_default_hash(): 4
    }  # the rows of the larger bucket, which is compiled
    config = CONFIG.replace(num_return_sequences=counts)
    made = like(inference, config, model={**MODEL, "max_model_len": 68})
    assert made.precompile(PreCompile(1))
    assert made.num_compilations == 0
    (config,) = made.precompiled.values()
    assert config.prefill_length == made.model_prefill_length == 68 - 20
    assert len(new_tokens(last(made.generate(np.full((1, 3), 9))))) == 4
    with pytest.raises(ValueError, match="at most 48"):
        made.precompile(PreCompile(1, 49))


def test_generating_compiles_nothing_after_precompiling(
    inference: vInference, caplog: pytest.LogCaptureFixture
) -> None:
    hot = SamplingParams(max_tokens=20, temperature=0.7, repetition_penalty=1.2)
    before = inference.num_compilations
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for texts in (TEXTS[:1], TEXTS):
            last(inference.generate(*encode(inference, *texts), sampling_params=hot))
    compiled = [record.message for record in caplog.records if "ompil" in record.message]
    assert compiled == []
    assert inference.num_compilations == before


def test_threads_that_ask_for_the_same_wait_for_one_compilation(compiler: Compiler) -> None:
    made = vInference(MODEL, None, CONFIG)
    begun, results = threading.Barrier(5), []

    def ask() -> None:
        begun.wait(DEADLOCK_S)
        results.append(made.precompile(SIXTEEN))

    compiler.before = lambda _: time.sleep(0.05)  # the others ask meanwhile
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait(DEADLOCK_S)
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert made.num_compilations == 2
    assert compiler.num_pairs == 1


def test_a_compilation_that_failed_can_be_tried_again(compiler: Compiler) -> None:
    def fail_at_the_second(number: int) -> None:
        if number == 2:
            raise RuntimeError("out of memory")

    compiler.before = fail_at_the_second
    made = vInference(MODEL, None, CONFIG)
    assert made.precompile(BUCKETS) is False
    assert len(made.precompiled) == 1
    assert made.precompile(BUCKETS) is True
    assert len(made.precompiled) == 2
    assert compiler.num_pairs == 3


def test_ctrl_c_ends_only_the_thread_that_compiles(compiler: Compiler) -> None:
    made = vInference(MODEL, None, CONFIG)
    assert made.precompile(SIXTEEN)
    (shape,) = made.programs.shapes
    made = vInference(MODEL, None, CONFIG)
    compiler.num_pairs = 0
    begun, interrupts = threading.Event(), threading.Event()

    def interrupt_the_first(number: int) -> None:
        begun.set()
        if number == 1:
            assert interrupts.wait(DEADLOCK_S)
            raise KeyboardInterrupt

    compiler.before = interrupt_the_first
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(made.programs.get, shape, ahead=True)
        assert begun.wait(DEADLOCK_S)
        second = pool.submit(made.programs.get, shape, ahead=True)
        while not second.running():
            time.sleep(0.001)
        time.sleep(0.05)  # the second waits for the first
        interrupts.set()
        assert isinstance(first.exception(DEADLOCK_S), KeyboardInterrupt)
        assert second.result(DEADLOCK_S) is made.programs.get(shape, ahead=True)
    assert compiler.num_pairs == 2


def test_an_engine_that_may_compile_no_more_refuses_new_shapes() -> None:
    with LLM(engine="vinference", **MODEL) as llm:
        made = vInference(llm, None, CONFIG)
        llm.engine.compilations.forbidden = True
        with pytest.warns(InferenceWarning), pytest.raises(Exception, match="precompile"):
            last(made.generate(np.full((9, 3), 5)))
