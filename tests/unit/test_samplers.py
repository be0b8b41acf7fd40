"""The samplers' conformance suite catches wrong samplers, and the built-in ones cost what they
promise.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from enginebay.contracts.sampler import SamplingState
from enginebay.ops.sampling import gumbel_noise
from enginebay_samplers.penalties import penalize
from enginebay_testing import sampler_runs
from enginebay_testing.samplers import sampler_checks
from enginebay_testing.sampling_oracle import OracleParams, device_params
from enginebay_xla import sample as draw
from tests.zoo.samplers import FAULTS, sample


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ("wrong temperature", "support_and_frequencies[temperature]"),
        ("row dependent", "row_does_not_depend_on_the_batch"),
        ("last best", "temperature_0_is_first_best"),
        ("without penalties", "penalised_greedy_rows_get_the_first_best"),
        ("prompt is counted", "penalised_greedy_rows_get_the_first_best"),
        ("prompt is never repeated", "penalised_greedy_rows_get_the_first_best"),
        ("stale tokens are counted", "penalised_greedy_rows_get_the_first_best"),
        ("negative logits are divided", "penalised_support_and_frequencies[temperature]"),
        ("penalties come after temperature", "penalised_support_and_frequencies[temperature]"),
    ],
)
def test_suite_finds_a_wrong_sampler(
    wrong: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler_runs, "COMPILED_WELL", {})  # each program runs a few times
    check = dict(sampler_checks(FAULTS[wrong]))[name]
    with pytest.raises(AssertionError, match=r"row|temperature|token"):
        check()


def test_noise_is_gumbel_distributed_to_the_far_tail() -> None:
    seeds = np.random.default_rng(0).integers(0, 2**32, (6, 2), dtype=np.uint32)
    noise = jax.jit(gumbel_noise)(seeds, np.arange(100_000)[None])
    noise = np.sort(np.asarray(noise).ravel().astype(np.float64))
    assert np.isfinite(noise).all()
    steps = np.arange(1, noise.size + 1) / noise.size
    assert np.abs(np.exp(-np.exp(-noise)) - steps).max() < 1.7 / np.sqrt(noise.size)
    assert 10.0 < noise[-1] < 22.9


@pytest.mark.long
@pytest.mark.parametrize("num_candidates", [1, 64])
def test_token_is_the_same_however_the_kept_tokens_are_found(
    num_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer candidates send more rows over the whole vocabulary; the tokens stay."""
    chance = np.random.default_rng(num_candidates)
    rows = 512
    state = SamplingState(
        keys=chance.integers(0, 2**32, (rows, 2), dtype=np.uint32),
        positions=chance.integers(0, 1000, rows).astype(np.int32),
        params=dataclasses.replace(
            device_params([OracleParams()] * rows),
            temperature=chance.choice([0.3, 1.0, 3.0], rows).astype(np.float32),
            top_k=chance.choice([0, 2, 30, 200], rows).astype(np.int32),
            top_p=chance.choice([1.0, 0.9, 0.4], rows).astype(np.float32),
            min_p=chance.choice([0.0, 0.02, 0.3], rows).astype(np.float32),
        ),
        token_ids=np.zeros((rows, 1), np.int32),
        prompt_lengths=np.ones(rows, np.int32),
    )
    # Rounded, as logits of a bf16 model are: many equal ones.
    logits = (np.round(chance.normal(size=(rows, 320)) * 16) / 8).astype(np.float32)
    wanted = np.asarray(jax.jit(sample)(logits, state))
    monkeypatch.setattr(draw, "NUM_CANDIDATES", num_candidates)
    got = np.asarray(jax.jit(functools.partial(sample))(logits, state))
    # Sums in another order may move a top_p border: by less than one row in a hundred.
    assert (got != wanted).sum() <= 2


def greedy_state(rows: int) -> SamplingState:
    none = np.zeros(rows, np.int32)
    return SamplingState(
        keys=np.zeros((rows, 2), np.uint32),
        positions=none,
        params=device_params([OracleParams(temperature=0.0)] * rows),
        token_ids=np.zeros((rows, 8), np.int32),
        prompt_lengths=none,
    )


def test_greedy_rows_pay_for_two_reductions_only() -> None:
    eqns = jax.make_jaxpr(sample)(np.zeros((2, 64), np.float32), greedy_state(2)).eqns
    always = {eqn.primitive.name for eqn in eqns}
    assert "cond" in always
    reductions = [eqn for eqn in eqns if eqn.primitive.name.startswith("reduce")]
    assert [eqn.primitive.name for eqn in reductions if eqn.invars[0].aval.shape == (2, 64)] == [
        "reduce_max",
        "reduce_min",
    ], "over the vocabulary"
    assert not always & {"top_k", "sort", "exp", "log", "cumsum", "argmax", "threefry2x32"}
    assert not any("scatter" in name for name in always)


def test_rows_without_penalties_pay_for_no_scatter_over_the_vocabulary() -> None:
    """All of penalties but the question whether there are any stands in one branch of a
    conditional.

    The other branch passes the logits on as they lie.
    """
    lowered = jax.jit(lambda logits, state: penalize(logits * 2.0, state) * 3.0).lower(
        np.zeros((2, 64), np.float32), greedy_state(2)
    )
    text = lowered.compile().as_text()
    assert text is not None
    computations = re.split(r"\n(?=\S)", text)
    (entry,) = (c for c in computations if c.startswith("ENTRY"))
    assert "conditional" in entry
    assert not re.search(r"f32\[2,64\]\S* copy\(", text)
    assert not re.search(r"scatter|while|s32\[2,64\]|pred\[2,64\]", entry)


def test_rows_without_penalties_keep_their_logits_to_the_bit() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    logits[0, 5] = -np.inf
    among = np.asarray([0.0, 1.5, 0.0], np.float32)
    plain = greedy_state(3)
    state = dataclasses.replace(
        plain,
        params=dataclasses.replace(
            plain.params, repetition_penalty=np.maximum(among, 1), presence_penalty=among
        ),
        positions=np.full(3, 8, np.int32),
        token_ids=np.tile(np.arange(8, dtype=np.int32), (3, 1)),
    )
    moved = np.asarray(jax.jit(penalize)(logits, state))
    assert np.array_equal(moved[[0, 2]], logits[[0, 2]])
    assert (moved[1, :8] < logits[1, :8]).all()
    assert np.array_equal(moved[1, 8:], logits[1, 8:])
