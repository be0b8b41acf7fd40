"""llm.override: what runs within the block, what is refused, and that everything is as it was
afterwards.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import jax
import pytest

from enginebay import LLM, SamplingParams
from enginebay.compose.fused import COMPOSED
from enginebay.compose.plan import make_title
from enginebay.errors import (
    IncorrectError,
    InputError,
    RequestError,
    StoppedError,
    UnknownNameError,
    UnsupportedError,
)
from enginebay.ops.spec import AttnBatch, AttnSpec
from tests.brief import BRIEF
from tests.unit.serving import GREEDY, SIZES, assert_idle
from tests.unit.unregistered import (
    failing_attention,
    flat_attention,
    garbage_attention,
    paged_only,
    plain_attention,
    scaled_linear,
)

pytestmark = pytest.mark.xdist_group("llm")
PHASES = ("decode", "prefill", "mixed")
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def contiguous_llm(pooled_module: None) -> Iterator[LLM]:
    with LLM(BRIEF, engine="vinference", **SIZES) as llm:
        yield llm


class Recorder:
    """The simple form, right, and the modes that it was traced for."""

    def __init__(self) -> None:
        self.modes: list[str] = []

    def __call__(
        self, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: AttnBatch, spec: AttnSpec
    ) -> jax.Array:
        self.modes.append(batch.bucket.mode)
        return plain_attention(q, k_pages, v_pages, batch, spec)


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


def empty_the_cache(llm: LLM) -> None:
    """As the beginning and the end of a block do: a cache that grows is small again, and its steps
    are others.
    """
    llm.run_on_engine(llm.engine.drop_arrays)
    llm.run_on_engine(llm.engine.make_arrays)


@pytest.mark.parametrize("engine", [pytest.param("vinference", marks=pytest.mark.long), "oengine"])
def test_steps_of_the_block_run_the_function_and_the_former_programs_come_back(
    engine: str, llm: LLM, contiguous_llm: LLM
) -> None:
    served = contiguous_llm if engine == "vinference" else llm
    empty_the_cache(served)
    plan, expected = served.plan, tokens(served)
    compiled = served.engine.compilations.count
    function = Recorder()
    with served.override(attention=function, check=False):
        assert tokens(served) == expected
        assert {served.plan.kernels.names[f"attention.{p}"] for p in PHASES} == {"Recorder"}
        assert "decode" in function.modes
        assert {"prefill", "mixed"} & set(function.modes)
        within = served.engine.compilations.count
        assert within > compiled, "the block has programs of its own"
    assert served.plan is plan
    modes = len(function.modes)
    assert tokens(served) == expected
    assert (served.engine.compilations.count, len(function.modes)) == (within, modes), (
        "nothing is compiled anew"
    )
    gone = weakref.ref(function)
    del function
    gc.collect()
    assert gone() is None, "something holds on to what the block was made of"


def test_messages_about_waits_name_the_kernel_of_the_block(llm: LLM) -> None:
    runner = llm.engine.executor
    before = runner.title
    with llm.override(attention=plain_attention):
        assert "plain_attention" in runner.title
        assert make_title(llm.plan) == runner.title
    assert runner.title == before == make_title(llm.plan)


@pytest.mark.long
def test_a_phase_alone_is_overridden(llm: LLM) -> None:
    expected = tokens(llm)
    with llm.override(attention={"decode": garbage_attention}, check=False):
        wrong = tokens(llm)
        assert llm.plan.kernels.names["attention.prefill"] == "xla"
        assert any(
            r.chosen == "garbage_attention" and "not checked" in r.why for r in llm.plan.reasons
        )
    assert wrong[0] == expected[0], "the first token comes from the prefill"
    assert wrong != expected
    assert tokens(llm) == expected


def fail_within_two_blocks(llm: LLM, expected: list[int]) -> None:
    with llm.override(attention="xla"):
        outer = llm.plan
        with llm.override(linear=scaled_linear, check=False):
            assert llm.plan.kernels.names["linear"] == "scaled_linear"
            assert llm.plan.kernels.names["attention.decode"] == "xla"
            tokens(llm)
        assert llm.plan is outer
        assert tokens(llm) == expected
        raise ZeroDivisionError


@pytest.mark.long
def test_blocks_nest_and_an_exception_restores_too(llm: LLM) -> None:
    expected, plan = tokens(llm), llm.plan
    with pytest.raises(ZeroDivisionError):
        fail_within_two_blocks(llm, expected)
    assert llm.plan is plan
    assert tokens(llm) == expected


def num_cached(llm: LLM, prompt: list[int]) -> int:
    metrics = llm.generate([prompt], SamplingParams(max_tokens=1))[0].metrics
    assert metrics is not None
    return metrics.num_cached_tokens


def test_a_fused_op_is_taken_apart_and_said_to_be(llm: LLM) -> None:
    """No step is run: nothing is compiled."""
    before = {r.setting: r for r in llm.plan.reasons}["kernels.add_rms_norm"]
    with llm.override(rms_norm="xla"):
        within = {r.setting: r for r in llm.plan.reasons}["kernels.add_rms_norm"]
        assert within.chosen == llm.plan.kernels.names["add_rms_norm"] == COMPOSED != before.chosen
        assert "rms_norm is given to override()" in within.why
    assert {r.setting: r for r in llm.plan.reasons}["kernels.add_rms_norm"] == before


def test_what_the_cache_knows_is_forgotten_at_both_ends(llm: LLM) -> None:
    prompt = list(range(5, 75))
    assert [num_cached(llm, prompt) for _ in range(2)] == [0, 64]
    with llm.override(attention="xla"):
        assert [num_cached(llm, prompt) for _ in range(2)] == [0, 64]
    assert num_cached(llm, prompt) == 0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"attention": garbage_attention}, IncorrectError, (r"attention.decode, .* = "
            r"garbage_attention fails its quick check: decode, .* is off "
            r"by .*, allowed .*check=False")),
        ({"attention": {"decode": failing_attention}}, IncorrectError, ("decode: it raised "
            "RuntimeError: not written yet")),
        ({"attention": {"mixed": flat_attention}}, IncorrectError, r"Allowed: an array \["),
        ({"linear": scaled_linear}, IncorrectError, "linear = scaled_linear fails"),
        ({"attention": {"decod": plain_attention}}, UnknownNameError, "Did you mean 'decode'"),
        ({"attention": scaled_linear}, InputError, "a function .q, k_pages, v_pages, batch, spec."),
        ({"attention": 7}, InputError, "an object of type int"),
        ({"linear": 7}, InputError, "of type int. Allowed: a function"),
        ({"attention": "no_such_kernel"}, UnknownNameError, "no_such_kernel"),
        ({"attention": "xla", "kv_write": "xla"}, UnsupportedError, ("attention writes the cache "
            "itself")),
        ({"atention": "xla"}, UnknownNameError, "Did you mean 'attention'"),
        ({}, InputError, "override.. without arguments"),
    ],
)  # fmt: skip
def test_what_cannot_serve_is_refused_and_nothing_changes(
    given: dict[str, object], error: type[Exception], message: str, llm: LLM
) -> None:
    plan, parts = llm.plan, llm.engine.executor.parts
    with pytest.raises(error, match=message), llm.override(**given):
        pytest.fail("the block was entered")
    assert llm.plan is plan
    assert llm.engine.executor.parts is parts


def test_one_without_the_layout_of_the_cache_is_refused(llm: LLM) -> None:
    with pytest.raises(
        UnsupportedError, match=r"layout hnd \(has nhd\).*make the LLM with a layout"
    ):
        with llm.override(attention=paged_only):
            pytest.fail("the block was entered")


@pytest.mark.long
def test_requests_under_way_are_refused_at_the_beginning_and_ended_at_the_end(llm: LLM) -> None:
    expected = tokens(llm)
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    with (
        pytest.raises(RequestError, match="1 requests are running or waiting"),
        llm.override(attention="xla"),
    ):
        pytest.fail("the block was entered")
    stream.close()
    with llm.override(attention="xla"):
        left = llm.stream(PROMPT, SamplingParams(max_tokens=140, ignore_eos=True))
        next(left)
    with pytest.raises(StoppedError, match="the block of override"):
        list(left)
    assert tokens(llm) == expected


def test_a_function_that_fails_in_a_step_fails_its_request_alone(llm: LLM) -> None:
    expected = tokens(llm)
    with llm.override(attention=failing_attention, check=False):
        with pytest.raises(Exception, match="not written yet"):
            tokens(llm)
    assert tokens(llm) == expected
    assert_idle(llm)


def test_compiling_is_allowed_in_the_block_and_forbidden_again_after_it(llm: LLM) -> None:
    expected = tokens(llm)
    compilations = llm.engine.compilations
    compilations.forbidden = True
    try:
        with llm.override(attention="xla"):
            assert not compilations.forbidden
        assert compilations.forbidden
        assert tokens(llm) == expected
    finally:
        compilations.forbidden = False
