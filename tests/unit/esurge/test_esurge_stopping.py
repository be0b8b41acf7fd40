"""Stop texts and min_tokens through eSurge on a fake engine: what ends in the text of the first
tokens ends nothing.
"""

from __future__ import annotations

import pytest

from enginebay_esurge import eSurge
from tests.unit.esurge.small import GREEDY_ON, PROMPT, with_

pytestmark = pytest.mark.xdist_group("esurge")


def test_a_stop_text_within_the_least_tokens_ends_nothing(engine: eSurge) -> None:  # holds SG2
    [whole] = engine.generate(PROMPT, GREEDY_ON)
    third = next(
        part for part in engine.stream(PROMPT, GREEDY_ON) if part.num_generated_tokens >= 3
    )
    early = third.accumulated_text
    assert early
    assert early not in whole.get_text()[len(early) :]
    for least, ends in ((0, True), (third.num_generated_tokens, False)):
        params = with_(GREEDY_ON, stop=early, min_tokens=least)
        [output] = engine.generate(PROMPT, params)
        *_, last = engine.stream(PROMPT, params)
        assert output.outputs == last.outputs
        assert output.outputs[0].finish_reason == ("stop" if ends else "length")
        assert output.get_text() == ("" if ends else whole.get_text())
