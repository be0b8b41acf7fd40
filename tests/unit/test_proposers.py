"""What is drafted, when, and who may be asked: the n-gram look-up, a row's draft stats, and the
choice of a proposer.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from enginebay.compose.composition import make_engine, make_plan, make_proposer
from enginebay.config import make_config
from enginebay.errors import ConfigError, EnginebayError, UnsupportedError
from enginebay.plugins.registry import Registry, load_registry
from enginebay.serving.running import DraftStats
from enginebay_runtime.buckets import BucketSizes
from enginebay_samplers.ngram import NgramOptions, NgramProposer
from enginebay_testing.tiny import write_tiny_checkpoint

MOST = 8


def looked_up(tokens: list[int], most: int, least_n: int, max_n: int) -> list[int]:
    """The same by definition: try every length and place."""
    for n in range(min(max_n, len(tokens) - 1), least_n - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                after = tokens[start + n :]
                return [after[i % len(after)] for i in range(most)]
    return []


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_ngram_proposes_what_followed_the_longest_and_latest_occurrence(
    least: int, most: int
) -> None:
    rng = np.random.default_rng(least * 10 + most)
    proposer = NgramProposer(NgramOptions(min_n=least, max_n=most))
    found = 0
    for length in [1, 2, 3, 5, *rng.integers(6, 60, 60)]:
        tokens = rng.integers(0, 4, length).astype(np.int32)
        before = tokens.copy()
        drafts = proposer.propose(tokens, MOST)
        assert drafts.dtype == np.int32
        assert drafts.tolist() == looked_up(tokens.tolist(), MOST, least, most), tokens
        assert np.array_equal(tokens, before)
        found += bool(len(drafts))
    assert found > 20


def test_ngram_repeats_a_period() -> None:
    drafts = NgramProposer(NgramOptions()).propose(
        np.asarray([9, 1, 2, 3, 1, 2, 3, 1, 2], np.int32), 5
    )
    assert drafts.tolist() == [3, 1, 2, 3, 1]


def test_ngram_options_are_checked() -> None:
    with pytest.raises(ValidationError, match="min_n = 5 is more than max_n = 4"):
        NgramOptions(min_n=5)


def test_a_row_whose_drafts_all_fail_gives_them_up_at_once_and_one_whose_hold_does_not() -> None:
    assert DraftStats().is_good
    assert not DraftStats().after(0, MOST, MOST).is_good
    assert DraftStats().after(MOST, MOST, MOST).is_good
    best = DraftStats()
    for _ in range(10):
        best = best.after(MOST, MOST, MOST)
    assert best.after(0, MOST, MOST).is_good, "one proposal that fails is forgiven"
    assert not best.after(0, MOST, MOST).after(0, MOST, MOST).is_good


def test_proposals_of_nothing_are_given_up_later_than_wrong_ones() -> None:
    stats, tries = DraftStats(), 0
    while stats.is_good:
        stats, tries = stats.after_none(), tries + 1
    assert tries == 4


def test_a_row_takes_drafts_up_again_when_they_would_have_held() -> None:
    given_up = DraftStats(0.0)
    assert given_up.after(MOST, MOST, MOST).is_good
    assert not given_up.after(MOST // 2, MOST, MOST).is_good
    one_by_one = given_up
    for _ in range(3):
        one_by_one = one_by_one.after(1, 1, MOST)
        assert not one_by_one.is_good, "few tokens prove little"


def test_a_share_stays_between_none_and_all() -> None:
    rng, stats = np.random.default_rng(0), DraftStats()
    for _ in range(500):
        asked = int(rng.integers(1, MOST + 1))
        stats = stats.after(int(rng.integers(0, asked + 1)), asked, MOST)
        assert 0 <= stats.share <= 1


@pytest.mark.parametrize(
    ("decode_rows", "verify_rows"),
    [
        ((1,), (1,)),
        ((1, 2, 4), (1, 4)),
        ((1, 2, 4, 8, 12, 16), (1, 2, 8)),
        ((16, 32), (16,)),
        ((2, 3), (2, 3)),
    ],
)
def test_sizes_of_steps_that_verify(
    decode_rows: tuple[int, ...], verify_rows: tuple[int, ...]
) -> None:
    assert BucketSizes(decode_rows, (1,), (16,), (256,), (16,)).verify_rows == verify_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(folder, load_registry())
    return folder


@pytest.mark.parametrize("engine", ["vinference", "oengine", "esurge"])
def test_programs_that_verify_are_compiled_only_when_a_proposer_is_chosen(
    engine: str, model: Path
) -> None:
    kinds = {}
    for proposer in ("none", "ngram"):
        config = make_config(
            {"model": str(model), "engine": engine, "proposer": proposer, "max_num_seqs": 4}
        )
        plan = make_plan(config)
        keys = make_engine(plan).geometry.all_steps()  # type: ignore[attr-defined]
        kinds[proposer] = [key for key in keys if key.kind == "verify"]
        assert (make_proposer(plan.registry, plan.config) is None) == (proposer == "none")
    assert not kinds["none"]
    assert [key.bucket.seqs for key in kinds["ngram"]] == [1, 4]
    assert {key.bucket.max_q_len for key in kinds["ngram"]} == {16}


def test_nothing_is_drafted_unless_a_proposer_is_named(model: Path) -> None:
    plan = make_plan(make_config({"model": str(model)}))
    assert plan.config.proposer.name == "none"
    assert plan.config.max_drafts == 0
    assert "unless" in next(r.why for r in plan.reasons if r.setting == "proposer")
    named = make_plan(make_config({"model": str(model), "proposer": {"name": "ngram", "max_n": 6}}))
    made = make_proposer(named.registry, named.config)
    assert isinstance(made, NgramProposer)
    assert made.options == NgramOptions(max_n=6)
    assert named.config.max_drafts == 15


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("ngrams", "unknown proposer 'ngrams'"),
        ({"name": "ngram", "max_m": 3}, "max_m"),
        ({"max_n": 3}, "proposer = 'none' with options max_n"),
        ({"name": "none", "max_n": 3}, "proposer = 'none' with options max_n"),
    ],
)
def test_a_wrong_choice_is_refused(choice: object, message: str, model: Path) -> None:
    with pytest.raises(EnginebayError, match=message):
        make_plan(make_config({"model": str(model), "proposer": choice}))


def test_a_wrong_number_of_drafts_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_tokens = 0"):
        make_config({"draft_tokens": 0})


def test_an_engine_that_verifies_nothing_is_refused_with_a_proposer(model: Path) -> None:
    entries = []
    for entry in load_registry().entries:
        declaration = entry.declaration
        if (entry.kind, entry.name) == ("engine", "oengine") and declaration is not None:
            declaration = dataclasses.replace(declaration, capabilities={"logprobs": True})
            entry = dataclasses.replace(entry, declaration=declaration)
        entries.append(entry)
    config = {"model": str(model), "engine": "oengine"}
    make_plan(make_config(config), Registry(entries))
    given = (
        "proposer = 'ngram' with engine 'oengine', which verifies no drafts. "
        "Allowed: engines that verify drafts: esurge, vinference"
    )
    with pytest.raises(UnsupportedError, match=given):
        make_plan(make_config(config | {"proposer": "ngram"}), Registry(entries))
