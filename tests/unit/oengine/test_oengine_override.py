"""oEngine.override: steps of other implementations for a while, between which no sequence is
shared.
"""

from __future__ import annotations

import pytest

from enginebay.errors import CompilationError, IncorrectError, InputError, RequestError
from enginebay_oengine import OpenedModel, oEngine
from tests.unit.oengine.small import assert_nothing_is_held, decode, make_engine, prefill
from tests.unit.unregistered import garbage_attention, plain_attention

pytestmark = pytest.mark.xdist_group("oengine_api")
PROMPT = [5, 9, 70, 12, 33]


@pytest.fixture(scope="module")
def engine(model: OpenedModel) -> oEngine:
    """With a cache of its own."""
    return make_engine(model)


def tokens(engine: oEngine) -> list[int]:
    """The first tokens after PROMPT; every slot and page is given back."""
    prefix, first = prefill(engine, PROMPT)
    state = engine.init_decode_state()
    engine.insert(prefix, state, 0)
    prefix.release()
    found = [first, *decode(engine, state, [0], 4)[0]]
    engine.free_resource(0)
    return found


@pytest.mark.long
def test_steps_of_the_block_are_its_own_and_the_former_programs_come_back(engine: oEngine) -> None:
    expected, graphdef, model = tokens(engine), engine.graphdef, engine.model
    compiled, kept = engine.compilations.count, engine.continuous_forward.num_programs
    engine.compilations.forbidden = True
    with engine.override(attention={"decode": plain_attention}, check=False) as same:
        assert same is engine
        assert tokens(engine) == expected
        assert engine.model.plan.kernels.names["attention.decode"] == "plain_attention"
        within = engine.compilations.count
        assert within > compiled
        with engine.override(attention={"decode": garbage_attention}, check=False):
            wrong = tokens(engine)
        assert (wrong[0], wrong != expected) == (expected[0], True), (
            "the first token comes from the prefill"
        )
        within = engine.compilations.count
    assert engine.graphdef is graphdef
    assert engine.model is model, "its plan names the former kernels"
    assert tokens(engine) == expected
    assert (engine.compilations.count, engine.continuous_forward.num_programs) == (within, kept)
    with pytest.raises(CompilationError):
        prefill(engine, PROMPT * 20)
    engine.compilations.forbidden = False
    assert_nothing_is_held(engine)


@pytest.mark.long
def test_a_wrong_one_is_refused_and_nothing_changes(engine: oEngine) -> None:
    expected, graphdef = tokens(engine), engine.graphdef
    engine.compilations.forbidden = True
    with pytest.raises(IncorrectError, match="garbage_attention fails its quick check"):
        with engine.override(attention=garbage_attention):
            pytest.fail("the block was entered")
    assert engine.graphdef is graphdef
    assert tokens(engine) == expected, "by the same programs"
    engine.compilations.forbidden = False


def test_sequences_are_refused_at_the_beginning_and_given_back_at_the_end(engine: oEngine) -> None:
    prefix, _ = prefill(engine, PROMPT)
    state = engine.init_decode_state()
    engine.insert(prefix, state, 1)
    with (
        pytest.raises(RequestError, match="2 sequences hold pages"),
        engine.override(attention="xla"),
    ):
        pytest.fail("the block was entered")
    prefix.release()
    engine.free_resource(1)
    taken, model = engine.manager.alloc_hbm_pages(2), engine.model
    with engine.override(attention="xla"):  # pages by number are no sequences
        prefix, _ = prefill(engine, PROMPT)
        engine.insert(prefix, state, 2)
    assert engine.model is model
    assert not state.active_slot_requests_map
    with pytest.raises(InputError, match="a prefix whose pages were released"):
        engine.insert(prefix, state, 0)
    engine.manager.free_hbm_pages(taken)
    assert_nothing_is_held(engine)
