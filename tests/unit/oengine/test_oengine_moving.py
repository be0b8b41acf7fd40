"""A prefix moves to another engine, of another mesh or cache, and continues with the same
tokens.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from enginebay_oengine import GenerationState, OpenedModel, oEngine, open_model
from tests.unit.oengine.small import (
    GREEDY,
    MODEL,
    PIECES,
    assert_nothing_is_held,
    decode,
    make_engine,
    prefill,
)

pytestmark = pytest.mark.xdist_group("oengine_api")


@pytest.fixture(scope="module")
def split_engine() -> oEngine:
    """On a mesh of two devices, with more pages."""
    return make_engine(open_model(MODEL | {"mesh": {"tensor": 2}}), num_pages=45)


@pytest.mark.long
def test_a_prefix_moves_to_another_mesh_and_back(
    engine: oEngine, split_engine: oEngine, prompts: Any, oracle: Any
) -> None:  # holds O08
    prompt = prompts[3][: PIECES[0]]
    for source, target in ((engine, split_engine), (split_engine, engine)):
        prefix, first = prefill(source, prompt)
        moved = jax.device_put(prefix, target.get_prefix_destination_sharding())
        del prefix
        assert source.manager.num_free_pages == source.metadata.num_pages - 1
        state = target.init_decode_state()
        target.bulk_insert(moved, state, [2, 0])
        tokens = decode(target, state, [2, 0], 23)
        assert [first, *tokens[2]] == [first, *tokens[0]] == oracle(prompt, GREEDY)
        assert target.free_resource(2)
        assert target.free_resource(0)
        del moved
        assert_nothing_is_held(target)


@pytest.mark.long
def test_a_prefix_of_another_engine_can_be_inserted_as_it_is(
    engine: oEngine, split_engine: oEngine, prompts: Any, oracle: Any
) -> None:
    prefix, first = prefill(engine, prompts[0])
    for target in (split_engine, engine):
        state = target.init_decode_state()
        target.insert(prefix, state, 1)
        assert [first, *decode(target, state, [1], 11)[1]] == oracle(prompts[0], GREEDY)[:12]
        assert target.free_resource(1)


@pytest.mark.long
def test_moving_takes_the_sampling_along(
    engine: oEngine, split_engine: oEngine, prompts: Any
) -> None:
    hot = {"seed": 9, "temperature": 1.5, "top_k": 30}
    tokens = []
    for target in (engine, split_engine):
        prefix, _ = prefill(engine, prompts[2], **hot)
        moved = jax.device_put(prefix, target.get_prefix_destination_sharding())
        state = target.init_decode_state()
        target.insert(moved, state, 3)
        tokens.append(decode(target, state, [3], 10)[3])
        target.free_resource(3)
    assert tokens[0] == tokens[1]


@pytest.mark.long
def test_destination_is_a_tree_of_named_shardings_like_the_prefix(
    split_engine: oEngine, prompts: Any
) -> None:  # holds O08
    where = split_engine.get_prefix_destination_sharding()
    assert isinstance(where, GenerationState)
    assert all(isinstance(leaf, NamedSharding) for leaf in jax.tree.leaves(where))
    prefix, _ = prefill(split_engine, prompts[0])
    assert jax.tree.structure(where) == jax.tree.structure(prefix)
    moved = jax.device_put(prefix, where)
    for leaf, sharding in zip(jax.tree.leaves(moved), jax.tree.leaves(where), strict=True):
        assert leaf.sharding == sharding
    assert any("tensor" in tuple(leaf.spec) for leaf in jax.tree.leaves(where))


@pytest.mark.long
def test_rules_of_states_match_every_leaf(split_engine: oEngine, prompts: Any) -> None:  # holds O05
    prefix, _ = prefill(split_engine, prompts[0])
    where = jax.tree.leaves(split_engine.get_prefix_destination_sharding())
    leaves = jax.tree_util.tree_leaves_with_path(prefix)
    for is_decode in (False, True):
        rules = split_engine.get_state_shardings(is_decode)
        assert isinstance(rules, tuple)
        assert all(
            isinstance(spec, PartitionSpec) and re.compile(pattern) for pattern, spec in rules
        )
        for (path, leaf), sharding in zip(leaves, where, strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            spec = next(spec for pattern, spec in rules if re.search(pattern, name))
            assert len(spec) <= leaf.ndim
            assert spec == (PartitionSpec() if is_decode else sharding.spec), name


def test_a_prefix_that_does_not_fit_is_refused(
    engine: oEngine, model: OpenedModel, prompts: Any
) -> None:
    short = make_engine(model, num_pages=11, page_size=8, max_length=24)
    long, _ = prefill(engine, prompts[3])
    with pytest.raises(ValueError, match="at most 24"):
        short.insert(long, short.init_decode_state(), 0)
    small, _ = prefill(engine, prompts[0])
    with pytest.raises(ValueError, match="page size"):
        short.insert(small, short.init_decode_state(), 0)
    assert_nothing_is_held(short)
    for use in (
        lambda: short.decode(short.graphstate, short.graphothers, engine.init_decode_state()),
        lambda: short.insert(small, engine.init_decode_state(), 0),
    ):
        with pytest.raises(ValueError, match="another engine"):
            use()
    small.release()
    with pytest.raises(ValueError, match="released"):
        engine.insert(small, engine.init_decode_state(), 0)
    assert np.asarray(long.rows.length).tolist() == list(long.lengths)
