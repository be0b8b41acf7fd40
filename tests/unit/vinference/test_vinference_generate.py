"""vInference on arrays: compiling ahead, fitting inputs, prefill and decode, generate."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from enginebay import LLM, SamplingParams
from enginebay.compose.composition import make_plan
from enginebay.types import ROW_VALUES, FrozenSampling
from enginebay_testing.near_ties import TOLERANCE
from enginebay_testing.reference import ReferenceModel
from enginebay_vinference import InferenceWarning, vInference, vInferencePreCompileConfig
from tests.unit.vinference.numpy_inference import HostFunctions
from tests.unit.vinference.small import (
    BATCH,
    CONFIG,
    MODEL,
    TEXTS,
    drain,
    encode,
    last,
    like,
    new_tokens,
)

pytestmark = [pytest.mark.xdist_group("vinference"), pytest.mark.usefixtures("pooled_module")]

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
HOT = SamplingParams(max_tokens=20, temperature=0.9, top_k=50, min_p=0.02, seed=11, ignore_eos=True)
PreCompile = vInferencePreCompileConfig


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0, "top_k": 5},
    {"repetition_penalty": 5.0},
    {"temperature": 1.3, "seed": 4},
    {"temperature": 1.3, "seed": 4, "top_k": 3},
    {"temperature": 1.3, "seed": 4, "top_p": 0.5},
    {"temperature": 1.3, "seed": 4, "min_p": 0.3},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    {
        "temperature": 0.8,
        "seed": 9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "top_p": 0.9,
    },
]


def parameters(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(max_tokens=20, ignore_eos=True, **fields)


@pytest.fixture(scope="module")
def reference(pooled_module: None) -> dict[str, list[list[int]]]:
    """What LLM gives TEXTS, by the parameters. Its batches are mixed, so that all of them need the
    same programs.
    """
    kinds = [{}, *PARAMETERS]
    wanted = [
        (text, kinds[(i + at) % len(kinds)])
        for i in range(len(kinds))
        for at, text in enumerate(TEXTS)
    ]
    with LLM(engine="vinference", **MODEL) as llm:
        outputs = llm.generate(
            [text for text, _ in wanted], [parameters(fields) for _, fields in wanted]
        )
    tokens = {
        (text, str(fields)): o.outputs[0].token_ids
        for (text, fields), o in zip(wanted, outputs, strict=True)
    }
    return {str(fields): [tokens[text, str(fields)] for text in TEXTS] for fields in kinds}


# holds V35


@pytest.mark.long
def test_a_chunk_is_as_many_single_steps(inference: vInference) -> None:
    single = vInference(MODEL, None, CONFIG.replace(streaming_chunks=1))
    single.precompile(BATCH)
    ids, mask = encode(inference, *TEXTS)
    for params in (GREEDY, HOT):
        state = inference.execute_prefill(inference.init_state(ids, mask, sampling_params=params))
        state = inference.execute_decode(state)
        step = single.execute_prefill(single.init_state(ids, mask, sampling_params=params))
        for _ in range(CONFIG.streaming_chunks):
            step = single.execute_decode(step)
        assert new_tokens(step) == new_tokens(state)
        np.testing.assert_array_equal(step.running_token, state.running_token)
        assert int(step.current_length) == int(state.current_length)


def test_decoding_measures_itself(inference: vInference) -> None:
    ids, mask = encode(inference, TEXTS[0])
    state = inference.execute_prefill(inference.init_state(ids, mask, sampling_params=GREEDY))
    assert (state._time_spent_computing, state.generated_tokens) == (0.0, 1)
    seconds = 0.0
    for tokens in (9, 17):
        state = inference.execute_decode(state)
        assert state._time_spent_computing > seconds
        assert state.generated_tokens == tokens
        seconds = state._time_spent_computing
        assert state.tokens_per_second * seconds == pytest.approx(tokens - 1)  # the prefill's one


def test_a_function_and_parameters_can_be_given_for_a_step(inference: vInference) -> None:
    ids, mask = encode(inference, TEXTS[0])
    expected = new_tokens(last(inference.generate(ids, mask, sampling_params=GREEDY)))
    pair = inference.programs.get(inference.programs.shapes[0], ahead=True)
    calls = []

    def func(*args: Any) -> Any:
        calls.append(len(args))
        return pair.decode(*args)

    config = PreCompile(1, 16, required_props={"mine": {}})
    state = inference.execute_prefill(
        inference.init_state(ids, mask), sampling_params=GREEDY, compile_config=config
    )
    assert state._compile_config == config
    state = inference.execute_decode(state, func=func)
    assert calls == [3]
    assert new_tokens(last(inference.resume(state))) == expected


# holds V36


@pytest.mark.long
def test_batches_of_unequal_prompts_equal_each_row_alone(
    inference: vInference, reference: Any
) -> None:
    for count in (1, 4):
        texts = TEXTS[:count]
        rows = new_tokens(
            last(inference.generate(*encode(inference, *texts), sampling_params=GREEDY))
        )
        assert rows[:count] == reference["{}"][:count]


@pytest.mark.parametrize("count", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_a_sampled_row_alone_with_its_key_gives_the_same_tokens(
    inference: vInference, count: int
) -> None:
    made = inference
    if count == 16:
        made = vInference(MODEL, None, CONFIG)
        made.precompile(PreCompile([16, 1], [48, 48]))
    texts = [f"{text} {number}" for number, text in enumerate(TEXTS * (count // 4))]
    keys = jax.random.split(jax.random.key(3), count)
    ids, mask = encode(made, *texts)
    rows = new_tokens(last(made.generate(ids, mask, sampling_params=HOT, prng_key=keys)))
    assert len({tuple(row) for row in rows}) == count
    for row in {0, 1, count // 2, count - 1}:
        alone = made.generate(
            ids[row : row + 1],
            mask[row : row + 1],
            sampling_params=HOT,
            prng_key=keys[row : row + 1],
        )
        assert new_tokens(last(alone))[0] == rows[row]


def test_prompts_longer_than_a_pass_give_the_models_tokens(inference: vInference) -> None:
    texts = [" ".join(TEXTS[2:] * 2), *TEXTS[:3]]
    ids, mask = encode(inference, *texts)
    assert MODEL["max_num_batched_tokens"] < ids.shape[1] <= 48
    rows = new_tokens(last(inference.generate(ids, mask, sampling_params=GREEDY)))
    engine = inference.programs.engine
    model = ReferenceModel(make_plan(engine.parts.config), engine.executor.weights())
    for text, row in zip(texts, rows, strict=True):
        assert model.first_wrong_token(inference.tokenizer.encode(text), row, TOLERANCE) is None


def test_generate_yields_chunks_and_returns_the_last_state(inference: vInference) -> None:
    ids, mask = encode(inference, TEXTS[0])
    lengths = []
    states, returned = drain(
        inference.generate(ids, mask, sampling_params=GREEDY),
        each=lambda state: lengths.append(int(state.current_length) - 16),
    )
    assert returned is states[-1]
    assert lengths == [9, 17, 20]
    assert CONFIG._loop_rows == 3


@pytest.mark.parametrize("max_tokens", [1, 3, 9, 20])
def test_the_requests_length_holds_and_its_parameters_stay_as_they_were(
    inference: vInference, max_tokens: int
) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    before = params.model_copy()
    states = [
        s.copy() for s in inference.generate(*encode(inference, TEXTS[0]), sampling_params=params)
    ]
    assert [len(row) for row in new_tokens(states[-1])] == [max_tokens]
    assert 1 <= len(states) <= 3
    assert params == before


def test_a_longer_request_is_cut_with_a_warning(on_host: vInference) -> None:  # holds V36
    longer = SamplingParams(max_tokens=50, ignore_eos=True)
    why = "max_tokens = 50 is reduced to 20, the max_new_tokens of this inference"
    with pytest.warns(InferenceWarning, match=why):
        output = on_host.process_prompt(TEXTS[0], longer)
    assert (output.generated_tokens, output.finish_reason) == (20, "length")
    ids, mask = encode(on_host, TEXTS[0])
    with pytest.warns(InferenceWarning, match=why):
        state = last(on_host.generate(ids, mask, sampling_params=longer))
    assert [len(row) for row in new_tokens(state)] == [20]
    with pytest.warns(InferenceWarning, match=why):
        on_host.execute_prefill(on_host.init_state(ids, mask), sampling_params=longer)


def test_generation_ends_when_all_rows_have(inference: vInference) -> None:
    rows = new_tokens(
        last(inference.generate(*encode(inference, TEXTS[0]), sampling_params=GREEDY))
    )
    params = SamplingParams(max_tokens=20, stop_token_ids=(rows[0][2],))
    states = [
        s.copy() for s in inference.generate(*encode(inference, TEXTS[0]), sampling_params=params)
    ]
    assert len(states) == 1
    assert new_tokens(states[0]) == [rows[0][:3]]


def test_end_of_sequence_at_the_prefill_ends_the_generation(
    on_host: vInference, functions: HostFunctions
) -> None:
    """A row whose first token is the end of the sequence is never decoded."""

    def refuse_decode(kind: str) -> None:
        assert kind == "prefill", "a finished row is decoded"

    functions.before, functions.script = refuse_decode, []
    ids, mask = encode(on_host, TEXTS[0])
    states = [state.copy() for state in on_host.generate(ids, mask)]
    assert new_tokens(states[-1]) == [[functions.eos_token_id]]
    assert len(states) == 1
    assert bool(np.asarray(states[-1].is_sequence_finished).all())


@pytest.mark.parametrize("place", [1, 6])
def test_any_end_of_sequence_id_ends_a_row(inference: vInference, place: int) -> None:  # holds V23
    rows = new_tokens(
        last(inference.generate(*encode(inference, TEXTS[0]), sampling_params=GREEDY))
    )
    eos = rows[0][place]
    for ids in ([1, eos], [eos, 1]):
        made = like(inference, CONFIG.replace(eos_token_id=ids))
        made.precompile(PreCompile(1, 16))
        state = last(made.generate(*encode(made, TEXTS[0])))
        assert new_tokens(state) == [rows[0][: rows[0].index(eos) + 1]]


@pytest.mark.parametrize("by_hash", [False, True])
def test_each_row_is_completed_several_times(
    inference: vInference, by_hash: bool
) -> None:  # holds V22
    bucket = PreCompile(2, 48)  # four rows in all, which are compiled
    counts: Any = {bucket.get_default_hash(): 2} if by_hash else 2
    made = like(inference, CONFIG.replace(num_return_sequences=counts), seed=1)
    made.precompile(bucket)
    ids, mask = encode(made, *TEXTS[:2])
    greedy = new_tokens(last(made.generate(ids, mask, sampling_params=GREEDY)))
    assert len(greedy) == 4
    assert greedy[0] == greedy[1] != greedy[2] == greedy[3]
    hot = new_tokens(last(made.generate(ids, mask, sampling_params=HOT)))
    assert len({tuple(row) for row in hot}) == 4


def test_other_weights_change_the_output_and_compile_nothing(inference: vInference) -> None:
    ids, mask = encode(inference, TEXTS[0])
    before = new_tokens(last(inference.generate(ids, mask, sampling_params=GREEDY)))
    count = inference.num_compilations
    name = next(path for path in inference.graphstate if path.startswith("layers.0."))
    changed = {name: -inference.graphstate[name]}
    after = new_tokens(
        last(inference.generate(ids, mask, sampling_params=GREEDY, graphstate=changed))
    )
    assert after != before
    nested: dict[str, Any] = {}
    place = nested
    *parents, leaf = name.split(".")
    for key in parents:
        place = place.setdefault(key, {})
    place[leaf] = np.asarray(changed[name])
    assert (
        new_tokens(last(inference.generate(ids, mask, sampling_params=GREEDY, graphother=nested)))
        == after
    )
    assert new_tokens(last(inference.generate(ids, mask, sampling_params=GREEDY))) == before
    assert inference.num_compilations == count
    with pytest.raises(ValueError, match="weight 'nothing'"):
        inference.generate(ids, mask, graphstate={"nothing": 1})
    for wrong in (np.zeros(3), 1.0, [1.0]):
        with pytest.raises(ValueError, match="Convert it to"):
            inference.generate(ids, mask, graphstate={name: wrong})
    with_param = {name: nnx.Param(inference.graphstate[name])}
    assert (
        new_tokens(
            last(inference.generate(ids, mask, sampling_params=GREEDY, graphstate=with_param))
        )
        == before
    )


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(n=2), "num_return_sequences"),
        (SamplingParams(stop=("a",)), "stop texts"),
        ("greedy", "sampling parameters of type str"),
    ],
)
def test_parameters_that_cannot_be_honoured_are_refused_at_once(
    on_host: vInference, params: Any, text: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        on_host.generate(*encode(on_host, TEXTS[0]), sampling_params=params)
    with pytest.raises(ValueError, match="vocabulary"):
        on_host.generate(np.array([[99999]]))
    with pytest.raises(ValueError, match="3 keys"):
        on_host.generate(np.array([[5]]), prng_key=jax.random.split(jax.random.key(0), 3))
    for key in (5, np.zeros(2, np.float32), np.zeros(4, np.uint32)):
        with pytest.raises(ValueError, match="as prng_key"):
            on_host.generate(np.array([[5]]), prng_key=key)
    with pytest.raises(ValueError, match="empty prompt"):
        on_host.generate(np.array([[5]]), np.array([[0]]))


# holds V37


@pytest.mark.parametrize("params", PARAMETERS, ids=str)
def test_parameters_choose_the_tokens_that_llm_gives(
    inference: vInference, reference: Any, params: dict[str, Any]
) -> None:
    own = parameters(params)
    states = inference.generate(*encode(inference, *TEXTS), sampling_params=own)
    rows, expected = new_tokens(last(states)), reference[str(params)]
    assert rows[0] == expected[0], "the first row of a batch samples like a request of its own"
    if own.temperature == 0:
        assert rows == expected
    if {"repetition_penalty", "presence_penalty"} & set(params):
        assert rows != reference["{}"], "the penalty makes a difference"


def test_every_parameter_of_requests_reaches_the_steps_or_the_text_or_is_refused(
    on_host: vInference,
) -> None:
    from enginebay_vinference.state_steps import SAMPLING

    by_text = {"stop", "include_stop_str_in_output", "skip_special_tokens"}
    by_row = {"max_tokens", "stop_token_ids"}  # as max_length and stop_ids
    columns = set(SAMPLING) - {"prompt_length", "max_length", "stop_ids"}
    refused = {"num_logprobs", "num_prompt_logprobs", "processors", "reads_tokens"}
    assert columns == set(ROW_VALUES)
    assert by_text | {"stop_words_ids", "min_tokens"} <= set(SamplingParams.model_fields)
    assert by_row | refused | {"params"} == set(FrozenSampling.__dataclass_fields__)
    with pytest.raises(ValueError, match="logprobs = 0"):
        last(on_host.generate([[5, 6]], sampling_params=SamplingParams(logprobs=0)))
    with pytest.raises(ValueError, match="prompt_logprobs = 0"):
        last(on_host.generate([[5, 6]], sampling_params=SamplingParams(prompt_logprobs=0)))
    for params in (SamplingParams(min_tokens=2), SamplingParams(processors={"dry": {}})):
        with pytest.raises(ValueError, match="states do not store the fields of logits processors"):
            last(on_host.generate([[5, 6]], sampling_params=params))
    with pytest.raises(ValueError, match=r"stop_words_ids = \(\(5,\),\)"):
        last(on_host.generate([[5, 6]], sampling_params=SamplingParams(stop_words_ids=[[5]])))
