"""eSurge's context rules: what is cut of a prompt and of the tokens asked for, whatever their
lengths.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginebay.errors import RequestError
from enginebay_esurge.context import ContextRules, Lengths, fit_lengths, truncate


@st.composite
def rules(draw: st.DrawFn) -> ContextRules:
    length = draw(st.integers(2, 300))
    flags = [draw(st.booleans()) for _ in range(4)]
    reserve = draw(st.none() | st.integers(0, length - 2))
    return ContextRules(length, reserve, *flags[:3], "left", flags[3])


@given(rules(), st.integers(1, 700), st.none() | st.integers(1, 700))
def test_prompt_new_tokens_and_reserve_always_fit_the_context(
    rule: ContextRules, num_prompt: int, num_new: int | None
) -> None:  # holds S04
    wanted = num_new or max(1, rule.budget - num_prompt)
    fits = num_prompt + wanted <= rule.budget
    if not fits and rule.strict_context and not rule.auto_cap_new_tokens:
        with pytest.raises(ValueError, match="strict_context"):
            fit_lengths(num_prompt, num_new, rule)
        return
    try:
        lengths = fit_lengths(num_prompt, num_new, rule)
    except RequestError:
        assert rule.strict_context
        assert num_prompt >= rule.budget, "capping would have been enough"
        assert not rule.auto_truncate_prompt
        return
    assert lengths.num_prompt + lengths.num_new + rule.reserve <= rule.max_model_len
    assert 1 <= lengths.num_prompt <= num_prompt
    assert 1 <= lengths.num_new <= wanted
    if fits:
        assert lengths == Lengths(num_prompt, wanted)
        return
    assert lengths.num_prompt + lengths.num_new == rule.budget, "no more is cut than need be"
    if rule.strict_context:  # what is forbidden was not done
        assert rule.auto_truncate_prompt or lengths.num_prompt == num_prompt
        assert rule.auto_cap_new_tokens or lengths.num_new == wanted
    if num_prompt > rule.budget:
        assert lengths.num_prompt == max(1, rule.budget - wanted), (
            "whatever prefer_preserve_prompt says"
        )
    elif rule.auto_truncate_prompt == rule.auto_cap_new_tokens:
        if rule.prefer_preserve_prompt:
            assert lengths.num_prompt == min(num_prompt, rule.budget - 1)
        else:
            assert lengths.num_new == min(wanted, rule.budget - 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 50))
def test_truncation_drops_the_beginning_the_end_or_the_middle(
    tokens: list[int], keep: int
) -> None:  # holds S04
    kept = min(keep, len(tokens))
    assert truncate(tokens, keep, "left") == tokens[len(tokens) - kept :]
    assert truncate(tokens, keep, "right") == tokens[:kept]
    head = (kept + 1) // 2
    middle = tokens[:head] + tokens[len(tokens) - (kept - head) :]
    assert truncate(tokens, keep, "middle") == (middle if kept < len(tokens) else tokens)


def test_what_goes_first_and_what_is_forbidden() -> None:  # holds S04
    rule = ContextRules(100, 10)
    assert fit_lengths(60, 50, rule) == Lengths(60, 30)
    assert fit_lengths(60, None, rule) == Lengths(60, 30)
    assert fit_lengths(90, 50, rule) == Lengths(89, 1), (
        "a prompt as long as the budget leaves room for one"
    )
    honour = dataclasses.replace(rule, prefer_preserve_prompt=False)
    assert fit_lengths(60, 50, honour) == Lengths(40, 50)
    never_capped = dataclasses.replace(rule, auto_cap_new_tokens=False)
    assert fit_lengths(60, 50, never_capped) == Lengths(40, 50)
    assert fit_lengths(60, 500, never_capped) == Lengths(1, 89), (
        "without strict_context there is an answer"
    )
    for change in ({"auto_cap_new_tokens": False}, {"auto_truncate_prompt": False}):
        strict = dataclasses.replace(rule, strict_context=True, **change)
        with pytest.raises(ValueError, match="strict_context"):
            fit_lengths(500, 500, strict)
    assert fit_lengths(60, 50, dataclasses.replace(rule, strict_context=True)) == Lengths(60, 30)


@pytest.mark.parametrize("preserves", [False, True])
def test_a_prompt_over_the_budget_leaves_room_for_the_new_tokens(
    preserves: bool,
) -> None:  # holds S04
    rule = ContextRules(160, 40, prefer_preserve_prompt=preserves)
    assert fit_lengths(200, 30, rule) == Lengths(90, 30)
    assert fit_lengths(200, None, rule) == Lengths(119, 1)
    assert fit_lengths(200, 500, rule) == Lengths(1, 119), "as many as the budget has room for"
    reluctant = dataclasses.replace(rule, auto_truncate_prompt=False)
    assert fit_lengths(200, 30, reluctant) == Lengths(90, 30), "nothing else helps"
    assert fit_lengths(121, 30, rule) == Lengths(90, 30)
    with pytest.raises(ValueError, match="strict_context"):
        fit_lengths(200, 30, dataclasses.replace(reluctant, strict_context=True))


@pytest.mark.parametrize("preserves", [False, True])
def test_strict_without_capping_refuses_every_excess(preserves: bool) -> None:  # holds S04
    rule = ContextRules(
        160,
        40,
        auto_cap_new_tokens=False,
        strict_context=True,
        prefer_preserve_prompt=preserves,
    )
    assert fit_lengths(90, 30, rule) == Lengths(90, 30)
    for num_prompt, num_new in ((91, 30), (10, 111), (200, 30), (120, None)):
        with pytest.raises(ValueError, match="120 tokens together"):
            fit_lengths(num_prompt, num_new, rule)


def test_reserve_is_a_tenth_and_leaves_room() -> None:  # holds S03
    assert ContextRules(8192).reserve == 819
    for reserve in (8192, 9000, 8191, -1):
        with pytest.raises(ValueError, match="reserve_tokens"):
            ContextRules(8192, reserve)
    with pytest.raises(ValueError, match="truncate_mode"):
        ContextRules(8192, truncate_mode="centre")  # type: ignore[arg-type]
