"""The scheduler suite says of each fault of the zoo what is wrong, and of which request."""

from __future__ import annotations

import re

import pytest

from enginebay_testing.schedulers import scheduler_checks
from enginebay_testing.verdicts import FAULTS as FAULTY_VERDICTS
from enginebay_testing.verdicts import judge
from tests.zoo.schedulers import FAULTS

LONG = r"a request of 60 \+ 20 tokens, tenant 'mine', has not ended after 600 decisions"
SHORT = r"a request of 5 \+ 10 tokens, tenant 'mine', has not ended after 600 decisions"
NEVER = r".* request-4 was never admitted"
AMONG_SHORT = rf"{LONG} .* while others of 5 \+ 10 tokens kept coming:{NEVER}"
AMONG_LONG = rf"{SHORT} .* while others of 60 \+ 20 tokens kept coming:{NEVER}"
IDLE = "the decision is empty, although a request could run: "
CACHE = r"the decision needs \d+ tokens of cache \("

SAYS = {
    "last in, first out, by arrival": AMONG_SHORT,
    "last in, first out, by place": AMONG_SHORT,
    "longest prompt first": AMONG_LONG,
    "longest request first": AMONG_LONG,
    "shortest prompt first": AMONG_SHORT,
    "fewest new tokens first": AMONG_SHORT,
    "most urgent first": rf"{LONG} .* tokens, priority 3, kept coming:{NEVER}",
    "least urgent first": rf"{LONG} .* tokens, priority -3, kept coming:{NEVER}",
    "most cached first": rf"{LONG} .* tokens, num_cached 5, kept coming:{NEVER}",
    "tenants by name": AMONG_SHORT,
    "largest tenant first": AMONG_SHORT,
    "a tenant keeps its turn": AMONG_SHORT,
    "preempted requests last": rf"{LONG} .* request-4 was preempted once in decision \d+, and has "
    "not been admitted since",
    "preempts long prompts": rf"{LONG} .* request-4 was preempted \d+ times, last in decision \d+",
    "newest row alone": r"a request of 5 \+ 10 tokens has not ended after 600 decisions .* "
    "request-0 was admitted in decision 0, and has 9 tokens to decode left",
    "prompts before decoding": rf"{IDLE}request-\d+ can decode \d+ tokens more",
    "waits for cache": rf"{IDLE}request-\d+ can decode \d+ tokens more",
    "drops the last row": rf"{IDLE}request-\d+ can decode \d+ tokens more",
    "waits for a whole batch": rf"{IDLE}nothing runs, and request-0 could be admitted",
    "forgets cached prompts": rf"{IDLE}nothing runs, and request-\d+ could be admitted",
    "a row too many": r"more requests are admitted than there are free rows: 4 \(request-\d+, .*\),"
    " but 3 rows are free or preempted",
    "a token of cache too many": rf"{CACHE}34 for the prompt of request-5 and a token, ",
    "the whole cache for prompts": rf"{CACHE}34 for the prompt of request-5 and a token, ",
    "cached prompts need no cache": rf"{CACHE}4 for the prompt of request-\d+ and a token, ",
    "every decode step": rf"{CACHE}7 for request-\d+ for decode_steps = 8\)",
    "never preempts": rf"{CACHE}\d+ for request-\d+ for decode_steps = \d\)",
    "a token of the budget too many": r"33 tokens \(33 of prompts, and one for each of 0 decoding "
    r"rows\) exceed the budget of 32",
    "decodes beside the budget": r"33 tokens \(32 of prompts, and one for each of 1 decoding rows\)"
    " exceed the budget of 32",
    "a decode step too many": "decode_steps is 9, not between 1 and 8",
    "no decode step": "decode_steps is 0, not between 1 and 8",
    "decodes before the prompt is done": "request-7 is decoded before its prompt is prefilled: it "
    "has 8 tokens of it left",
    "decodes a row that has its last token": "request-2 is decoded although it has its last token",
    "decodes who waits": "request-0 is decoded before it is admitted",
    "decodes a row twice": r"request-\d+ is decoded 2 times in one decision",
    "decodes who is gone": r"the decision names 'request-\d+', which the view has not",
    "preempts and decodes a row": r"request-\d+ is preempted and decoded in one decision",
    "preempts who waits": r"request-\d+ is preempted, but waits and has no row",
    "prefills a token twice": "request-0 is to prefill 2 tokens, but has 1 left",
    "prefills no token": "request-1 is to prefill 0 tokens, and not at least 1",
    "remembers who is gone": "the state still holds requests that have ended: .*request-0",
    "changes its state": r"decide\(\) changed the state in place to \[0\]",
    "decides by a counter": r"for the same view and state, decide\(\) returned another decision",
    "a new object for a state": r"for the same view and state, decide\(\) returned .* state",
}
"""What the first check that fails has to say, as a pattern."""

QUICK = (
    "decodes a row that has its last token",
    "preempts and decodes a row",
    "preempted requests last",
    "newest row alone",
)


def first_complaint(name: str) -> str:
    """What the first failing check of a faulty scheduler says."""
    for _, check in scheduler_checks(FAULTS[name]):
        outcome = judge(check)
        if outcome.verdict in FAULTY_VERDICTS:
            return outcome.detail
    raise AssertionError(f"{name!r} passes the suite")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in FAULTS],
)
def test_the_suite_says_what_is_wrong(name: str) -> None:
    complaint = first_complaint(name)
    assert re.match(SAYS[name], complaint), complaint[:400]


def test_a_broken_rule_names_the_decision() -> None:
    complaint = first_complaint("decodes a row that has its last token")
    assert re.search(r"\ndecision 3: Decision\(.*decode=\(.*'request-2'", complaint), complaint


def test_every_fault_has_its_words() -> None:
    assert SAYS.keys() == FAULTS.keys()
