"""SampleState: a generation between two steps, stored, moved and resumed."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import SamplingParams
from enginebay_vinference import (
    PartitionAxis,
    SampleState,
    SpentStateError,
    vInference,
    vInferenceConfig,
    vInferencePreCompileConfig,
)
from enginebay_vinference.partition import leaf_path
from tests.unit.vinference.small import CONFIG, MODEL, TEXTS, encode, last, new_tokens

pytestmark = pytest.mark.xdist_group("vinference")

HOT = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def split() -> vInference:
    """Over two devices, compiled for a batch."""
    made = vInference({**MODEL, "mesh": {"tensor": 2}}, None, CONFIG)
    assert made.precompile(vInferencePreCompileConfig(4, 48))
    return made


def make_state(**changes: Any) -> SampleState:
    fields: dict[str, Any] = {
        "current_length": jnp.int32(3),
        "sequences": jnp.arange(6).reshape(2, 3),
        "running_token": jnp.zeros((2, 1), jnp.int32),
        "is_sequence_finished": jnp.array([True, False]),
        "prng_key": jax.random.key(4),
        "model_kwargs": {},
    }
    return SampleState(**fields | changes)


def assert_same(one: Any, other: Any) -> None:
    """Equal trees: structure, dtypes and bits."""
    leaves, tree = jax.tree.flatten(one)
    others, other_tree = jax.tree.flatten(other)
    assert tree == other_tree
    for leaf, copy in zip(leaves, others, strict=True):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            assert leaf.dtype == copy.dtype
            leaf, copy = jax.random.key_data(leaf), jax.random.key_data(copy)
        assert isinstance(copy, jax.Array) == isinstance(leaf, jax.Array)
        assert isinstance(copy, np.generic) == isinstance(leaf, np.generic)
        assert np.asarray(leaf).dtype == np.asarray(copy).dtype
        assert np.asarray(leaf).shape == np.asarray(copy).shape
        assert np.asarray(leaf).tobytes() == np.asarray(copy).tobytes()


def test_state_is_a_pytree_with_these_fields_and_defaults() -> None:  # holds V02
    defaults = {
        "tokens_per_second": -math.inf,
        "generated_tokens": 0,
        "padded_length": 0,
        "_time_spent_computing": 0.0,
        "_compile_config": None,
    }
    fields = {field.name: field.default for field in dataclasses.fields(SampleState)}
    names = [
        "current_length",
        "sequences",
        "running_token",
        "is_sequence_finished",
        "prng_key",
        "model_kwargs",
    ]
    assert list(fields) == [*names, *defaults]
    assert {name: fields[name] for name in defaults} == defaults
    state = make_state(_compile_config=vInferencePreCompileConfig(2, 8))
    leaves, tree = jax.tree.flatten(state)
    assert_same(jax.tree.unflatten(tree, leaves), state)
    through = jax.jit(lambda s: s.replace(generated_tokens=s.generated_tokens + 2))(state)
    assert isinstance(through, SampleState)
    assert int(through.generated_tokens) == 2
    assert through._compile_config == state._compile_config
    np.testing.assert_array_equal(through.sequences, state.sequences)


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "seeded"])
def test_a_generation_that_is_taken_up_again_gives_the_same_tokens(
    inference: vInference, params: SamplingParams
) -> None:  # holds V03
    ids, mask = encode(inference, *TEXTS)
    whole = new_tokens(last(inference.generate(ids, mask, sampling_params=params)))
    states = inference.generate(ids, mask, sampling_params=params)
    kept = next(states).copy()
    states.close()
    assert new_tokens(last(inference.resume(kept))) == whole
    assert all(len(row) == 20 for row in whole)


def test_replace_leaves_the_original_alone() -> None:  # holds V04
    state = make_state()
    other = state.replace(generated_tokens=7)
    assert (state.generated_tokens, other.generated_tokens) == (0, 7)
    with pytest.raises(TypeError):
        state.replace(nothing=1)


@pytest.mark.parametrize("way", ["dict", "json", "binary"])
def test_storing_loses_nothing(way: str, tmp_path: Path) -> None:  # holds V05
    generator = np.random.default_rng(0)
    kwargs = {
        "bf16": jnp.asarray(generator.normal(size=(3, 2)), jnp.bfloat16),
        "int8": jnp.asarray([-128, 127], jnp.int8),
        "bool": jnp.array([True, False]),
        "specials": jnp.array([jnp.nan, -jnp.inf, -0.0], jnp.float32),
        "empty": jnp.zeros((0, 4), jnp.float16),
        "host": np.arange(3, dtype=np.int64),
        "nested": {
            "views": [{"key": jnp.ones((1, 2)), "value": (1, 2.5, None, "text", math.inf)}],
            "$tag": True,
        },
        "numbered": {3: "int key"},
        "raw": jax.random.key_data(jax.random.key(3)),
        "scalars": [
            np.float32(2.5),
            np.int64(-3),
            np.bool_(True),
            np.float64("-inf"),
            jnp.bfloat16.dtype.type(2),
        ],
        "no_dimension": np.array(7, np.int16),
    }
    state = make_state(
        model_kwargs=kwargs,
        _compile_config=vInferencePreCompileConfig(2, 8),
        generated_tokens=2**60,
    )
    if way == "dict":
        copy = SampleState.from_dict(state.to_dict())
    elif way == "json":
        text = state.to_json(indent=1)
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no strict JSON"))
        copy = SampleState.from_json(text)
    else:
        state.save(tmp_path / "state")
        copy = SampleState.load(tmp_path / "state")
    assert_same(copy, state)
    assert copy._compile_config == state._compile_config
    assert copy.tokens_per_second == -math.inf


@pytest.mark.parametrize(
    "key", [jax.random.PRNGKey(5), jax.random.key(5), jax.random.split(jax.random.key(5), 2)]
)
def test_every_kind_of_key_is_kept(key: jax.Array) -> None:
    assert_same(SampleState.from_json(make_state(prng_key=key).to_json()).prng_key, key)


def test_json_encoders_of_others_are_left_alone() -> None:
    make_state().to_json()
    with pytest.raises(TypeError):
        json.dumps(jnp.zeros(2))


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    state = make_state()
    with pytest.raises(ValueError, match="not JSON"):
        SampleState.from_json(state.to_json()[:-9])
    with pytest.raises(ValueError, match="sequences"):
        SampleState.from_dict({"current_length": 1})
    state.save(tmp_path / "state")
    whole = (tmp_path / "state").read_bytes()
    (tmp_path / "state").write_bytes(whole[:-3])
    with pytest.raises(ValueError, match="cannot be read"):
        SampleState.load(tmp_path / "state")
    with pytest.raises(ValueError, match="cannot be read"):
        SampleState.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="a state to be stored"):
        make_state(model_kwargs={"f": object()}).to_dict()


def test_what_would_come_back_changed_is_not_stored() -> None:  # holds V05
    pair = collections.namedtuple("pair", "a b")(1, 2)  # noqa: PYI024
    for wrong in (np.arange(3, dtype=">i4"), np.array([object()]), np.array(["text"]), pair):
        with pytest.raises(ValueError, match="in a state to be stored"):
            make_state(model_kwargs={"x": wrong}).to_json()
    with pytest.raises(ValueError, match="a stored state of type list"):
        SampleState.from_json("[1]")


RESUME = """
import sys
from enginebay_vinference import SampleState, vInference
from tests.unit.vinference.small import CONFIG, MODEL, last, new_tokens
inference = vInference(MODEL, None, CONFIG)
for path in sys.argv[1:]:
    is_binary = path.endswith("bin")
    state = SampleState.load(path) if is_binary else SampleState.from_json(open(path).read())
    print(new_tokens(last(inference.resume(state))))
"""


@pytest.mark.long
def test_another_process_goes_on_with_the_same_tokens(
    inference: vInference, tmp_path: Path, repo_root: Path
) -> None:  # holds V05
    ids, mask = encode(inference, *TEXTS)
    paths, expected = [], []
    for number, params in enumerate((GREEDY, HOT)):
        states = inference.generate(ids, mask, sampling_params=params)
        taken = next(states).copy()
        paths += [tmp_path / f"{number}.json", tmp_path / f"{number}.bin"]
        paths[-2].write_text(taken.to_json())
        taken.save(paths[-1])
        expected += [str(new_tokens(last(states)))] * 2
    run = subprocess.run(
        [sys.executable, "-c", RESUME, *map(str, paths)],
        cwd=repo_root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.splitlines() == expected


def test_generated_tokens_counts_what_was_emitted(inference: vInference) -> None:  # holds V06
    ids, mask = encode(inference, *TEXTS)
    rows = new_tokens(last(inference.generate(ids, mask, sampling_params=GREEDY)))
    stop = rows[0][4]
    params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    state = last(inference.generate(ids, mask, sampling_params=params))
    rows = new_tokens(state)
    assert len({len(row) for row in rows}) > 1, "the rows end at different steps"
    assert state.generated_tokens == sum(map(len, rows))
    real = np.asarray(state.model_kwargs["attention_mask"]) > 0
    assert set(np.asarray(state.sequences)[~real].tolist()) == {
        inference.generation_config.pad_token_id
    }


def test_a_state_is_valid_until_the_next_step_and_holds_the_cache_without_a_copy(
    inference: vInference,
) -> None:
    ids, mask = encode(inference, TEXTS[0])
    state = inference.execute_prefill(inference.init_state(ids, mask, sampling_params=GREEDY))
    views = state.model_kwargs["past_key_values"]["views"]
    places = [array.unsafe_buffer_pointer() for view in views for array in view.values()]
    after = inference.execute_decode(state)
    views = after.model_kwargs["past_key_values"]["views"]
    assert [array.unsafe_buffer_pointer() for view in views for array in view.values()] == places
    assert state.is_spent
    assert not after.is_spent
    for use in (
        state.copy,
        state.to_json,
        lambda: inference.execute_decode(state),
        lambda: inference.resume(state),
    ):
        with pytest.raises(SpentStateError, match=re.escape("state.copy()")):
            use()


@pytest.mark.parametrize(
    "field",
    ["current_length", "sequences", "running_token", "is_sequence_finished", "model_kwargs"],
)
def test_a_spent_state_that_is_read_late_says_so(
    inference: vInference, field: str
) -> None:  # holds V03
    ids, mask = encode(inference, TEXTS[0])
    first, *_, newest = inference.generate(ids, mask, sampling_params=GREEDY)
    with pytest.raises(SpentStateError, match=re.escape("state.copy()")):
        getattr(first, field)
    for read in (lambda: first.replace(generated_tokens=0), lambda: jax.tree.leaves(first)):
        with pytest.raises(SpentStateError):
            read()
    assert 0 < first.generated_tokens < newest.generated_tokens
    assert "spent" in repr(first)
    assert "spent" not in repr(newest)
    assert jax.tree.leaves(getattr(newest, field))


def test_a_copy_outlives_the_steps_after_it(inference: vInference) -> None:
    ids, mask = encode(inference, TEXTS[0])
    states = inference.generate(ids, mask, sampling_params=GREEDY)
    copies = [state.copy() for state in states]
    whole = new_tokens(copies[-1])
    assert [new_tokens(last(inference.resume(copy.copy()))) for copy in copies[:-1]] == [whole] * (
        len(copies) - 1
    )


def test_every_leaf_of_a_state_has_one_first_rule(inference: vInference) -> None:  # holds V24
    ids, mask = encode(inference, TEXTS[0])
    state = next(inference.generate(ids, mask))
    rules = vInferenceConfig(
        partition_axis=PartitionAxis("batch", "seq", "kv_seq", "heads", "dim")
    ).get_partition_rules()
    paths = [leaf_path(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    found = {
        path: next(number for number, (pattern, _) in enumerate(rules) if re.search(pattern, path))
        for path in paths
    }
    assert {path for path, rule in found.items() if rule == 0} == {"sequences", "running_token"}
    assert {path for path, rule in found.items() if rule == 1} == {
        "model_kwargs/attention_mask",
        "model_kwargs/position_ids",
    }
    cached = {path for path, rule in found.items() if rule == 4}
    assert len(cached) == 2 * sum(group.num_layers for group in inference.model.info.groups)
    view = "model_kwargs/past_key_values/views/3/key"
    quantised = [f"{view}/scale", f"{view}/weight", f"{view}/packed", f"{view}/absmax", view]
    first = [
        next(number for number, (pattern, _) in enumerate(rules) if re.search(pattern, path))
        for path in quantised
    ]
    assert first == [2, 2, 3, 3, 4]


def test_a_state_of_another_shape_is_refused(inference: vInference) -> None:
    ids, mask = encode(inference, TEXTS[0])
    state = next(inference.generate(ids, mask))
    wrong = state.replace(running_token=np.zeros((3, 1), np.int32))
    with pytest.raises(ValueError, match="another model or configuration"):
        inference.execute_decode(wrong)
    for changes in ({"current_length": 17}, {"model_kwargs": {"past_key_values": {}}}):
        with pytest.raises(ValueError, match="another model or configuration"):
            inference.execute_decode(state.replace(**changes))
    with pytest.raises(ValueError, match="without a cache"):
        inference.execute_decode(inference.init_state(ids, mask))
    with pytest.raises(ValueError, match="after its prefill"):
        inference.execute_prefill(state)
    assert not state.is_spent


@pytest.mark.long
def test_a_state_that_was_stored_goes_on_on_a_mesh(
    inference: vInference, split: vInference
) -> None:
    ids, mask = encode(inference, *TEXTS)
    states = inference.generate(ids, mask, sampling_params=GREEDY)
    text = next(states).to_json()
    assert new_tokens(last(split.resume(SampleState.from_json(text)))) == new_tokens(last(states))


def test_a_batch_that_the_mesh_does_not_divide_is_refused(inference: vInference) -> None:
    rows = CONFIG.replace(partition_axis=PartitionAxis(batch_axis="tensor", head_axis=None))
    split = vInference({**MODEL, "mesh": {"tensor": 2}}, None, rows)
    with pytest.raises(ValueError, match=r"attention_mask .* under the partition rules"):
        split.precompile(vInferencePreCompileConfig(1, 16))


@pytest.mark.long
def test_states_are_laid_out_by_the_rules_on_a_mesh(
    inference: vInference, split: vInference
) -> None:
    ids, mask = encode(inference, *TEXTS)
    whole = new_tokens(last(inference.generate(ids, mask, sampling_params=GREEDY)))
    states = split.generate(ids, mask, sampling_params=GREEDY)
    state = next(states)
    for view in state.model_kwargs["past_key_values"]["views"]:
        for array in view.values():
            local = array.addressable_shards[0].data.shape
            assert local[1] * 2 == array.shape[1], "heads are the second dimension of this layout"
    assert new_tokens(last(states)) == whole
