"""What eSurge's requests cost beside one another: steps that they share, prompts computed once,
times that they waited.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from enginebay.contracts.engine import StepPlan
from enginebay_esurge import eSurge
from tests.unit.esurge.conftest import Make
from tests.unit.esurge.small import (
    GREEDY_ON,
    HOT,
    LONG,
    PROMPT,
    PROMPTS,
    WAIT_S,
    foretold,
    token_ids,
    until,
    with_,
)
from tests.unit.serving import within_minutes

pytestmark = pytest.mark.xdist_group("esurge")


class Plans:
    """Counts prefilled tokens and the rows of each decode step. `decoding` is set by the first of
    those.
    """

    def __init__(self, engine: eSurge) -> None:
        self.num_prefilled = 0
        self.decoded_rows: list[int] = []
        self.decoding = threading.Event()
        self.pause_s = 0.0
        engine.engine.before_step = self

    def __call__(self, plan: StepPlan) -> None:
        if plan.is_decode:
            self.decoded_rows.append(len(plan.rows))
            self.decoding.set()
            time.sleep(self.pause_s)
        else:
            self.num_prefilled += sum(row.num_tokens for row in plan.rows)


def test_requests_of_other_threads_join_the_next_steps(engine: eSurge) -> None:  # holds S18
    plans, outputs = Plans(engine), dict[str, Any]()
    plans.pause_s = 0.02  # 30 steps: the others are submitted long before the first has ended

    def ask(prompt: str) -> None:
        outputs[prompt] = engine.generate(prompt, with_(GREEDY_ON, max_tokens=120))[0]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    threads[0].start()
    assert plans.decoding.wait(WAIT_S)
    for thread in threads[1:]:
        thread.start()
    until(lambda: max(plans.decoded_rows) == len(PROMPTS))
    plans.pause_s = 0.0
    for thread in threads:
        thread.join(WAIT_S)
    assert plans.decoded_rows[0] == 1
    assert [token_ids([o])[0] for o in outputs.values()] == [foretold(o) for o in outputs.values()]


def test_completions_compute_their_prompt_once_and_end_by_themselves(
    engine: eSurge,
) -> None:  # holds S08
    plans, params = Plans(engine), with_(HOT, n=4, seed=5)
    prompt = list(range(500, 560))
    (output,) = engine.generate([prompt], params)
    assert plans.num_prefilled == len(prompt) + 3, "three completions compute the last token again"
    texts = [one.token_ids for one in output.outputs]
    assert len(set(map(tuple, texts))) == 4
    end = texts[2][5]
    assert [end in text for text in texts] == [False, False, True, False]
    (output,) = engine.generate([prompt], with_(params, stop_token_ids=(end,)))
    assert [one.token_ids for one in output.outputs] == [*texts[:2], texts[2][:6], texts[3]]
    assert [one.finish_reason for one in output.outputs] == ["length", "length", "stop", "length"]
    assert output.num_generated_tokens == 16 * 3 + 6


def test_only_the_rest_of_a_known_prompt_is_computed(engine: eSurge) -> None:  # holds S19
    plans = Plans(engine)
    prompts = [list(range(start, start + 60)) for start in range(500, 1100, 60)]
    counts = []
    for prompt in [prompts[0], prompts[0], *prompts[1:], prompts[-1], prompts[0]]:
        before = plans.num_prefilled
        (output,) = engine.generate([prompt], GREEDY_ON)
        assert token_ids([output]) == [foretold(output)]
        counts.append(plans.num_prefilled - before)
    assert counts[:2] == [60, 12], "three pages of 16 tokens are known"
    assert counts[2:-2] == [60] * 9
    assert counts[-2:] == [12, 60], "of 24 pages, those of the prompt used longest ago are evicted"


@within_minutes
def test_a_request_that_never_fits_is_refused_and_others_are_served(
    make_faked: Make,
) -> None:  # holds S20
    with make_faked(
        engine_options={"num_pages": 4}
    ) as engine:  # three of 16 tokens, and one of padding
        with pytest.raises(ValueError, match=r"Allowed: "):
            engine.generate([list(range(500, 600))], GREEDY_ON)
        output = engine.generate(PROMPT, GREEDY_ON)[0]
        assert token_ids([output]) == [foretold(output)]


def test_a_request_that_waits_for_another_says_how_long(make_faked: Make) -> None:  # holds S21
    with make_faked(max_num_seqs=1) as engine:
        first, second = engine.generate(PROMPTS[:2], with_(LONG, max_tokens=24))
    assert first.metrics is not None
    assert second.metrics is not None
    assert second.first_token_time is not None
    waited = second.metrics["queue_time"]
    assert waited > first.time_spent_generating / 2, "it begins when the first has ended"
    assert second.first_token_time > waited, "both are since its submission"
    assert second.processing_time == pytest.approx(waited + second.time_spent_generating, abs=1e-6)
    alone = 23 / (second.processing_time - second.first_token_time)
    assert second.tokens_per_second == pytest.approx(alone, rel=1e-6), (
        "neither queue nor first token counts"
    )
