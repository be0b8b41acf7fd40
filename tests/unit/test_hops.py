"""How many functions of ours a request passes through, so that their number does not grow."""

from __future__ import annotations

import collections
import re
import sys
import threading
import traceback
from types import CodeType, FrameType
from typing import Any

import pytest

from enginebay import LLM
from enginebay_runtime.compiling import StepCompiler
from tests.unit.serving import GREEDY, with_

MAX_FRAMES = 14
"""From the loop's first function to the function of the kernel of attention, in a trace."""
MAX_FRAMES_OF_COPIES = 15
"""The same for a decode step over a copy of its rows' pages."""
MAX_CALLS = 400
"""On all threads, for a request of one prefill and one decode call, as 16 tokens take with the
usual number of decode steps.
"""
MAX_DEPTHS = {"caller": 5, "enginebay-loop": 11, "enginebay-delivery": 7}
"""The longest chain of calls of each thread, for the same request."""

pytestmark = pytest.mark.xdist_group("llm")


def is_ours(file: str) -> bool:
    """Whether a file is of a package of ours, wherever the checkout lies."""
    return re.search(r"/enginebay(_\w+)?/(?!(.*/)?(site-packages|tests)/)", file) is not None


class Calls:
    """Counts calls of functions of ours, and the longest chain of them, by thread."""

    def __init__(self) -> None:
        self.num_calls: collections.Counter[str] = collections.Counter()
        self.longest: dict[str, list[str]] = {}
        self._chains: dict[str, list[str]] = collections.defaultdict(list)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code: CodeType = frame.f_code
        if event not in ("call", "return") or not is_ours(code.co_filename):
            return
        name = threading.current_thread().name
        if threading.current_thread() is threading.main_thread():
            name = "caller"
        chain = self._chains[name]
        if event == "call":
            self.num_calls[name] += 1
            chain.append(code.co_qualname)
            self.longest[name] = max(self.longest.get(name, []), [*chain], key=len)
        elif chain:
            chain.pop()


def test_a_request_makes_few_calls_and_no_long_chain_of_them(llm: LLM) -> None:
    params = with_(GREEDY, max_tokens=llm.config.decode_steps + 1, ignore_eos=True)
    llm.generate("Once upon a time there was", params)  # compiles and imports what it needs
    found, before = [Calls() for _ in range(3)], sys.getprofile()
    for one in found:
        threading.setprofile_all_threads(one)
        try:
            llm.generate("Once upon a time there was", params)
        finally:
            threading.setprofile_all_threads(before)
    # A loop that wakes before the device is ready looks again.
    calls = min(found, key=lambda one: one.num_calls.total())
    assert calls.num_calls.total() <= MAX_CALLS, calls.num_calls
    for thread, most in MAX_DEPTHS.items():
        chain = calls.longest[thread]
        assert len(chain) <= most, f"{thread}: {' > '.join(chain)}"


class Seen(Exception):  # ends a step that was traced
    """A step was traced, and is not compiled."""


@pytest.fixture
def traced(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """By kind of step, the frames of ours in the trace of a kernel of attention. Steps are traced
    again, and not compiled.
    """
    llm.generate("Once upon a time there was", GREEDY)  # so that every step is there
    found: dict[str, list[str]] = {}
    lower = StepCompiler.lower

    def lower_and_end(self: StepCompiler, key: Any) -> Any:
        found["traced"] = []
        lower(self, key)
        found[key.kind] = found.pop("traced")
        raise Seen

    for kernel in set(map(type, llm.plan.kernels.attention.values())):

        def watch(self: Any, *args: Any, called: Any = kernel.__call__, **named: Any) -> Any:
            stack = traceback.extract_stack()[:-1]
            ours = [f"{f.filename}:{f.name}" for f in stack if is_ours(f.filename)]
            if "traced" in found:
                found["traced"] = [*ours, f"{type(self).__name__}.__call__"]
            return called(self, *args, **named)

        monkeypatch.setattr(kernel, "__call__", watch)
    monkeypatch.setattr(StepCompiler, "lower", lower_and_end)
    monkeypatch.setattr(llm.engine.executor, "store", None)
    return found


@pytest.mark.parametrize("first", ["forward", "decode"])
def test_a_kernel_is_traced_in_few_frames(
    llm: LLM, traced: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    executor = llm.engine.executor
    kept = {
        name: program
        for name, program in executor._programs.items()
        if first == "decode" and name[0].kind not in ("decode", "compact")
    }
    monkeypatch.setattr(executor, "_programs", kept)
    monkeypatch.setattr(executor, "_chosen", {})
    with pytest.raises(Exception, match="Seen"):
        llm.generate("Once upon a time there was", GREEDY)
    [(kind, frames)] = traced.items()
    most = MAX_FRAMES_OF_COPIES if kind == "compact" else MAX_FRAMES
    assert kind in (first, "compact")
    assert len(frames) <= most, "\n".join(frames)
